"""Whether the ranks of a machine can have memory in common: tried, before anything depends on it.

[Note: the trial]
What a system refuses is seldom foreseen: files in memory (seccomp, vm.memfd_noexec), sockets between
processes (a sandbox), descriptors that pass between them (user namespaces), mappings (limits of addresses).
So where memory in common is to be chosen by itself, the ranks make some, pass it on, write to it and look for
what the others wrote, and each says how that went: one that failed switches it off for all. What grows with
the model is looked up when that is known: see why_too_large.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.errors import RanksError
from infinity.ranks.shared_memory import PAGE, SharedMemory, make_private, open_shared, why_no_room
from infinity.sizes import format_size

if TYPE_CHECKING:
    from infinity.ranks.group import Ranks

_TRIAL_S = 10.0
"""Seconds, at most, in which a rank waits for another one to come for what is tried."""
_STATM, _MAPS = Path("/proc/self/statm"), Path("/proc/self/maps")
_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
_MARK = b"infinity"


def why_not_together(ranks: Ranks, timeout_s: float) -> str:
    """Try to have memory in common with the ranks on this machine; return why that does not work, the same on
    all ranks, or nothing where it works on all. Every rank calls it. See [Note: the trial].

    Raises: RanksError where a rank is gone.
    """
    memory, why = None, ""
    try:
        memory = open_shared(ranks, len(ranks.near) * PAGE, min(timeout_s, _TRIAL_S))
        memory.part(ranks.near.index(ranks.rank) * PAGE, len(_MARK))[:] = _MARK
    except (OSError, RanksError) as error:
        why = in_short(error)
    why = first_reason(ranks, why)  # all have written by then
    if memory is None or why:
        return why
    try:
        why = _why_unseen(memory, ranks)
    except OSError as error:
        why = in_short(error)
    finally:
        memory.close()
    return first_reason(ranks, why)


def _why_unseen(memory: SharedMemory, ranks: Ranks) -> str:
    """Say which rank's writes this one does not see, if there is one. Raises: OSError."""
    seen = memory.private(0, memory.nbytes)
    for place, one in enumerate(ranks.near):
        if seen[place * PAGE : place * PAGE + len(_MARK)] != _MARK:
            return f"what rank {one} writes is not seen by rank {ranks.rank}"
    make_private(seen)
    return ""


def first_reason(ranks: Ranks, why: str) -> str:
    """Return the first reason that any rank gives, if any does. Every rank calls it."""
    said = [one.decode() for one in ranks.each(why.encode(), "trying memory in common")]
    return next((one for one in said if one), "")


def in_short(error: Exception) -> str:
    """Return an error in a line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def why_too_large(nbytes: int, layers: int) -> str:
    """Return what keeps this process from mapping so many bytes, and half of them once more, privately, in as
    many parts as there are layers; nothing where nothing does.
    """
    addresses, private = _mapped_nbytes()
    for name, flag, limit, mapped, more in (
        ("RLIMIT_AS", "-v", resource.RLIMIT_AS, addresses, nbytes + nbytes // 2),
        ("RLIMIT_DATA", "-d", resource.RLIMIT_DATA, private, nbytes // 2),
    ):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY and mapped + more > most:
            return (
                f"{name}={most} (ulimit {flag}): {format_size(mapped)} are mapped, and memory in common "
                f"would take {format_size(more)} more"
            )
    most, mapped = _mappings()
    if mapped + 2 * layers > most:
        return f"vm.max_map_count={most}: {mapped} mappings are used, and there are {layers} layers"
    return why_no_room()


def _mapped_nbytes() -> tuple[int, int]:
    """Return the bytes of addresses that this process has, and of those that are private and written to."""
    try:
        fields = _STATM.read_text().split()
    except OSError:  # without a /proc nothing is known, and mapping says itself what it lacks
        return 0, 0
    return int(fields[0]) * PAGE, int(fields[5]) * PAGE


def _mappings() -> tuple[int, int]:
    """Return how many mappings this process may have, and how many it has."""
    try:
        with _MAPS.open("rb") as lines:
            return int(_MAP_COUNT.read_text()), sum(1 for _ in lines)
    except OSError:
        return sys.maxsize, 0

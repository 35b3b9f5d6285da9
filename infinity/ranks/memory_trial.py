"""Whether the ranks of a machine can have memory in common: tried, before anything depends on it.

[Note: the trial]
What a system refuses is seldom foreseen: files in memory (seccomp, vm.memfd_noexec), sockets between
processes (a sandbox), descriptors that pass between them (user namespaces), mappings (limits of addresses).
So where memory in common is to be chosen by itself, the ranks make some, pass it on, write to it and look for
what the others wrote, and each says how that went: one that failed switches it off for all. What grows with
the model is looked up when that is known: see why_too_large.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.errors import RanksError
from infinity.ranks.shared_memory import PAGE, SharedMemory, make_private, open_shared, why_no_room
from infinity.sizes import format_size

if TYPE_CHECKING:
    from infinity.ranks.group import Ranks

_TRIAL_S = 10.0
"""Seconds, at most, in which a rank waits for another one to come for what is tried."""
_STATM, _MAPS = Path("/proc/self/statm"), Path("/proc/self/maps")
_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_MARK = b"infinity"


def why_not_by_itself() -> str:
    """Return what limits this process, or its system, so that memory in common might fail where memory of its
    own would not; nothing where nothing does. Nobody who has not asked for it shall meet that.
    """
    if limit := why_no_room():
        return limit
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:  # how much of it the rest of the program needs nobody knows
        return f"RLIMIT_AS={most} (ulimit -v): each rank would map the weights three times"
    with contextlib.suppress(OSError):
        if _OVERCOMMIT.read_text().strip() == "2":
            return "vm.overcommit_memory=2: what is mapped counts as taken, and running out is a SIGBUS"
    return ""


def why_not_together(ranks: Ranks, timeout_s: float) -> str:
    """Try to have memory in common with the ranks on this machine; return why that does not work, the same on
    all ranks, or nothing where it works on all. Every rank calls it. See [Note: the trial].

    Raises: RanksError where a rank is gone.
    """
    memory, seen, why = None, None, ""
    place, size = ranks.near.index(ranks.rank), len(ranks.near)
    try:
        memory = open_shared(ranks, 2 * size * PAGE, min(timeout_s, _TRIAL_S))
        seen = memory.private(0, size * PAGE)  # before it is written to, as layers are
        memory.part(place * PAGE, len(_MARK))[:] = _MARK
    except (OSError, RanksError) as error:
        why = in_short(error)
    try:
        why = first_reason(ranks, why)  # all have written by then
        if memory is None or why:
            return why
        try:
            why = _why_unseen(seen, ranks) or _why_it_stays(memory, (size + place) * PAGE)
        except OSError as error:
            why = in_short(error)
    finally:
        if memory is not None:
            memory.close()
    return first_reason(ranks, why)


def _why_unseen(seen: Any, ranks: Ranks) -> str:
    """Say which rank's writes this one does not see, if there is one. Raises: OSError."""
    for place, one in enumerate(ranks.near):
        if seen[place * PAGE : place * PAGE + len(_MARK)] != _MARK:
            return f"what rank {one} writes is not seen by rank {ranks.rank}"
    make_private(seen)
    return ""


def _why_it_stays(memory: SharedMemory, offset: int) -> str:
    """Say that a page which this rank gives back stays, if it does. Raises: OSError, as where the program has
    locked all that it maps (mlockall).
    """
    page = memory.part(offset, PAGE)
    page[:1] = b"!"
    memory.drop(offset, PAGE)
    return "" if page[:1] == b"\0" else "what is given back stays"


def first_reason(ranks: Ranks, why: str) -> str:
    """Return the first reason that any rank gives, if any does. Every rank calls it."""
    said = [one.decode() for one in ranks.each(why.encode(), "trying memory in common")]
    return next((one for one in said if one), "")


def in_short(error: Exception) -> str:
    """Return an error in a line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def why_too_large(nbytes: int, layers: int) -> str:
    """Return what keeps this process from mapping half of so many bytes privately, in as many parts as there
    are layers, while the rest of the program has as many mappings; nothing where nothing does.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY and (private := _private_nbytes()) + nbytes // 2 > most:
        return (
            f"RLIMIT_DATA={most} (ulimit -d): {format_size(private)} are mapped, and memory in common would "
            f"take {format_size(nbytes // 2)} more"
        )
    most, mapped = _mappings()
    if mapped + 2 * layers > most // 2:
        return f"vm.max_map_count={most}: {mapped} mappings are used, and there are {layers} layers"
    return why_not_by_itself()


def _private_nbytes() -> int:
    """Return the bytes of addresses of this process that are private and written to."""
    try:
        return int(_STATM.read_text().split()[5]) * PAGE
    except OSError:  # without a /proc nothing is known, and mapping says itself what it lacks
        return 0


def _mappings() -> tuple[int, int]:
    """Return how many mappings this process may have, and how many it has."""
    try:
        with _MAPS.open("rb") as lines:
            return int(_MAP_COUNT.read_text()), sum(1 for _ in lines)
    except OSError:
        return sys.maxsize, 0

"""The memory that this process may use: the machine's, or less in a control group (a container)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from infinity.errors import HostMemoryError
from infinity.sizes import format_size

if TYPE_CHECKING:  # it imports torch, for which `infinity doctor` does not wait
    from infinity.ranks.group import Ranks

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
# By cgroup version: folder under the root, files of limit and use, key of the reclaimable cache in that use.
_V2 = ("", "memory.max", "memory.current", "inactive_file")
_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NO_LIMIT = 1 << 62
"""Bytes: version 1 writes a limit above it where none is set."""


def total_nbytes() -> tuple[int, str]:
    """Return the bytes of memory that processes here may use, and the origin of the limit, for errors."""
    total, why = int(psutil.virtual_memory().total), "this machine has"
    for folder, limit, _ in _groups():
        if limit < total:
            total, why = limit, f"the control group {folder} has on this machine"
    return total, why


def available_nbytes() -> int:
    """Return the bytes of memory that can still be allocated."""
    left = (max(0, limit - used) for _, limit, used in _groups())
    return min(int(psutil.virtual_memory().available), *left, 1 << 62)


def share_of(host_nbytes: int | None, ranks: Ranks) -> int:
    """Return each rank's share, in bytes, of a machine's host_memory: the smallest of all machines'.

    host_nbytes: None stands for half of the available memory.

    Raises: HostMemoryError if this machine has less; RanksError if another machine has.
    """
    with ranks.together("comparing host_memory with the machine's"):
        if host_nbytes is not None:
            check_holds(host_nbytes)
    nbytes = available_nbytes() // 2 if host_nbytes is None else host_nbytes
    return ranks.least(nbytes // ranks.local_size, "divide host_memory")


def check_holds(host_nbytes: int) -> None:
    """Check that this machine, whose ranks divide it, has as much memory as host_memory.

    Raises: HostMemoryError with both sizes, and the one to set.
    """
    total, why = total_nbytes()
    if host_nbytes > total:
        available = available_nbytes()
        raise HostMemoryError(
            f"host_memory={format_size(host_nbytes)} is more than {why}: {format_size(total)}. Set at most "
            f"what is available now, host_memory={available} ({format_size(available)}, for all ranks of the "
            "machine together), or leave it out for half of that."
        )


def check_available(nbytes: int, what: str, cure: str = "") -> None:
    """See that this machine can still hold plain copies. what: that takes `nbytes`; cure: what to do instead.

    Raises: HostMemoryError with both numbers.
    """
    available = available_nbytes()
    if nbytes > available:
        raise HostMemoryError(
            f"{what} take {format_size(nbytes)}, "
            f"{format_size(available)} of memory are available. {cure}".rstrip()
        )


def _groups() -> Iterator[tuple[Path, int, int]]:
    """Yield this process's control groups with a memory limit: folder, limit and unreclaimable bytes."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        below, limit, use, cache = _V1 if controllers else _V2
        root = _ROOT / below
        folder = root / own.lstrip("/")
        for one in (folder, *folder.parents):
            found = _numbers(one, limit, use, cache) if one.is_relative_to(root) else None
            if found is not None:
                yield one, *found


def _numbers(folder: Path, limit: str, use: str, cache: str) -> tuple[int, int] | None:
    try:
        most = (folder / limit).read_text().strip()
        if not most.isdigit() or int(most) > _NO_LIMIT:
            return None
        used = int((folder / use).read_text())
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(most), used - int(rows.get(cache, 0))
    except (OSError, ValueError):
        return None

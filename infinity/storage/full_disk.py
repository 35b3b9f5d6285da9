"""What disks have room for, and the error of one that does not hold what a training needs in all."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence

from infinity.aio import StorageFullError
from infinity.sizes import format_size

_CURE = """
  or: Config(nvme=[...]) with several drives; state_dtype="bf16" or "int8", with smaller moments; \
`infinity plan check` says beforehand what a training needs"""


def room_in(folders: Sequence[str]) -> int:
    """Return the bytes by which a file that is striped evenly over these folders can grow."""
    sharers = Counter(os.stat(folder).st_dev for folder in folders)
    parts = (shutil.disk_usage(folder).free // sharers[os.stat(folder).st_dev] for folder in folders)
    return min(parts) * len(folders)


def of_whole(
    full: StorageFullError, where: str, names: Sequence[str], what: str, needed_nbytes: int, taken_nbytes: int
) -> StorageFullError:
    """Return the error of one allocation as that of everything that has to fit the same disk.

    where, names: the module that found no room, and what of it. what: what is needed in all, in words.
    needed_nbytes: that. taken_nbytes: space that the run's files have.
    """
    missing = max(needed_nbytes - taken_nbytes, full.needed)
    text = str(
        StorageFullError.of_file(full.errno or 0, full.filename, needed=missing, free=full.free).strerror
    )
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    purpose = (
        f"\n  for: {what}; {format_size(taken_nbytes)} are allocated so far, {format_size(full.free)} free"
        f"\n  the first without room: {where} ({', '.join(names[:2])}{more})"
    )
    return StorageFullError(full.errno, text + purpose + _CURE, full.filename).with_sizes(
        needed=missing, free=full.free
    )

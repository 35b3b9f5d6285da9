"""Checks of the folders to measure in, and of the space that measurements take."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from infinity import aio
from infinity.errors import ConfigError

LEAST_NBYTES = 32 << 20
"""The smallest file to measure with: a smaller one would measure a drive's own memory."""


def check_folder(folder: Path | str, option: str = "--nvme") -> None:
    """Refuse a path that is not a writable folder. A missing folder is not created: after a typing error, or
    with a drive that is not mounted, the wrong disk would be measured.

    Raises: ConfigError that names the option, the problem and what to do.
    """
    path = Path(folder)
    if not path.exists():
        raise ConfigError(
            f"{option} {folder}: there is no such folder. Create it (mkdir -p) on the drive to measure."
        )
    if not path.is_dir():
        raise ConfigError(f"{option} {folder}: that is a file. Name a folder on the drive to measure.")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{option} {folder}: user {os.geteuid()} may not write there. Choose another folder, or chown it."
        )


def check_apart(folders: Sequence[str], option: str = "--nvme") -> None:
    """Refuse a folder that is named twice, even by different paths. Raises: ConfigError naming both."""
    named: dict[tuple[int, int], str] = {}
    for folder in folders:
        status = os.stat(folder)
        place = status.st_dev, status.st_ino
        if place in named:
            raise ConfigError(
                f"{option} {named[place]} and {option} {folder} are one folder: name each folder once."
            )
        named[place] = folder


def shared(folders: Sequence[str]) -> Iterator[str]:
    """Yield a line about each filesystem that holds several of the folders."""
    on: dict[int, list[str]] = {}
    for folder in folders:
        on.setdefault(os.stat(folder).st_dev, []).append(folder)
    for together in on.values():
        if len(together) > 1:
            yield f"{' and '.join(together)} lie on one filesystem: that is one disk, not several"


def file_nbytes(folder: Path, nbytes: int, unit_nbytes: int) -> int:
    """Return the size of a file to measure with: `nbytes`, but at most a quarter of the free space, in units.

    Raises: aio.StorageFullError if that is less than 32 MiB.
    """
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    nbytes = min(nbytes, free // 4) // unit_nbytes * unit_nbytes
    if nbytes < LEAST_NBYTES:
        raise aio.StorageFullError.of_file(errno.ENOSPC, str(folder), needed=4 * LEAST_NBYTES, free=free)
    return nbytes

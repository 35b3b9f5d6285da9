"""The folder of a run of `infinity train`: its log and its picture."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from infinity.errors import ConfigError
from infinity.sizes import format_size

LOG, PICTURE = "log.jsonl", "loss.png"


def check_room(folder: str, nbytes: int) -> None:
    """Refuse a folder to save to whose drive has less than `nbytes` free: before training, not behind it.

    Raises: ConfigError naming --save.
    """
    there = next(one for one in Path(folder).absolute().parents if one.exists())
    free_nbytes = shutil.disk_usage(there).free
    if free_nbytes < nbytes:
        raise ConfigError(
            f"--save {folder}: the weights take {format_size(nbytes)}, and {there} has "
            f"{format_size(free_nbytes)} free, {format_size(nbytes - free_nbytes)} too little. Free space "
            "there, or name a folder on another drive."
        )


@contextlib.contextmanager
def run_folder(out: str | None) -> Iterator[Path]:
    """Create the folder of a new run, and remove it after an error before the first step.

    Raises: ConfigError where `out` already holds something.
    """
    if out is None:
        folder = _new_folder(Path("runs"))
    else:
        folder = Path(out)
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"out: {out} is not empty, and a run is never overwritten. Name another folder."
            )
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        log = folder / LOG
        if log.exists() and log.stat().st_size == 0:
            log.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()  # does nothing to one that holds something


def folder_beside(out: str | None) -> Path:
    """Return the folder for files of ranks without a log: the one that holds rank 0's folder."""
    folder = Path("runs") if out is None else Path(out).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _new_folder(parent: Path) -> Path:
    """Create a folder named after the time, with a number if that exists."""
    name = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise ConfigError(
        f"{parent} already holds 999 runs that started in this second. Name a folder with --out."
    )


@contextlib.contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Add the file's name to an error of writing, and on a full disk the free space."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            status = os.statvfs(path.parent)
            free = format_size(status.f_bavail * status.f_frsize)
            cure = f"{free} are free. Free space there, or name another folder with --out."
            error.strerror = f"{error.strerror}; {cure}"
        raise

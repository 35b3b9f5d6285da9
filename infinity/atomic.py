"""Folders that appear whole, or not at all.

[Note: how a folder is put in place]
It is filled beside its place, under a hidden name; files and folder are brought to the disk (fsync); then one
rename puts it there, and an fsync of the folder above keeps it there. An existing folder is exchanged in one
step (renameat2, RENAME_EXCHANGE) and deleted afterwards: at no moment is there neither the old nor the new.
Whoever fills a folder holds a lock on it; one without is what a killed process left, and the next goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from infinity.errors import UnsupportedError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h, stdio.h


@contextlib.contextmanager
def new_folder(path: Path, may_replace: Callable[[Path], bool]) -> Iterator[Path]:
    """Give an empty folder to fill; at the end of the `with` it is at `path`. After an error nothing is left.

    may_replace: asked about a folder at `path` that is not empty.

    Raises: FileExistsError where it may not be replaced; FileNotFoundError without the folder above;
    UnsupportedError on a file system that cannot exchange folders; OSError.
    """
    path = path.absolute()
    replaces = _check(path, may_replace)
    prefix = f".{path.name}.saving-"
    _remove_abandoned(path.parent, prefix)
    filling = path.parent / f"{prefix}{secrets.token_hex(6)}"
    filling.mkdir()
    fd = os.open(filling, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd)
        if replaces:
            _try_exchange(filling)
        yield filling
        for file in filling.iterdir():
            _sync(file, os.O_RDONLY)
        os.fsync(fd)
        if replaces:
            _exchange(filling, path)
        else:
            filling.rename(path)
        _sync(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(fd)
        shutil.rmtree(filling, ignore_errors=True)  # what was replaced, or what an error has left


def _sync(path: Path, flags: int) -> None:
    """Bring a file, or a folder's entries, to the disk."""
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check(path: Path, may_replace: Callable[[Path], bool]) -> bool:
    """Return whether there is something to replace; refuse what may not be."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"the folder above {path} does not exist", str(path.parent))
    if not os.path.lexists(path):
        return False
    if path.is_symlink() or not path.is_dir():
        raise FileExistsError(errno.EEXIST, "expected a folder, or nothing, there", str(path))
    if not any(path.iterdir()):
        return False
    if not may_replace(path):
        raise FileExistsError(errno.EEXIST, "not empty, and not to be replaced; name a new folder", str(path))
    return True


def _lock(fd: int) -> None:
    with contextlib.suppress(OSError):  # some network file systems have no locks: then nobody removes it
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove what killed processes have left half filled."""
    for left in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(fd)


def _try_exchange(folder: Path) -> None:
    """See that the file system can exchange folders before hours are spent on filling one."""
    one, other = folder / "one", folder / "other"
    one.mkdir()
    other.mkdir()
    try:
        _exchange(one, other)
    except OSError as error:
        raise UnsupportedError(
            f"{folder.parent}: this file system cannot exchange two folders in one step "
            f"({os.strerror(error.errno or 0)}), so an existing checkpoint cannot be replaced safely. Save "
            "to a new folder and delete the old one afterwards."
        ) from error
    finally:
        one.rmdir()
        other.rmdir()


def _exchange(one: Path, other: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))

"""Folders that appear complete, or not at all.

[Note: how a folder is put in place]
It is filled beside its place, under a hidden name; files and folder are synced to disk (fsync); then a rename
puts it in place, and an fsync of the parent makes that durable. An existing folder is exchanged in one step
(renameat2, RENAME_EXCHANGE) and deleted afterwards: at any moment either the old or the new one is there. The
process that fills a folder holds a lock on it; one without a lock was left by a killed process, and the next
save deletes it.

[Note: foreign files]
Only files that we wrote are replaced, in a folder of the same kind. Other files in it (a tokenizer, notes)
get a second name in the new folder before the exchange: a hard link, or a copy if the file system has none. A
folder without files of ours is never changed. If what is being saved would be lost with the process, it is
put beside such a folder, under a free name, which the error names.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import UnsupportedError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h, stdio.h
_NO_LINK = (errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Older:
    """The kind of folder that a new one may replace; see [Note: foreign files].

    Attributes:
        what: the kind, for errors.
        names: returns the files of ours in a folder, relative to it; None if the folder is of another kind.
        overwrite: whether such a folder may be replaced.
        how: the option that allows it, for errors.
        rescues: if the folder may not be replaced, put the new one beside it, under another name.
    """

    what: str
    names: Callable[[Path], Collection[str] | None]
    overwrite: bool = False
    how: str = "overwrite=True"
    rescues: bool = False


@contextlib.contextmanager
def new_folder(path: Path, older: Older) -> Iterator[Path]:
    """Give an empty folder to fill, which is at `path` after the `with`; after an error nothing is left.

    older: what may be replaced there. Missing parents are created.

    Raises: FileExistsError if what is there may not be replaced; with `older.rescues` after the `with`, and
    its filename2 is where the new folder is. UnsupportedError on a file system that cannot exchange folders;
    OSError.
    """
    path = path.absolute()
    _make(path.parent)
    replaced, refused = _looked_at(path, older)
    prefix = f".{path.name}.saving-"
    _remove_abandoned(path.parent, prefix)
    filling = path.parent / f"{prefix}{secrets.token_hex(6)}"
    filling.mkdir()
    fd = os.open(filling, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd)
        yield filling
        _sync_all(filling)
        if replaced is not None:
            refused = _kept_others(path, filling, replaced, older)
        if refused:
            raise _rescued(filling, path, refused)
        if replaced is not None:
            _exchange(filling, path)
        else:
            filling.rename(path)
        sync(path.parent)
    finally:
        os.close(fd)
        shutil.rmtree(filling, ignore_errors=True)  # the replaced folder, or what an error left


def _looked_at(path: Path, older: Older) -> tuple[Collection[str] | None, str]:
    """Return the files to replace, None without a folder; and why none may be replaced, "" if they may.

    Raises: as `check_replaceable`, unless `older.rescues`.
    """
    try:
        return check_replaceable(path, older), ""
    except (FileExistsError, UnsupportedError) as error:
        if not older.rescues or path == path.parent:
            raise
        return None, _why(error)


def _kept_others(path: Path, filling: Path, replaced: Collection[str], older: Older) -> str:
    """Carry foreign files over; return why that failed, "" if it did not.

    Raises: OSError if it failed, unless `older.rescues`.
    """
    try:
        _carry_over(path, filling, replaced)
    except OSError as error:
        if not older.rescues:
            raise
        return _why(error)
    return ""


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def check_replaceable(path: Path, older: Older) -> Collection[str] | None:
    """Return the files of the folder at `path` that are to be replaced; None if there is nothing.

    Raises: FileExistsError if what is there may not be replaced; UnsupportedError if the file system cannot
    exchange folders in one step.
    """
    path = path.absolute()
    replaced = _check(path, older)
    if replaced is not None:
        probe = path.parent / f".{path.name}.saving-{secrets.token_hex(6)}"
        probe.mkdir()
        try:
            _try_exchange(probe)
        finally:
            shutil.rmtree(probe, ignore_errors=True)
    return replaced


def _check(path: Path, older: Older) -> Collection[str] | None:
    """See `check_replaceable`."""
    if not os.path.lexists(path):
        return None
    if path.is_symlink() or not path.is_dir():
        raise _refused(path, "there is a file or a link, which is never replaced: name a new folder")
    there = sorted(entry.name for entry in path.iterdir())
    if not there:
        return None
    names = older.names(path)
    if names is not None and older.overwrite:
        return names
    if names is not None:
        raise _refused(path, f"{older.what} is there: {older.how} replaces it; or name a new folder")
    shown = ", ".join(there[:_SHOWN]) + (f" and {len(there) - _SHOWN} more" if there[_SHOWN:] else "")
    raise _refused(
        path, f"not empty ({shown}), and not {older.what}: it is never replaced. Name a new folder"
    )


def _refused(path: Path, why: str, beside: Path | None = None) -> FileExistsError:
    return FileExistsError(errno.EEXIST, why, str(path), None, beside and str(beside))


def _rescued(filling: Path, path: Path, refused: str) -> FileExistsError:
    """Put a filled folder beside one that may not be replaced; return the error to raise."""
    number = 2
    while os.path.lexists(beside := path.with_name(f"{path.name}-{number}")):
        number += 1
    filling.rename(beside)
    sync(path.parent)
    why = f"{refused.rstrip('.')}. So that nothing is lost, everything was saved in {beside} instead"
    return _refused(path, why, beside)


def _make(folder: Path) -> None:
    """Create a folder and its missing parents, and sync their names to disk."""
    if folder.is_dir():
        return
    if os.path.lexists(folder):
        raise NotADirectoryError(errno.ENOTDIR, "a file or a dangling link, expected a folder", str(folder))
    _make(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def _sync_all(folder: Path) -> None:
    """Sync a folder and everything in it to disk."""
    for below, _, files in os.walk(folder):
        for name in files:
            sync(Path(below, name))
        sync(Path(below))


def _carry_over(old: Path, new: Path, replaced: Collection[str]) -> None:
    """Give everything in `old`, except the `replaced` files, a second name in `new`, and sync that to disk.

    Raises: FileExistsError if that is impossible, before anything is carried over.
    """
    for within in list(_others(old, new, replaced, old.stat().st_dev)):
        target = new / within
        if (old / within).is_dir() and not (old / within).is_symlink():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            _second_name(old / within, target)
    for below, _, _ in os.walk(new):
        sync(Path(below))


def _others(old: Path, new: Path, replaced: Collection[str], device: int, below: str = "") -> Iterator[str]:
    """Yield the foreign files, links and empty folders in `old`, relative to it."""
    with os.scandir(old / below) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        within = str(Path(below, entry.name))
        if entry.is_dir(follow_symlinks=False):
            if entry.stat(follow_symlinks=False).st_dev != device:
                raise _refused(old, f"another file system is mounted on {within} in it: not replaced")
            yield from _others(old, new, replaced, device, within)
            if not list(Path(entry.path).iterdir()):
                yield within
        elif within not in replaced:
            if os.path.lexists(new / within):
                raise _refused(
                    old, f"{within} in it is not ours, but has the name of a file to be written: not replaced"
                )
            yield within


def _second_name(file: Path, target: Path) -> None:
    """Give a file, or a link, the second name `target`; copy it if the file system has no hard links."""
    try:
        os.link(file, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copy2(file, target, follow_symlinks=False)
        if not target.is_symlink():
            sync(target)


def sync(path: Path) -> None:
    """Sync a file, or a folder's entries, to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    with contextlib.suppress(OSError):  # some network file systems have no locks, and then no cleanup
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove half-filled folders of killed processes."""
    for left in parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):
            fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(fd)


def _try_exchange(folder: Path) -> None:
    """Check that the file system can exchange folders, before hours are spent on filling one."""
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

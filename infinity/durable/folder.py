"""The folder of a durable run: opened once, checked and locked; its files are opened relative to it.

[Note: ownership of the folder]
The folder that `nvme` names has a folder RUN, with one folder per rank. Both belong to this user, no other
user may write in them, and no symbolic link is followed on the way. The folder above may be writable by
others only if it is sticky, so that they cannot rename what is ours. So no other user can replace a file of
the run. Files are regular, mode 0600, with one name. A lock on the rank's folder keeps a second run out; it
ends with the process, and a forked child closes its copy at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from infinity import aio
from infinity.aio.files import Descriptor
from infinity.errors import ConfigError

RUN = "infinity-run"
_SLOTS = ("commit-0", "commit-1")
_PART = "part-of"
_RANK = re.compile(r"rank([0-9]{1,9})")
_STATE = re.compile(r"state-([0-9a-f]{16})-[0-9]+")
_SHOWN = 5
"""Names of files that the error for a folder without a run lists."""
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RunFolder:
    """One rank's folder of a durable run, under one path; see [Note: ownership of the folder]."""

    def __init__(
        self,
        base: str,
        rank: int = 0,
        *,
        create: bool = True,
        otherwise: str = "give this one another folder (nvme=...)",
    ) -> None:
        """Open the folder, create it if missing, and lock it. otherwise: the cure that the error names if
        another process has locked it.

        Raises: ConfigError naming the path, if other users could change the folder, if it does not exist
        (without `create`), or if another process has locked it.
        """
        self.base = base
        self.path = str(Path(base, RUN, f"rank{rank}"))
        with contextlib.ExitStack() as opened:
            above = _opened(base, None, "", opened, create=False, follow=True)
            _check_above(above, base)
            run = _opened(RUN, above, base, opened, create=create)
            fd = _opened(f"rank{rank}", run, str(Path(base, RUN)), opened, create=create)
            self._folder = Descriptor(os.dup(fd))
        self._slots: dict[int, Descriptor] = {}
        self._allocated = [0, 0]
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise ConfigError(
                f"{self.path} belongs to a durable run that another process has open. Wait for it to end, or "
                f"{otherwise}."
            ) from None

    @property
    def fd(self) -> int:
        """The folder's descriptor."""
        return self._folder.fd

    # The two slots; see commit

    def read_slots(self) -> list[bytes]:
        """Return the slots' bytes; none for a slot that does not exist."""
        found = []
        for name in _SLOTS:
            try:
                with _plain_file(self.fd, name, os.O_RDONLY, self.path) as fd:
                    found.append(_read(fd))
            except FileNotFoundError:
                found.append(b"")
        return found

    def write_slot(self, number: int, data: bytes) -> None:
        """Write a slot, and return when it is on disk.

        Raises: aio.IoError naming the file.
        """
        name, written = _SLOTS[number], 0
        try:
            new = number not in self._slots
            if new:
                with _plain_file(self.fd, name, os.O_RDWR | os.O_CREAT, self.path) as fd:
                    self._slots[number] = Descriptor(os.dup(fd))
            fd = self._slots[number].fd
            if len(data) > self._allocated[number]:
                nbytes = max(len(data) * 5 // 4, 1 << 16)
                with contextlib.suppress(OSError):  # not every file system can: then the write finds out
                    os.posix_fallocate(fd, 0, nbytes)
                self._allocated[number] = nbytes
            while written < len(data):
                written += os.pwrite(fd, memoryview(data)[written:], written)
            os.fdatasync(fd)
            if new:
                os.fsync(self.fd)
        except OSError as error:
            file, code = str(Path(self.path, name)), error.errno or errno.EIO
            raise aio.IoError.of_request(
                code, "write", file, offset=0, nbytes=len(data), failed_at=written, what="a commit"
            ) from error

    # Further folders of a striped run

    def read_part(self) -> tuple[str, str] | None:
        """Return the id and first folder of the run that has this as a further folder; None if none has."""
        try:
            with _plain_file(self.fd, _PART, os.O_RDONLY, self.path) as fd:
                run, _, first = _read(fd).decode(errors="replace").partition(" ")
        except FileNotFoundError:
            return None
        return run, first.strip()

    def write_part(self, run: str, first: str) -> None:
        """Mark this as a further folder of `run`, whose first one is `first`, on disk."""
        with _plain_file(self.fd, _PART, os.O_RDWR | os.O_CREAT, self.path) as fd:
            os.pwrite(fd, f"{run} {first}\n".encode(), 0)
            os.fdatasync(fd)
        os.fsync(self.fd)

    # The file of extents

    def create_state(self, engine: aio.IoEngine, name: str) -> aio.File:
        """Create the file for a new run's extents."""
        file = engine.create_named(self.fd, name)
        os.fsync(self.fd)
        return file

    def open_state(self, engine: aio.IoEngine, name: str) -> aio.File:
        """Open the file with a committed run's extents.

        Raises: ConfigError if it does not exist, or is not a file of this user's run.
        """
        try:
            with _plain_file(self.fd, name, os.O_RDONLY, self.path):
                return engine.open_named(self.fd, name)
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path} has no file {name}, which its commit names. Name all folders of the run, in "
                f"its order; or start anew: {wiping([self])}."
            ) from None

    def remove_states(self, but: str | None = None) -> None:
        """Remove the files of extents, except those of the run `but`."""
        for name in os.listdir(self.fd):  # noqa: PTH208 - of a descriptor
            match = _STATE.fullmatch(name)
            if match is not None and match[1] != but:
                os.unlink(name, dir_fd=self.fd)

    @property
    def nbytes(self) -> int:
        """The bytes of the run's files on disk.

        Raises: ConfigError if there is a folder instead of a file, which `wipe` could not remove.
        """
        found = 0
        for name in os.listdir(self.fd):  # noqa: PTH208 - of a descriptor
            if name in (*_SLOTS, _PART) or _STATE.fullmatch(name):
                status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    raise ConfigError(f"{self.path}/{name} is a folder, expected a file of a run. Remove it.")
                found += status.st_blocks * 512
        return found

    def wipe(self) -> None:
        """Remove the run: its commits first, so that no commit names a file that is gone."""
        for name in (*_SLOTS, _PART):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)
        os.fsync(self.fd)
        self.remove_states()

    def close(self) -> None:
        """Close and unlock the folder."""
        for slot in self._slots.values():
            slot.close()
        self._folder.close()


def ranks_in(base: str) -> list[int]:
    """Return the ranks that have a folder of a run under a path; none for an empty folder.

    Raises: ConfigError naming the path, if it does not exist, if other users could change it, or if it holds
    other files and no run.
    """
    if Path(base).exists() and not Path(base).is_dir():
        raise ConfigError(f"{base} is a file. Name the folder that nvme=... names in the run's Config.")
    with contextlib.ExitStack() as opened:
        above = _opened(base, None, "", opened, create=False, follow=True)
        _check_above(above, base)
        path, names, ranks = base, os.listdir(above), []  # noqa: PTH208 - of a descriptor
        if RUN in names:
            path, run = str(Path(base, RUN)), _opened(RUN, above, base, opened, create=False)
            names = os.listdir(run)  # noqa: PTH208 - of a descriptor
            ranks = sorted(int(match[1]) for match in map(_RANK.fullmatch, names) if match)
    if names and not ranks:
        shown = ", ".join(sorted(names)[:_SHOWN]) + (
            f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
        )
        raise ConfigError(
            f"{path} holds no durable run, but {shown}. Name the folder that nvme=... names in the run's "
            f"Config: the one with {RUN} in it."
        )
    return ranks


def wiping(folders: Sequence[RunFolder]) -> str:
    """Return the call that removes the run in these folders, for error messages."""
    bases = [folder.base for folder in folders]
    return f"infinity.wipe({bases[0]!r})" if len(bases) == 1 else f"infinity.wipe({bases!r})"


def run_files(folder: Path) -> set[str] | None:
    """Return the files, relative to `folder`, of the run or snapshot in it; None if there is none, or if a
    process has it open.
    """
    found: set[str] = set()
    places = [place for run in (RUN, f"path*/{RUN}") for place in folder.glob(f"{run}/rank*")]
    for place in places:
        try:
            fd = os.open(place, _FLAGS)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        finally:
            os.close(fd)
        for file in place.iterdir():
            if file.name in (*_SLOTS, _PART) or _STATE.fullmatch(file.name):
                found.add(str(file.relative_to(folder)))
    return found or None


def state_name(run: str, path: int) -> str:
    """Return the name of the file with a run's extents in the folder of index `path`."""
    return f"state-{run}-{path}"


def _opened(
    name: str,
    above: int | None,
    where: str,
    opened: contextlib.ExitStack,
    *,
    create: bool,
    follow: bool = False,
) -> int:
    """Open a folder relative to the one above, and check that only this user can write in it."""
    path = str(Path(where, name))
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above)
            if above is not None:
                os.fsync(above)
    try:
        fd = os.open(name, _FLAGS & ~os.O_NOFOLLOW if follow else _FLAGS, dir_fd=above)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such folder, so no durable run") from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise ConfigError(f"{path} is a link or a file, expected a folder. Remove it.") from None
    opened.callback(os.close, fd)
    if above is not None:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ConfigError(
                f"{path} belongs to user {status.st_uid}, mode {stat.filemode(status.st_mode)}; it has to "
                f"belong to user {os.geteuid()}, and nobody else may write in it. Choose another folder "
                "(nvme=...), or chmod go-w."
            )
    return fd


def _check_above(fd: int, path: str) -> None:
    """Check that no other user can rename or remove files in the folder above the run's."""
    status = os.fstat(fd)
    others = status.st_mode & 0o002 and not status.st_mode & stat.S_ISVTX
    if others or status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"nvme={path!r}: mode {stat.filemode(status.st_mode)}, user {status.st_uid}: another user could "
            "replace the durable run's folder. Choose another folder, or chmod o-w."
        )


@contextlib.contextmanager
def _plain_file(folder: int, name: str, flags: int, where: str) -> Iterator[int]:
    """Open a file of the run, and check that it is regular, this user's, and has one name."""
    path = str(Path(where, name))
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise ConfigError(f"{path} is a link, expected a file of a run. Remove it.") from None
    try:
        status = os.fstat(fd)
        plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()
        if not plain or status.st_mode & 0o077:
            raise ConfigError(
                f"{path} is not a file that a run has created: {stat.filemode(status.st_mode)}, "
                f"{status.st_nlink} names, user {status.st_uid}. Remove it."
            )
        yield fd
    finally:
        os.close(fd)


def _read(fd: int) -> bytes:
    data = bytearray()
    while part := os.read(fd, 1 << 24):
        data += part
    return bytes(data)

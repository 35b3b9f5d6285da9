"""Private files: nameless by default, mode 0600, opened relative to a folder.

[Note: nameless files] No other process can open, delete or replace a file without a name, and the kernel
frees its space when the process ends. A forked child would keep the space for as long as it lives, so the
files are closed in the child at once; it could not use them anyway. On file systems without O_TMPFILE (NFS),
a file is created under a random name and unlinked at once.
"""

import contextlib
import errno
import os
import secrets
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from infinity.aio.errors import FLUSH, IoError, StorageFullError
from infinity.aio.library import load

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


Folder = int | str | os.PathLike[str]
"""A folder: its path, or a descriptor of it."""

_ALLOCATION_NBYTES = 1 << 30  # per system call, so that Ctrl-C works in between
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)

_descriptors: "weakref.WeakSet[Descriptor]" = weakref.WeakSet()


def _close_in_child() -> None:
    for descriptor in list(_descriptors):
        descriptor.close()


os.register_at_fork(after_in_child=_close_in_child)


class Descriptor:
    """An open file's descriptor, closed when neither its File nor a request in flight needs it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_open = True
        self._closing = weakref.finalize(self, os.close, fd)
        # At exit requests may be in flight, and a closed descriptor's number may be reused for another file.
        self._closing.atexit = False
        _descriptors.add(self)

    def close(self) -> None:
        """Close it now; a second call does nothing."""
        self.is_open = False
        self._closing()


class Waiter(Protocol):
    """The part of an engine that its files use."""

    def wait_for_file(self, file: "File") -> None:
        """Wait until no request to `file` is in flight."""


class File:
    """An open file that an engine reads and writes.

    Attributes:
        path: its path, for messages.
        descriptor: its descriptor, which requests in flight keep open.
        direct: whether it was opened with O_DIRECT; address, offset and nbytes must then be whole blocks.
    """

    def __init__(self, engine: "Waiter", fd: int, path: str, *, direct: bool) -> None:
        self._engine = engine
        self.descriptor = Descriptor(fd)
        self.path = path
        self.direct = direct

    @property
    def fd(self) -> int:
        """The descriptor.

        Raises:
            ValueError: the file is closed.
        """
        descriptor = self.descriptor
        if not descriptor.is_open:
            raise ValueError(f"{self.path} is closed")
        return descriptor.fd

    @property
    def nbytes(self) -> int:
        """The file's size, in bytes."""
        return os.fstat(self.fd).st_size

    def allocate(self, offset: int, nbytes: int) -> None:
        """Reserve blocks on the disk for `nbytes` at `offset`, so that later writes there cannot find it
        full.

        Raises:
            StorageFullError: there is too little space; blocks that this call had reserved are freed.
        """
        size, position, end = self.nbytes, offset, offset + nbytes
        # Refuse what cannot fit at once, without filling the file system even for a moment.
        if end - max(size, offset) > self._free(reserved=True):
            self._refuse(errno.ENOSPC, offset, nbytes)
        while position < end:
            step = min(end - position, _ALLOCATION_NBYTES)
            result = -load().aio_allocate(self.fd, position, step)
            if result == 0:
                position += step
            elif result in (errno.EOPNOTSUPP, errno.ENOSYS):
                return self._extend(end)
            elif result != errno.EINTR:
                if self.nbytes > size:
                    os.ftruncate(self.fd, size)
                self._refuse(result, offset, nbytes)
        return None

    def _extend(self, end: int) -> None:
        """Grow a file whose file system cannot reserve blocks: check the free space, and set the size.

        Writing zeros would reserve nothing on such file systems, which copy on write.
        """
        needed = end - self.nbytes
        if needed <= 0:
            return
        if needed > self._free():
            self._refuse(errno.ENOSPC, self.nbytes, needed)
        try:
            os.ftruncate(self.fd, end)
        except OSError as error:
            self._refuse(error.errno or errno.EIO, self.nbytes, needed)

    def _refuse(self, number: int, offset: int, nbytes: int) -> None:
        if number in _FULL:
            raise StorageFullError.of_file(number, self.path, needed=nbytes, free=self._free())
        raise IoError.of_request(
            number, "allocation", self.path, offset=offset, nbytes=nbytes, failed_at=offset, what="space"
        )

    def _free(self, *, reserved: bool = False) -> int:
        """Return the free space in bytes, with or without the space reserved for root."""
        status = os.fstatvfs(self.fd)
        return (status.f_bfree if reserved else status.f_bavail) * status.f_frsize

    def sync(self) -> None:
        """Flush written data to the drive. A failure is final: a second call would succeed without the data.

        Raises:
            IoError: the kernel could not write some of the data, and does not keep it.
        """
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise IoError.of_request(
                error.errno or errno.EIO, FLUSH, self.path, offset=0, nbytes=0, failed_at=0, what="the file"
            ) from error

    def close(self) -> None:
        """Close the file once the requests on it have ended; a second call does nothing."""
        self._engine.wait_for_file(self)
        self.descriptor.close()

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"{self.nbytes} B" if self.descriptor.is_open else "closed"
        return f"<File {self.path}, {'direct' if self.direct else 'buffered'}, {state}>"


@contextlib.contextmanager
def opened_folder(folder: Folder) -> Iterator[tuple[int, str]]:
    """Yield a folder's descriptor and its path for messages; close the descriptor if it was opened here."""
    if isinstance(folder, int):
        try:
            path = str(Path(f"/proc/self/fd/{folder}").readlink())
        except OSError:
            path = f"folder descriptor {folder}"
        yield folder, path
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd, os.fspath(folder)
    finally:
        os.close(fd)


def open_nameless(folder: Folder, flags: int) -> tuple[int, str]:
    """Open a new file without a name; return its descriptor and a path for messages."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    with opened_folder(folder) as (folder_fd, path):
        try:
            fd = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=folder_fd)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            fd = _create_and_unlink(folder_fd, flags)
        return fd, f"{path} (a nameless file)"


def _create_and_unlink(folder_fd: int, flags: int) -> int:
    name = f".infinity-{secrets.token_hex(8)}"
    flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        return os.open(name, flags, 0o600, dir_fd=folder_fd)
    finally:
        # Also after a failure: a file system that refuses O_DIRECT does so after creating the name.
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder_fd)


def open_to_read(path: str | os.PathLike[str], flags: int) -> tuple[int, str]:
    """Open an existing file to read it, wherever links lead to it."""
    real = os.path.realpath(path)
    return os.open(real, flags | os.O_RDONLY | os.O_CLOEXEC), real


def open_named(folder: Folder, name: str, flags: int) -> tuple[int, str]:
    """Open the file `name`, which must be a plain name, in a folder; links are not followed."""
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is not a plain file name")
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    with opened_folder(folder) as (folder_fd, path):
        return os.open(name, flags, 0o600, dir_fd=folder_fd), str(Path(path) / name)

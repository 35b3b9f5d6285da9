"""Extents on NVMe: one file per folder, nameless except for durable runs, grown in large steps."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from infinity import aio
from infinity.aio.engine import HANG_S
from infinity.errors import ConfigError
from infinity.sizes import BLOCK, format_size, round_up
from infinity.storage.direct import target_among
from infinity.storage.disk_speed import IN_MEMORY, OVER_NETWORK, filesystem, speed_of
from infinity.storage.memory import Arena, Pool
from infinity.storage.store import Extent, Request, Transfer

logger = logging.getLogger("infinity")

_GROW_NBYTES = 256 << 20


class FreeExtents:
    """Freed extents, reused by exact size: a run has few sizes, so little space is lost."""

    def __init__(self) -> None:
        self._offsets: dict[int, list[int]] = {}

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a freed extent of `nbytes`, if there is one."""
        offsets = self._offsets.get(nbytes)
        return offsets.pop() if offsets else None

    def give(self, offset: int, nbytes: int) -> None:
        """Keep a freed extent."""
        self._offsets.setdefault(nbytes, []).append(offset)


_OF_KERNEL = frozenset(
    {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "bpf", "mqueue"}
)
"""File systems that show what the kernel knows, and store nothing."""

_hung: list[object] = []
"""Memory and files of disks that hang: kept for ever, as the disk may still write there."""

_URGENT, _NORMAL, _BEHIND = aio.Priority.URGENT, aio.Priority.NORMAL, aio.Priority.BEHIND
Opening = Callable[[aio.IoEngine], aio.File]
"""Opens the file of a store with its engine."""


class NvmeStore:
    """One file in a folder, grown in large steps as extents are allocated.

    The file is nameless, so that the kernel frees its space when the process ends, however it ends, and two
    runs in one folder cannot collide. A durable run's file is opened by `opening`.
    """

    tier = "nvme"
    writable = True

    def __init__(
        self,
        folder: str,
        engine_kind: str | None,
        request_nbytes: int = 1 << 30,
        sharers: int = 1,
        opening: Opening | None = None,
    ) -> None:
        """Check `folder`, choose the I/O engine by a real request in it, and open the file.

        request_nbytes: the largest request. If it is smaller than the disk's best piece, more requests are
        kept in flight, so that the bytes in flight stay the same (see disk_speed.speed_of).
        sharers: ranks that use this disk and divide the requests in flight.

        Raises: ConfigError for a folder that cannot be used; aio.EngineUnavailableError for a forced engine
        that fails.
        """
        self.folder = folder
        check_folder(folder)
        _warn_of(folder)
        self.speed = speed_of(folder, engine_kind)
        depth = min(self.speed.depth * max(1, self.speed.piece_nbytes // request_nbytes), 256)
        depth = -(-depth // sharers)
        self.engine = aio.open_engine(
            folder, engine_kind, depth=depth, threads=depth, piece_nbytes=self.speed.piece_nbytes
        )
        try:
            self._file = opening(self.engine) if opening else self.engine.open_nameless(folder)
        except BaseException:
            self.engine.close()
            raise
        self.allocated_nbytes = self._file.nbytes // BLOCK * BLOCK
        self._end = 0
        self._free = FreeExtents()
        self.engine.say_hang_after(_hang_s())
        self._keeps: tuple[object, ...] = ()
        self._claimed: list[tuple[int, int]] = []
        self._gaps: list[tuple[int, int]] = []

    @property
    def hung(self) -> bool:
        """Whether the disk has stopped responding."""
        return self.engine.hung

    @property
    def kind(self) -> str:
        """The kind of I/O engine."""
        return self.engine.kind

    @property
    def folders(self) -> tuple[str, ...]:
        """The folder of the file."""
        return (self.folder,)

    def allocate(self, nbytes: int, what: str) -> Extent:
        """Return an extent, growing the file if needed.

        Raises: aio.StorageFullError naming `what`, with the bytes needed and free.
        """
        nbytes = round_up(max(nbytes, 1), BLOCK)
        offset = self._free.take(nbytes)
        if offset is None:
            offset = self._in_gap(nbytes)
        if offset is None:
            if self._end + nbytes > self.allocated_nbytes:
                self._grow(self._end + nbytes - self.allocated_nbytes, what)
            offset = self._end
            self._end += nbytes
        return Extent(self, offset, nbytes)

    def _in_gap(self, nbytes: int) -> int | None:
        """Return the offset of the first `nbytes` between claimed extents, if there are any."""
        for index, (offset, stop) in enumerate(self._gaps):
            if stop - offset >= nbytes:
                self._gaps[index] = offset + nbytes, stop
                return offset
        return None

    def describe(self, extent: Extent) -> object:
        """Return the place of an extent, as plain values for JSON."""
        return [extent.offset, extent.nbytes]

    def claim(self, place: object, nbytes: int, what: str) -> Extent:
        """Return the extent at a place that `describe` returned in an earlier process.

        All claims come before the first allocation; `open_gaps` ends them.

        Raises: ValueError if there is no such extent in the file.
        """
        if not (isinstance(place, list) and len(place) == 2 and all(type(one) is int for one in place)):
            raise ValueError(f"{what}: {place!r} is not a place in a file: expected [offset, bytes]")
        offset, size = place
        if size != nbytes or size <= 0 or offset < 0 or offset % BLOCK or size % BLOCK:
            raise ValueError(f"{what}: {size} B at byte {offset} of {self._file.path}, expected {nbytes} B")
        if offset + size > self._file.nbytes:
            raise ValueError(
                f"{what}: expected at bytes {offset} to {offset + size} of {self._file.path}, which ends at "
                f"byte {self._file.nbytes}: the file was truncated"
            )
        self._claimed.append((offset, offset + size))
        return Extent(self, offset, size)

    def open_gaps(self) -> None:
        """End the claims: the space between claimed extents may be allocated from now on.

        Raises: ValueError if claims overlap.
        """
        end = 0
        for start, stop in sorted(set(self._claimed)):
            if start < end:
                raise ValueError(f"{self._file.path}: two extents share byte {start}")
            if start > end:
                self._gaps.append((end, start))
            end = stop
        self._end, self._claimed = end, []

    def descriptors(self) -> list[int]:
        """Return the descriptors of all files, here one."""
        return [self._file.fd]

    def keep(self, pool: Pool | Arena, *others: object) -> None:
        """Register the pool that transfers go through with the engine.

        If the disk hangs, the pool and `others` are kept for ever, since the disk may still write there.
        """
        self.engine.register(pool.address, pool.nbytes, pool)
        self._keeps = pool, *others

    def sync(self) -> None:
        """Flush written data to the drive.

        Raises: aio.IoError; the data may then be lost, and a second call does not help.
        """
        self._file.sync()

    def _grow(self, least_nbytes: int, what: str) -> None:
        for nbytes in (max(least_nbytes, _GROW_NBYTES), least_nbytes):
            try:
                self._file.allocate(self.allocated_nbytes, nbytes)
            except aio.StorageFullError as error:
                if nbytes == least_nbytes:
                    raise _named(error, what, self.allocated_nbytes) from None
            else:
                self.allocated_nbytes += nbytes
                return

    def free(self, extent: Extent) -> None:
        """Free an extent for reuse."""
        self._free.give(extent.offset, extent.nbytes)

    def read(self, request: Request) -> Transfer:
        """Begin a read; see DiskStore, and for a device's memory DirectTarget."""
        direct = target_among(request.owner)
        if direct is not None:
            place = self._file.fd, request.extent.offset + request.start
            return direct.read(*place, request.address, request.nbytes, request.what)
        extent, start, address, nbytes, what, owner, urgent, more, _, _ = request
        priority = _URGENT if urgent else _NORMAL
        return self.engine.read(
            self._file,
            extent.offset + start,
            address,
            nbytes,
            what=what,
            owner=owner,
            priority=priority,
            more=more,
        )

    def write(self, request: Request) -> aio.Completion:
        """Begin a write, with lower priority than reads unless it is urgent; see DiskStore."""
        extent, start, address, nbytes, what, owner, urgent, more, _, _ = request
        priority = _URGENT if urgent else _BEHIND
        return self.engine.write(
            self._file,
            extent.offset + start,
            address,
            nbytes,
            what=what,
            owner=owner,
            priority=priority,
            more=more,
        )

    def where(self, extent: Extent, start: int) -> str:
        """Name a place for an error message."""
        return f"{self._file.path} at byte {extent.offset + start}"

    def close(self) -> None:
        """Wait for transfers in flight and close the file; after a hang, do not wait."""
        if self.hung:
            _hung.append((self._file, *self._keeps))
        else:
            self.engine.drain()
            self._file.close()
        self.engine.close()


def _warn_of(folder: str) -> None:
    """Say where a folder is on no drive of this machine: all works there, and little of it as it should."""
    kind = filesystem(Path(folder).resolve())
    if kind in IN_MEMORY:
        logger.warning(
            "nvme=%r is on %s: its files are in host memory, which host_memory does not count. Name a "
            "folder on a local drive",
            folder,
            kind,
        )
    elif kind in OVER_NETWORK:
        logger.warning(
            "nvme=%r is on %s: every step would wait for the network, and others may change the "
            "files. Name a folder on a local drive",
            folder,
            kind,
        )


def _hang_s() -> float:
    """Return the seconds without a response after which the disk counts as hung."""
    text = os.environ.get("INFINITY_IO_TIMEOUT")
    try:
        seconds = float(text) if text else HANG_S
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"INFINITY_IO_TIMEOUT={text!r}: expected a number of seconds above 0")
    return seconds


def _named(error: aio.StorageFullError, what: str, allocated_nbytes: int) -> aio.StorageFullError:
    """Return `error` with the purpose of the space, and how much is allocated so far."""
    text = f"{error.strerror}\n  for: {what}; {format_size(allocated_nbytes)} are allocated so far"
    named = aio.StorageFullError(error.errno, text, error.filename)
    return named.with_sizes(needed=error.needed, free=error.free)


def check_folder(folder: str) -> None:
    """Check that `folder` is a folder in which this process may write.

    Raises: ConfigError that says what is wrong and what to do.
    """
    try:
        status = os.stat(folder)
    except FileNotFoundError:
        cure = "Create it (mkdir -p) on the NVMe device."
        if folder.startswith("~"):
            cure = f"~ stands for a home only in a shell: write {str(Path(folder).expanduser())!r}."
        raise ConfigError(f"nvme={folder!r}: there is no such folder. {cure}") from None
    except OSError as error:
        raise ConfigError(f"nvme={folder!r}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"nvme={folder!r} is a file; expected a folder on the NVMe device")
    kind = filesystem(Path(folder).resolve())
    if kind in _OF_KERNEL:
        raise ConfigError(
            f"nvme={folder!r} is the kernel's ({kind}): it stores no files. Name a folder on an NVMe drive."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        why = f"user {os.geteuid()} may not write there. Choose another folder, or chown it."
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            why = "its filesystem is mounted read-only. Choose another folder."
        raise ConfigError(f"nvme={folder!r}: {why}")

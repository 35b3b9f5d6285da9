"""Fields that lie in the files of a checkpoint: they are read where they are, and never written.

[Note: windows]
A tensor begins at any byte of its file, and O_DIRECT moves whole blocks. So the blocks around the bytes are
read into a *window*, spare memory of the slot that every tile under way has, and the bytes are copied from
there to where they belong when the read is awaited. What lies on whole blocks by itself is read straight to
its place. A file's last bytes, less than a block, are read through the page cache, as is everything on file
systems without O_DIRECT.

[Note: files that change]
Nobody keeps others from writing to these files. What a file was when it was opened, its size and the time of
its last change, is compared before every read; the content is compared, too, with what the first read of each
tile found (see records). A file that is replaced by another of its name stays open, and its bytes stay.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infinity import aio, kernels
from infinity.errors import CorruptionError, UnsupportedError
from infinity.sizes import BLOCK, format_size, round_up
from infinity.storage.memory import Arena, view
from infinity.storage.store import AllOf, Extent, Request

logger = logging.getLogger("infinity")


class FileRange(NamedTuple):
    """The bytes of a file that are a tensor's values."""

    path: str
    offset: int
    nbytes: int


class CheckpointFile:
    """A file of somebody else's, open to be read; see [Note: files that change]."""

    def __init__(self, engine: aio.IoEngine, path: str) -> None:
        """Open it, with O_DIRECT if its file system has that.

        Raises: OSError naming the file.
        """
        self._buffered = engine.open_to_read(path, direct=False)
        self.path = self._buffered.path
        self.nbytes, self.modified_ns = self._seen()
        self.io = self._opened(engine)
        """What the engine reads from."""

    @property
    def direct(self) -> bool:
        """Whether it is read with O_DIRECT."""
        return self.io.direct

    def _opened(self, engine: aio.IoEngine) -> aio.File:
        """Return the file opened with O_DIRECT, after a trial; as it is where that does not work."""
        if self.nbytes < BLOCK or not engine.direct:
            return self._buffered
        try:
            file = engine.open_to_read(self.path, direct=True)
            memory = Arena(BLOCK)
            engine.read(file, 0, memory.address, BLOCK, what=f"a trial of {self.path}", owner=memory).wait()
        except OSError as error:
            logger.warning("%s is read through the page cache: no O_DIRECT there (%s)", self.path, error)
            return self._buffered
        return file

    def _seen(self) -> tuple[int, int]:
        status = os.fstat(self._buffered.fd)
        return status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """See that the file is what it was when it was opened.

        Raises: CorruptionError naming it, and what changed.
        """
        nbytes, modified_ns = self._seen()
        if (nbytes, modified_ns) != (self.nbytes, self.modified_ns):
            raise CorruptionError(
                f"{self.path} was changed while weights are read from it: {nbytes} B, changed at "
                f"{_moment(modified_ns)}; when the model was loaded it had {self.nbytes} B, changed at "
                f"{_moment(self.modified_ns)}. Load the model again, and leave its files alone while it is "
                "in use."
            )

    def read_end(self, offset: int, address: int, nbytes: int) -> None:
        """Read bytes at the end of the file, less than a block, through the page cache.

        Raises: CorruptionError where the file has ended before.
        """
        if os.preadv(self._buffered.fd, [view(address, nbytes)], offset) != nbytes:
            raise CorruptionError(f"{self.path} ended before byte {offset + nbytes}: it was cut meanwhile")

    def close(self) -> None:
        """Close it once its requests are over."""
        self.io.close()
        self._buffered.close()


def _moment(ns: int) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(ns // 10**9))}.{ns % 10**9:09d}"


class FilePart(NamedTuple):
    """Bytes of a file that are bytes [at, at + nbytes) of a field."""

    file: CheckpointFile
    offset: int
    nbytes: int
    at: int


class _Arriving:
    """The transfers of one request, whose bytes are put in their places when they are awaited."""

    def __init__(self, parts: Sequence[aio.Completion], copies: Sequence[tuple[int, int, int]]) -> None:
        """copies: (bytes, target, source)."""
        self._all = AllOf(parts) if parts else None
        self._copies = copies

    @property
    def done(self) -> bool:
        """Whether all reads are over."""
        return self._all is None or self._all.done

    @property
    def began_s(self) -> float:
        """See Transfer."""
        return self._all.began_s if self._all is not None else 0.0

    @property
    def ended_s(self) -> float | None:
        """See Transfer."""
        return self._all.ended_s if self._all is not None else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all reads, then put the bytes in their places."""
        if self._all is not None:
            self._all.wait(timeout_s)
        copies, self._copies = self._copies, ()
        for nbytes, target, source in copies:
            kernels.copy(nbytes, target, source)


class _Read(NamedTuple):
    """One read of whole blocks, or of anything from a file that is not direct."""

    file: CheckpointFile
    offset: int
    address: int
    nbytes: int


class CheckpointStore:
    """Extents whose bytes are ranges of files; see [Note: windows]."""

    tier = "checkpoint"
    writable = False

    def __init__(self, engine: aio.IoEngine | None = None, kind: str | None = None) -> None:
        """Read by `engine`, or by one of its own, of this kind, if it is None."""
        self._engine = engine or aio.open_reader(kind)
        self._owns = engine is None
        self._files: dict[str, CheckpointFile] = {}
        self._parts: dict[int, tuple[FilePart, ...]] = {}
        self._next = 0

    @property
    def files(self) -> Mapping[str, CheckpointFile]:
        """The open files, by path."""
        return self._files

    def file(self, path: str) -> CheckpointFile:
        """Return a file, opened when it is first asked for. Raises: OSError naming it."""
        real = os.path.realpath(path)
        if real not in self._files:
            self._files[real] = CheckpointFile(self._engine, real)
        return self._files[real]

    def lay(self, parts: Sequence[FilePart], nbytes: int) -> Extent:
        """Return an extent of `nbytes` that consists of `parts`, in rising order, and of zeros between them.

        Raises: CorruptionError for a file that ends before a part.
        """
        for part in parts:
            if part.offset + part.nbytes > part.file.nbytes:
                raise CorruptionError(
                    f"{part.file.path}: bytes {part.offset} to {part.offset + part.nbytes} are asked for, "
                    f"and the file has {part.file.nbytes}: it was cut"
                )
        self._parts[self._next] = tuple(parts)
        self._next += 1
        return Extent(self, self._next - 1, nbytes)

    def allocate(self, nbytes: int, what: str) -> Extent:
        """Refuse: nothing is written here. Raises: UnsupportedError."""
        raise UnsupportedError(f"{what}: {format_size(nbytes)} cannot be allocated in a checkpoint's files")

    def free(self, extent: Extent) -> None:
        """Forget an extent; its bytes stay where they are."""
        self._parts.pop(extent.offset, None)

    def write(self, request: Request) -> _Arriving:
        """Refuse: see `allocate`."""
        raise UnsupportedError(f"{request.what}: a checkpoint's files are never written")

    def moved_nbytes(self, extent: Extent, start: int, nbytes: int) -> int:
        """Return the bytes that a read of `nbytes` of an extent moves, whole windows counted."""
        moved = 0
        for part, first, last in self._within(extent, start, start + nbytes):
            offset = part.offset + first - part.at
            low, high = offset, offset + last - first
            if part.file.direct:
                low, high = low // BLOCK * BLOCK, min(round_up(high, BLOCK), part.file.nbytes)
            moved += high - low
        return moved

    def read(self, request: Request) -> _Arriving:
        """Begin a read; see DiskStore and [Note: windows].

        Raises: CorruptionError for a file that has changed.
        """
        start, stop = request.start, request.start + request.nbytes
        reads: list[_Read] = []
        copies: list[tuple[int, int, int]] = []
        room, room_nbytes = request.window
        room_end, at = room + room_nbytes, start
        for part, first, last in self._within(request.extent, start, stop):
            part.file.check()
            self._clear(request, at, first)
            at = last
            offset, nbytes = part.offset + first - part.at, last - first
            target = request.address + first - start
            if not part.file.direct or (offset | target | nbytes) % BLOCK == 0:
                reads.append(_Read(part.file, offset, target, nbytes))
                continue
            low, high = offset // BLOCK * BLOCK, round_up(offset + nbytes, BLOCK)
            if room + high - low > room_end:
                raise AssertionError(
                    f"{request.what}: expected a window of {high - low} B, got {room_end - room} B"
                )
            whole = min(high, part.file.nbytes // BLOCK * BLOCK)
            if whole > low:
                reads.append(_Read(part.file, low, room, whole - low))
            if offset + nbytes > whole:
                part.file.read_end(whole, room + whole - low, offset + nbytes - whole)
            copies.append((nbytes, target, room + offset - low))
            room += high - low
        self._clear(request, at, stop)
        return _Arriving(self._begin(reads, request), copies)

    def _within(self, extent: Extent, start: int, stop: int) -> Iterator[tuple[FilePart, int, int]]:
        """Yield the parts in bytes [start, stop) of an extent, with the first and last byte of each there."""
        for part in self._parts[extent.offset]:
            first, last = max(start, part.at), min(stop, part.at + part.nbytes)
            if first < last:
                yield part, first, last

    @staticmethod
    def _clear(request: Request, start: int, stop: int) -> None:
        if stop > start:
            ctypes.memset(request.address + start - request.start, 0, stop - start)

    def _begin(self, reads: Sequence[_Read], request: Request) -> list[aio.Completion]:
        begun: list[aio.Completion] = []
        try:
            for number, one in enumerate(reads, 1):
                begun.append(
                    self._engine.read(
                        one.file.io,
                        one.offset,
                        one.address,
                        one.nbytes,
                        what=request.what,
                        owner=request.owner,
                        priority=aio.Priority.URGENT if request.urgent else aio.Priority.NORMAL,
                        more=request.more or number < len(reads),
                    )
                )
        except Exception:
            AllOf.settle(begun)
            raise
        return begun

    def where(self, extent: Extent, start: int) -> str:
        """Name a place for an error message."""
        for part, first, _ in self._within(extent, start, extent.nbytes):
            return f"{part.file.path} at byte {part.offset + first - part.at}"
        return "padding"

    def describe(self, extent: Extent) -> dict[str, Any]:
        """Return an extent's files and ranges, as plain values for JSON: `is_same` compares them."""
        return {
            "checkpoint": [
                [one.file.path, one.file.nbytes, one.offset, one.nbytes, one.at]
                for one in self._parts[extent.offset]
            ]
        }

    def differences(self, extent: Extent, place: Mapping[str, Any]) -> list[str]:
        """Return, in words, how an extent differs from one that `describe` described in an earlier process.
        The folder may have moved: names, sizes and ranges count.
        """
        theirs = [tuple(one) for one in place["checkpoint"]]
        ours = [tuple(one) for one in self.describe(extent)["checkpoint"]]
        if len(theirs) != len(ours):
            return [f"{len(theirs)} ranges of files there, {len(ours)} here"]
        return [
            f"bytes {old[2]} to {old[2] + old[3]} of {old[0]} ({old[1]} B) there, bytes {new[2]} to "
            f"{new[2] + new[3]} of {new[0]} ({new[1]} B) here"
            for old, new in zip(theirs, ours, strict=True)
            if (Path(old[0]).name, *old[1:]) != (Path(new[0]).name, *new[1:])
        ]

    def close(self) -> None:
        """Close the files, and the engine if it is this store's own."""
        if not self._engine.hung:
            for file in self._files.values():
                file.close()
        if self._owns:
            self._engine.close()

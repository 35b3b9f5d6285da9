"""Fields that lie in the files of a checkpoint: they are read where they are, and never written.

[Note: windows]
A tensor begins at any byte of its file, and O_DIRECT moves whole blocks. So the blocks around the bytes are
read into a *window*, spare memory of the slot that every tile under way has, and the bytes are copied from
there to where they belong when the read is awaited. What lies on whole blocks by itself is read straight to
its place. A file's last bytes, less than a block, are read through the page cache, as is everything on file
systems without O_DIRECT.

Packed weights are always read into the window, and widened from there: see packed.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from infinity import aio, kernels
from infinity.errors import CorruptionError, UnsupportedError
from infinity.planning.layout import Format
from infinity.sizes import BLOCK, format_size, round_up
from infinity.storage.memory import Arena, view
from infinity.storage.packed import Block8
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

    def sources(self, first: int, nbytes: int) -> list[_Source]:
        """Return what of files is read for bytes [first, first + nbytes) of the part."""
        return [_Source(self.file, self.offset + first, nbytes)]

    def put(self, first: int, nbytes: int, target: int, at: Sequence[int]) -> None:
        """Put bytes [first, first + nbytes) to `target`, from the addresses of their sources."""
        kernels.copy(nbytes, target, at[0])

    def describe(self) -> list[Any]:
        """Return it as plain values for JSON; the first is a file's path."""
        return [self.file.path, self.file.nbytes, self.offset, self.nbytes, self.at]


class PackedPart(NamedTuple):
    """Elements of a packed weight that are bytes [at, at + nbytes) of a field, widened to `dtype`."""

    file: CheckpointFile
    scales_file: CheckpointFile
    weight: Block8
    dtype: str
    width: int
    first: int
    """The weight's element at byte `at`."""
    nbytes: int
    at: int

    @property
    def offset(self) -> int:
        """The byte of the file at which its codes begin."""
        return self.weight.codes(self.first, 1)[0]

    def sources(self, first: int, nbytes: int) -> list[_Source]:
        """See FilePart."""
        element, numel = self.first + first // self.width, nbytes // self.width
        codes, scales = self.weight.codes(element, numel), self.weight.scales(element, numel)
        return [_Source(self.file, *codes), _Source(self.scales_file, *scales)]

    def put(self, first: int, nbytes: int, target: int, at: Sequence[int]) -> None:
        """See FilePart."""
        element, numel = self.first + first // self.width, nbytes // self.width
        self.weight.widen(self.dtype, element, numel, at[0], at[1], target)

    def describe(self) -> list[Any]:
        """See FilePart."""
        weight = self.weight
        scales = [self.scales_file.nbytes, weight.scales_offset, *weight.blocks]
        return [self.file.path, self.file.nbytes, self.offset, self.nbytes, self.at, self.dtype, *scales]


Part = FilePart | PackedPart


class _Source(NamedTuple):
    """Bytes of a file."""

    file: CheckpointFile
    offset: int
    nbytes: int

    @property
    def block_range(self) -> tuple[int, int]:
        """First and last byte of what is read for it: whole blocks of a direct file, as far as it goes."""
        low, high = self.offset, self.offset + self.nbytes
        if self.file.direct:
            low, high = low // BLOCK * BLOCK, min(round_up(high, BLOCK), self.file.nbytes)
        return low, high


class _Read(NamedTuple):
    """One read of whole blocks, or of anything from a file that is not direct."""

    file: CheckpointFile
    offset: int
    address: int
    nbytes: int


class _SpareRoom:
    """The spare memory of one request; see [Note: windows]."""

    def __init__(self, request: Request) -> None:
        self._free, room_nbytes = request.window
        self._end = self._free + room_nbytes
        self._what = request.what
        self.reads: list[_Read] = []

    def take(self, source: _Source) -> int:
        """Have bytes of a file read into the window; return their address there."""
        file, (low, high) = source.file, source.block_range
        address, size = self._free, round_up(high - low, BLOCK)
        if address + size > self._end:
            raise AssertionError(f"{self._what}: expected a window of {size} B, got {self._end - address} B")
        self._free += size
        whole = min(high, file.nbytes // BLOCK * BLOCK) if file.direct else high
        if whole > low:
            self.reads.append(_Read(file, low, address, whole - low))
        if high > whole:
            file.read_end(whole, address + whole - low, high - whole)
        return address + source.offset - low


class _Arriving:
    """The transfers of one request, whose bytes are put in their places when they are awaited."""

    def __init__(self, parts: Sequence[aio.Completion], puts: Sequence[Callable[[], None]]) -> None:
        """puts: put the bytes in their places, once all are there."""
        self._all = AllOf(parts) if parts else None
        self._puts = puts

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
        puts, self._puts = self._puts, ()
        for put in puts:
            put()


class CheckpointStore:
    """Extents whose bytes are ranges of files; see [Note: windows]."""

    tier = "checkpoint"
    writable = False

    def __init__(self, engine: aio.IoEngine | None = None, kind: str | None = None) -> None:
        """Read by `engine`, or by one of its own, of this kind, if it is None."""
        self._engine = engine or aio.open_reader(kind)
        self._owns = engine is None
        self._files: dict[str, CheckpointFile] = {}
        self._parts: dict[int, tuple[Part, ...]] = {}
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

    def part(self, values: FileRange | Block8, form: Format, first: int, numel: int, start: int) -> Part:
        """Return elements [first, first + numel) of a parameter, whose values these are, as a part of a field
        `hi` in which they begin at element `start`.

        Raises: OSError naming a file that cannot be opened.
        """
        at, nbytes, file = form.nbytes("hi", start), form.nbytes("hi", numel), self.file(values.path)
        if isinstance(values, Block8):
            scales = self.file(values.scales_path)
            return PackedPart(file, scales, values, form.dtype, form.width, first, nbytes, at)
        return FilePart(file, values.offset + form.nbytes("hi", first), nbytes, at)

    def lay(self, parts: Sequence[Part], nbytes: int) -> Extent:
        """Return an extent of `nbytes` that consists of `parts`, in rising order, and of zeros between them.

        Raises: CorruptionError for a file that ends before a part.
        """
        for file, offset, size in (one for part in parts for one in part.sources(0, part.nbytes)):
            if offset + size > file.nbytes:
                raise CorruptionError(
                    f"{file.path}: bytes {offset} to {offset + size} are asked for, and the file has "
                    f"{file.nbytes}: it was cut"
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
            for source in part.sources(first - part.at, last - first):
                low, high = source.block_range
                moved += high - low
        return moved

    def read(self, request: Request) -> _Arriving:
        """Begin a read; see DiskStore and [Note: windows].

        Raises: CorruptionError for a file that has changed.
        """
        at, stop = request.start, request.start + request.nbytes
        window = _SpareRoom(request)
        puts: list[Callable[[], None]] = []
        for part, first, last in self._within(request.extent, at, stop):
            self._clear(request, at, first)
            at, nbytes, target = last, last - first, request.address + first - request.start
            sources = part.sources(first - part.at, nbytes)
            for source in sources:
                source.file.check()
            if isinstance(part, FilePart) and (
                not part.file.direct or (sources[0].offset | target | nbytes) % BLOCK == 0
            ):
                window.reads.append(_Read(part.file, sources[0].offset, target, nbytes))
                continue
            places = [window.take(source) for source in sources]
            puts.append(partial(part.put, first - part.at, nbytes, target, places))
        self._clear(request, at, stop)
        return _Arriving(self._begin(window.reads, request), puts)

    def _within(self, extent: Extent, start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
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
            source = part.sources(first - part.at, 1)[0]
            return f"{source.file.path} at byte {source.offset}"
        return "padding"

    def describe(self, extent: Extent) -> dict[str, Any]:
        """Return an extent's files and ranges, as plain values for JSON: `is_same` compares them."""
        return {"checkpoint": [one.describe() for one in self._parts[extent.offset]]}

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

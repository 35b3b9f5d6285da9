"""Fields that lie in the files of a checkpoint: they are read where they are, and never written.

[Note: windows]
A tensor begins at any byte of its file, and O_DIRECT moves whole blocks. Memory that begins as far behind the
begin of a block as the tensor does (`skew_nbytes`) gets these blocks read straight to it; what its first and
last block have of other tensors goes to the rest of the blocks in which the memory begins and ends, if these
are its own (`Request.framed`). All else, as in memory that begins on a block, is read into a *window*, spare
memory of the slot that every tile under way has, and copied from there to where it belongs when the read is
awaited. A file's last bytes, less than a block, are read through the page cache, as is everything on file
systems without O_DIRECT.

Packed weights are always read into the window, and widened from there: see packed. What a window does not
hold at once, as a matrix that its file has transposed, is read in several turns.

[Note: packed copies]
Packed weights that are to stay in host memory stay packed: `keep` gives an extent memory for its ranges of
files, which the next reads fill on their way. What is there is no more read, but widened where it is used.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from infinity import aio, kernels
from infinity.errors import CorruptionError, UnsupportedError
from infinity.planning.layout import RecordSchema
from infinity.sizes import BLOCK, format_size, round_up
from infinity.storage.checkpoint_file import CheckpointFile
from infinity.storage.disk_speed import filesystem
from infinity.storage.packed import FileRange, Packed, PackedCut
from infinity.storage.store import AllOf, Extent, Request
from infinity.storage.straight import straight_range

logger = logging.getLogger("infinity")

Sums = kernels.Checksums | None
"""What takes the checksums of bytes while they are put in their places; None for nothing."""


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

    @property
    def room_nbytes(self) -> int:
        """Bytes of a window that it takes."""
        low, high = self.block_range
        return round_up(high - low, BLOCK)


class _Turn(NamedTuple):
    """What is read of a part at once, and what puts it in its place from the addresses of its sources."""

    part: Part
    sources: list[_Source]
    put: Callable[[Sequence[int], Sums], None]


class FilePart(NamedTuple):
    """Bytes of a file that are bytes [at, at + nbytes) of a field."""

    file: CheckpointFile
    offset: int
    nbytes: int
    at: int

    def sources(self) -> list[_Source]:
        """Return all that it is of files."""
        return [_Source(self.file, self.offset, self.nbytes)]

    def turns(self, first: int, nbytes: int, target: int, room_nbytes: int) -> Iterator[_Turn]:
        """Yield what is read into a window of `room_nbytes`, one after the other, to put bytes [first,
        first + nbytes) of the part to `target`.
        """
        most = max(BLOCK, room_nbytes // BLOCK * BLOCK - 2 * BLOCK)
        for at in range(0, nbytes, most):
            n = min(most, nbytes - at)

            def put(places: Sequence[int], sums: Sums, n: int = n, to: int = target + at) -> None:
                if sums is None or not sums.copy_from(places[0], to, n):
                    kernels.copy(n, to, places[0])

            yield _Turn(self, [_Source(self.file, self.offset + first + at, n)], put)

    def describe(self) -> list[Any]:
        """Return it as plain values for JSON; the first is a file's path."""
        return [self.file.path, self.file.nbytes, self.offset, self.nbytes, self.at]


class PackedPart(NamedTuple):
    """Elements of a packed weight that are bytes [at, at + nbytes) of a field, widened to `dtype`."""

    files: Mapping[str, CheckpointFile]
    weight: Packed
    dtype: str
    width: int
    first: int
    """The weight's element at byte `at`."""
    nbytes: int
    at: int

    @property
    def file(self) -> CheckpointFile:
        """The file with its codes."""
        return self.files[self.weight.ranges[0].path]

    @property
    def offset(self) -> int:
        """The byte of the file at which its codes begin."""
        return self.sources()[0].offset

    def _of(self, ranges: Iterable[FileRange]) -> list[_Source]:
        return [_Source(self.files[one.path], one.offset, one.nbytes) for one in ranges]

    def sources(self) -> list[_Source]:
        """See FilePart."""
        cuts = list(self.weight.cuts(self.first, self.nbytes // self.width, _ANY_ROOM))
        first = cuts[0].first
        return self._of(self.weight.sources(first, cuts[-1].first + cuts[-1].numel - first))

    def turns(self, first: int, nbytes: int, target: int, room_nbytes: int) -> Iterator[_Turn]:
        """See FilePart."""
        element, numel = self.first + first // self.width, nbytes // self.width
        for cut in self.weight.cuts(element, numel, room_nbytes):

            def put(places: Sequence[int], _sums: Sums, cut: PackedCut = cut) -> None:
                self.weight.widen(self.dtype, cut, places, element, numel, target)

            yield _Turn(self, self._of(cut.sources), put)

    def describe(self) -> list[Any]:
        """See FilePart."""
        sizes = [self.files[one.path].nbytes for one in self.weight.ranges]
        place = [self.offset, self.nbytes, self.at, self.dtype, self.first]
        return [self.file.path, self.file.nbytes, *place, *sizes, *self.weight.describe()]


Part = FilePart | PackedPart

_ANY_ROOM = 1 << 62


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

    def holds(self, sources: Sequence[_Source]) -> bool:
        """Whether there is room for them."""
        return self._free + sum(one.room_nbytes for one in sources) <= self._end

    def take(self, source: _Source) -> int:
        """Have bytes of a file read into the window; return their address there."""
        file, (low, high) = source.file, source.block_range
        address, size = self._free, source.room_nbytes
        if address + size > self._end:
            raise AssertionError(f"{self._what}: expected a window of {size} B, got {self._end - address} B")
        self._free += size
        whole = min(high, file.nbytes // BLOCK * BLOCK) if file.direct else high
        if whole > low:
            self.reads.append(_Read(file, low, address, whole - low))
        if high > whole:
            file.read_end(whole, address + whole - low, high - whole)
        return address + source.offset - low


class _PackedCopy:
    """The bytes of files that an extent's parts are, in host memory; see [Note: packed copies]."""

    def __init__(self, parts: Sequence[Part], extent: Extent) -> None:
        """Begin without any. extent: in host memory, of `copy_nbytes`."""
        self.extent = extent
        self._sources: dict[int, list[tuple[_Source, int]]] = {}
        self._there: dict[tuple[int, int], list[tuple[int, int]]] = {}
        free = extent.offset
        for part in parts:
            places = self._sources[part.at] = []
            for source in part.sources():
                places.append((source, free))
                free += round_up(source.nbytes, _COPIES_ALIGNED)

    def places(self, turn: _Turn) -> list[int]:
        """Return the addresses of a turn's sources, whether their bytes are there or not."""
        whole = self._sources[turn.part.at]
        return [at + one.offset - of.offset for one, (of, at) in zip(turn.sources, whole, strict=True)]

    def has(self, turn: _Turn) -> bool:
        """Whether all bytes of a turn are there."""
        return all(
            any(first <= one.offset and one.offset + one.nbytes <= last for first, last in there)
            for one, there in zip(turn.sources, self._ranges(turn), strict=True)
        )

    def _ranges(self, turn: _Turn) -> list[list[tuple[int, int]]]:
        at = turn.part.at
        return [self._there.setdefault((at, number), []) for number in range(len(turn.sources))]

    def take(self, turn: _Turn, at: Sequence[int]) -> None:
        """Copy the bytes of a turn from these addresses."""
        for one, to, address, there in zip(
            turn.sources, self.places(turn), at, self._ranges(turn), strict=True
        ):
            kernels.copy(one.nbytes, to, address)
            first, last = one.offset, one.offset + one.nbytes
            touching = [other for other in there if other[0] <= last and first <= other[1]]
            for other in touching:
                there.remove(other)
                first, last = min(first, other[0]), max(last, other[1])
            there.append((first, last))


_COPIES_ALIGNED = 64
_MOST_WINDOWED = 16
"""One byte in so many, at most, goes through a window of what comes straight: of a bias beside a weight."""


class Arriving:
    """The transfers of one request, whose bytes are put in their places when they are awaited."""

    def __init__(
        self,
        store: CheckpointStore,
        request: Request,
        turns: Sequence[_Turn],
        straight: Sequence[_Read],
        zeros: Sequence[tuple[int, int]],
        moved_nbytes: int,
    ) -> None:
        """Begin with as many turns as the window holds, and with what goes to its place by itself.

        zeros: ranges of the extent's bytes that lie in no file, but are asked for.
        """
        self._store, self._request, self._turns = store, request, deque(turns)
        self._zeros = zeros
        self.moved_nbytes = moved_nbytes
        """Bytes that are read for it."""
        self._all: AllOf | None = None
        self._puts: list[Callable[[Sums], None]] = []
        self._sums: Sums = None
        self._begin(straight)

    def _begin(self, straight: Sequence[_Read] = ()) -> None:
        window = _SpareRoom(self._request)
        window.reads += straight
        self._puts = []
        while self._turns and (not self._puts or window.holds(self._turns[0].sources)):
            turn = self._turns.popleft()
            self._puts.append(self._store.turned(self._request, turn, window))
        begun = self._store.begin(window.reads, self._request)
        self._all = AllOf(begun) if begun else None

    def sum_by(self, sums: kernels.Checksums) -> None:
        """Have the checksums of all bytes taken on the way to their place, where they go there at once."""
        self._sums = sums

    @property
    def done(self) -> bool:
        """Whether all reads are over."""
        return not self._turns and (self._all is None or self._all.done)

    @property
    def began_s(self) -> float:
        """See Transfer."""
        return self._all.began_s if self._all is not None else 0.0

    @property
    def ended_s(self) -> float | None:
        """See Transfer."""
        return self._all.ended_s if self._all is not None else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the reads, then put the bytes in their places, turn by turn."""
        while True:
            if self._all is not None:
                self._all.wait(timeout_s)
            request, zeros, self._zeros = self._request, self._zeros, ()
            for start, stop in zeros:  # whole blocks that were read may reach there
                ctypes.memset(request.address + start - request.start, 0, stop - start)
            puts, self._puts = self._puts, []
            for put in puts:
                put(self._sums)
            if not self._turns:
                return
            self._begin()


class CheckpointStore:
    """Extents whose bytes are ranges of files; see [Note: windows]."""

    tier = "checkpoint"
    writable = False

    def __init__(self, engine: aio.IoEngine | None = None, kind: str | None = None) -> None:
        """Read by `engine`, or by one of its own, of this kind, if it is None."""
        self._engine = engine or aio.open_reader(kind)
        self._owns = engine is None
        self._files: dict[str, CheckpointFile] = {}
        self._cached: set[Path] = set()
        """Folders of files that are read through the page cache: said once."""
        self._parts: dict[int, tuple[Part, ...]] = {}
        self._copies: dict[int, _PackedCopy] = {}
        self._next = 0

    @property
    def files(self) -> Mapping[str, CheckpointFile]:
        """The open files, by path."""
        return self._files

    def file(self, path: str) -> CheckpointFile:
        """Return a file, opened when it is first asked for. Raises: OSError naming it."""
        real = os.path.realpath(path)
        if real not in self._files:
            self._files[real] = one = CheckpointFile(self._engine, real)
            if one.refused is not None and (folder := Path(real).parent) not in self._cached:
                self._cached.add(folder)
                logger.warning(
                    "weights in %s, which is on %s, are read through the page cache, which no budget counts: "
                    "no O_DIRECT there (%s)",
                    folder,
                    filesystem(folder),
                    one.refused,
                )
        return self._files[real]

    def part(
        self, values: FileRange | Packed, schema: RecordSchema, first: int, numel: int, start: int
    ) -> Part:
        """Return elements [first, first + numel) of a parameter, whose values these are, as a part of a field
        `hi` in which they begin at element `start`.

        Raises: OSError naming a file that cannot be opened.
        """
        at, nbytes = schema.nbytes("hi", start), schema.nbytes("hi", numel)
        if isinstance(values, Packed):
            files = {one.path: self.file(one.path) for one in values.ranges}
            return PackedPart(files, values, schema.dtype, schema.width, first, nbytes, at)
        return FilePart(self.file(values.path), values.offset + schema.nbytes("hi", first), nbytes, at)

    def lay(self, parts: Sequence[Part], nbytes: int) -> Extent:
        """Return an extent of `nbytes` that consists of `parts`, in rising order, and of zeros between them.

        Raises: CorruptionError for a file that ends before a part.
        """
        for file, offset, size in (one for part in parts for one in part.sources()):
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
        """Forget an extent, and its copy; its bytes stay where they are."""
        self.forget(extent)
        self._parts.pop(extent.offset, None)

    # Packed copies

    def packed_nbytes(self, extent: Extent) -> int | None:
        """Return the bytes of files that an extent is, where any of them are packed; else None."""
        parts = self._parts[extent.offset]
        if not any(isinstance(one, PackedPart) for one in parts):
            return None
        return sum(round_up(one.nbytes, _COPIES_ALIGNED) for part in parts for one in part.sources())

    def transposes(self, extent: Extent) -> bool:
        """Whether any part of an extent is in another order in its file: it is best read at once."""
        parts = self._parts[extent.offset]
        return any(isinstance(one, PackedPart) and one.weight.transposed for one in parts)

    def keep(self, extent: Extent, to: Extent) -> None:
        """Keep an extent's bytes of files in host memory, in `to`, from their next read on: see
        [Note: packed copies].
        """
        self._copies[extent.offset] = _PackedCopy(self._parts[extent.offset], to)

    def copy_of(self, extent: Extent) -> Extent | None:
        """Return where an extent's bytes are kept, or are to be; None for nowhere."""
        copy = self._copies.get(extent.offset)
        return copy.extent if copy is not None else None

    def forget(self, extent: Extent) -> None:
        """Free an extent's copy, if it has one, while nobody reads it."""
        copy = self._copies.pop(extent.offset, None)
        if copy is not None:
            copy.extent.store.free(copy.extent)

    # Straight reads

    def skew_nbytes(self, extent: Extent) -> int:
        """Return how far behind the begin of a block memory is to begin to which most of an extent is read
        straight: see [Note: windows].
        """
        nbytes = Counter[int]()
        for one in self._parts[extent.offset]:
            if isinstance(one, FilePart) and one.file.direct:
                nbytes[(one.offset - one.at) % BLOCK] += one.nbytes
        return max(nbytes, key=nbytes.__getitem__, default=0)

    def comes_straight(self, extent: Extent, address: int) -> bool:
        """Whether nearly all of an extent is read straight to memory that begins at `address`."""
        parts, windowed_nbytes = self._parts[extent.offset], 0
        for one in parts:
            if not isinstance(one, FilePart):
                return False
            if one.file.direct and (one.offset - one.at - address) % BLOCK:
                windowed_nbytes += one.nbytes
        return extent.offset not in self._copies and windowed_nbytes * _MOST_WINDOWED <= extent.nbytes

    # Transfers

    def write(self, request: Request) -> Arriving:
        """Refuse: see `allocate`."""
        raise UnsupportedError(f"{request.what}: a checkpoint's files are never written")

    def read(self, request: Request) -> Arriving:
        """Begin a read; see DiskStore and [Note: windows].

        Raises: CorruptionError for a file that has changed.
        """
        at, stop = request.start, request.start + request.nbytes
        turns: list[_Turn] = []
        straight: list[_Read] = []
        zeros: list[tuple[int, int]] = []
        for part, first, last in self._within(request.extent, at, stop):
            zeros.append((at, first))
            turns += self._turns(request, part, first, last, straight)
            at = last
        zeros.append((at, stop))
        for file in {id(one.file): one.file for one in straight}.values():
            file.check()
        moved_nbytes = sum(one.nbytes for one in straight) + self._turned_nbytes(request, turns)
        return Arriving(
            self, request, turns, straight, [one for one in zeros if one[0] < one[1]], moved_nbytes
        )

    def _turns(
        self, request: Request, part: Part, first: int, last: int, straight: list[_Read]
    ) -> Iterator[_Turn]:
        """Yield what is to go through the window of bytes [first, last) of an extent, which are of `part`;
        put the rest into `straight`.
        """
        nbytes, target, room = last - first, request.address + first - request.start, request.window[1]
        taken = self._straight(request, part, first, last, target)
        if not isinstance(part, FilePart) or taken is None:
            yield from part.turns(first - part.at, nbytes, target, room)
            return
        offset = part.offset + first - part.at
        straight.append(_Read(part.file, taken.start, target + taken.start - offset, len(taken)))
        for low, high in ((offset, taken.start), (taken.stop, offset + nbytes)):
            if low < high:
                yield from part.turns(low - part.offset, high - low, target + low - offset, room)

    def _straight(self, request: Request, part: Part, first: int, last: int, target: int) -> range | None:
        """Return the bytes of its file of which `part` is read straight to its place, as `_turns` says."""
        if not isinstance(part, FilePart) or request.extent.offset in self._copies:
            return None
        offset, nbytes, end = part.offset + first - part.at, last - first, part.at + part.nbytes
        if not part.file.direct:
            return range(offset, offset + nbytes)
        # What a block has of the same part is the same in memory, however often it is read there.
        before = first - part.at >= offset % BLOCK
        behind = end - last >= -(offset + nbytes) % BLOCK
        if request.framed:
            before = before or first == 0
            behind = behind or (last == end and part is self._parts[request.extent.offset][-1])
        return straight_range(offset, nbytes, target, part.file.nbytes, before=before, behind=behind)

    def _turned_nbytes(self, request: Request, turns: Sequence[_Turn]) -> int:
        """Return the bytes that are read for some turns: whole blocks of files, but what is kept."""
        moved, copy = 0, self._copies.get(request.extent.offset)
        for turn in turns:
            if copy is not None and copy.has(turn):
                continue
            for source in turn.sources:
                low, high = source.block_range
                moved += high - low
        return moved

    def turned(self, request: Request, turn: _Turn, window: _SpareRoom) -> Callable[[Sums], None]:
        """Have what a turn needs read, and return what puts it in its place when that is over."""
        copy = self._copies.get(request.extent.offset)
        if copy is not None and copy.has(turn):
            return partial(turn.put, copy.places(turn))
        for source in turn.sources:
            source.file.check()
        places = [window.take(source) for source in turn.sources]
        if copy is None:
            return partial(turn.put, places)

        def keep_and_put(sums: Sums) -> None:
            copy.take(turn, places)
            turn.put(places, sums)

        return keep_and_put

    def _within(self, extent: Extent, start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """Yield the parts in bytes [start, stop) of an extent, with the first and last byte of each there."""
        for part in self._parts[extent.offset]:
            first, last = max(start, part.at), min(stop, part.at + part.nbytes)
            if first < last:
                yield part, first, last

    def begin(self, reads: Sequence[_Read], request: Request) -> list[aio.Completion]:
        """Begin reads of one request."""
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
            offset = part.offset + (first - part.at if isinstance(part, FilePart) else 0)
            return f"{part.file.path} at byte {offset}"
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

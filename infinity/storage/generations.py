"""Two generations of all stored data: the last committed one stays intact while the next is written.

[Note: sides]
An extent of this store is a *twin*: two extents of the same size, its *sides*. A byte range is written to a
side that no commit names, and read from the side written last. A commit names, for each range, the side that
holds it (Twin.live at that moment). The data that the last commit names therefore stays intact until the next
commit is on disk. Between the moment in which a commit records the sides and the moment in which it is on
disk, two commits count, and they may name both sides of a range; a write to that range then waits. Records
write whole tiles, so ranges are tiles. Usually all of a twin's tiles are on one side, which takes two numbers
to say.

An update that is not decided yet is written to the *other side* of a twin: of each range the one that is not
live, where the last commit names those that are. Before the twin turns to it, `turn`, only
who recovers a gradient reads it: lane/told.py.

A twin that has been freed keeps the ranges that commits name, and so may serve another field at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from infinity.errors import EngineFailedError
from infinity.sizes import BLOCK, round_up
from infinity.storage.failure import without_frames
from infinity.storage.store import AllOf, DiskStore, Extent, Request, Transfer

Runs = tuple[tuple[int, int], ...]
"""The side that holds each byte range: (stop, side) of consecutive ranges, the first of which starts at 0."""


def put(runs: Runs, start: int, stop: int, side: int) -> Runs:
    """Return `runs` with bytes [start, stop) on `side`; adjacent ranges on one side are merged."""
    nbytes, last_side = runs[-1]
    begun = 0 if len(runs) == 1 else runs[0][0]
    if start == begun and len(runs) <= 2 and last_side != side:  # the usual case: written front to back
        return ((stop, side), (nbytes, last_side)) if stop < nbytes else ((nbytes, side),)
    new: list[tuple[int, int]] = []
    at, last = 0, -1
    for end, where in runs:
        for over, there in ((min(end, start), where), (min(end, stop), side), (end, where)):
            if over > at:
                if there == last:
                    new.pop()
                new.append((over, there))
                at, last = over, there
    return tuple(new)


def side_of(runs: Runs, start: int, stop: int) -> int | None:
    """Return the side that holds all of bytes [start, stop); None if each side holds a part."""
    for end, side in runs:
        if start < end:
            return side if stop <= end else None
    return None


def among(runs: Runs, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, side) of the ranges that make up bytes [start, stop)."""
    for at, end, side in _ranges(runs):
        if at < stop and start < end:
            yield max(at, start), min(end, stop), side


def _names(runs: Runs | None, start: int, stop: int, side: int) -> bool:
    """Whether a commit with these sides names `side` for any of bytes [start, stop)."""
    return any(one == side for _, _, one in among(runs or (), start, stop))


def _ranges(runs: Runs) -> Iterator[tuple[int, int, int]]:
    at = 0
    for stop, side in runs:
        yield at, stop, side
        at = stop


class DurableStore(DiskStore, Protocol):
    """Storage whose extents can be named in a commit, and found again by another process."""

    def describe(self, extent: Extent) -> object:
        """Return the place of an extent, as plain values for JSON."""

    def claim(self, place: object, nbytes: int, what: str) -> Extent:
        """Return the extent at a place that `describe` returned."""


class Twin:
    """Two extents of one size; see [Note: sides]."""

    __slots__ = ("committed", "committing", "live", "nbytes", "sides")

    def __init__(self, nbytes: int, sides: list[Extent | None]) -> None:
        self.nbytes = nbytes
        self.sides = sides
        """None for a side that is allocated when it is first written."""
        self.live: Runs = ((nbytes, 0),)
        self.committed: Runs | None = None
        """The sides named by the last commit on disk; None: it does not name this twin."""
        self.committing: Runs | None = None
        """The sides named by the commit that is being written."""

    def free_side(self, start: int, stop: int) -> int | None:
        """Return the side to write bytes [start, stop) to; None if no side is free for all of them."""
        live = side_of(self.live, start, stop)
        old = -1 if self.committed is None else side_of(self.committed, start, stop)
        new = -1 if self.committing is None else side_of(self.committing, start, stop)
        if live is None or old is None or new is None:
            return None
        if live not in (old, new):
            return live
        return None if 1 - live in (old, new) else 1 - live

    def free_sides(self, start: int, stop: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield (start, stop, side to write) for bytes [start, stop); None if commits name both sides."""
        for at, end, live in among(self.live, start, stop):
            for first, last, old in among(self.committed or ((self.nbytes, -1),), at, end):
                for begin, over, new in among(self.committing or ((self.nbytes, -1),), first, last):
                    named = {old, new} - {-1}
                    free = next((side for side in (live, 1 - live) if side not in named), None)
                    yield begin, over, free


class TwinStore:
    """A store of twins, which lie in another store; see [Note: sides]."""

    tier = "nvme"
    writable = True

    def __init__(self, store: DurableStore, *, lazy: bool = False) -> None:
        """Keep two generations in `store`.

        lazy: allocate sides only when they are written. A model that resumes is built with values that the
        committed ones will replace.
        """
        self.store = store
        self.lazy = lazy
        self.step = 0
        """The step of the last commit, for errors."""
        self._twins: dict[int, Twin] = {}
        self._free: dict[int, list[int]] = {}
        self._next = 0
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._others = OtherSides(self)

    # Allocation

    def allocate(self, nbytes: int, what: str) -> Extent:
        """Return a twin as one extent.

        Raises: aio.StorageFullError naming `what`.
        """
        nbytes = round_up(max(nbytes, 1), BLOCK)
        free = self._free.get(nbytes)
        if free:
            return Extent(self, free.pop(), nbytes)
        sides: list[Extent | None] = [None, None]
        if not self.lazy:
            first = self.store.allocate(nbytes, what)
            try:
                sides = [first, self.store.allocate(nbytes, f"{what} (its second generation)")]
            except BaseException:
                self.store.free(first)
                raise
        return self._add(Twin(nbytes, sides))

    def _add(self, twin: Twin) -> Extent:
        self._twins[self._next] = twin
        self._next += 1
        return Extent(self, self._next - 1, twin.nbytes)

    def free(self, extent: Extent) -> None:
        """Free a twin for reuse; while the model is built (`lazy`), free its sides too."""
        twin = self._twins[extent.offset]
        if self.lazy:
            del self._twins[extent.offset]
            for side in twin.sides:
                if side is not None:
                    self.store.free(side)
        else:
            self._free.setdefault(extent.nbytes, []).append(extent.offset)

    # Transfers

    def read(self, request: Request) -> Transfer:
        """Begin to read the bytes written last; see DiskStore."""
        twin, stop = self._twins[request.extent.offset], request.start + request.nbytes
        side = side_of(twin.live, request.start, stop)
        if side is not None:
            parts = [(request.start, stop, side)]
        else:
            parts = list(among(twin.live, request.start, stop))
        return self._together(self.store.read, request, twin, parts)

    def write(self, request: Request) -> Transfer:
        """Begin to write to sides that no commit names, waiting for the running commit if needed; see
        DiskStore.

        Raises: aio.StorageFullError; EngineFailedError if the commit that this waits for has failed.
        """
        twin, start, stop = self._twins[request.extent.offset], request.start, request.start + request.nbytes
        with self._changed:
            parts = self._free_parts(twin, start, stop)
            for at, end, side in parts:
                if twin.sides[side] is None:
                    twin.sides[side] = self.store.allocate(twin.nbytes, request.what)
                twin.live = put(twin.live, at, end, side)
        return self._together(self.store.write, request, twin, parts)

    def _free_parts(self, twin: Twin, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Wait until bytes [start, stop) can be written; return their (start, stop, side). Holds the lock."""
        while True:
            free = twin.free_side(start, stop)
            if free is not None:
                return [(start, stop, free)]
            parts = list(twin.free_sides(start, stop))
            sure = [(at, end, side) for at, end, side in parts if side is not None]
            if len(sure) == len(parts):
                return sure
            self._await_commit()

    def _together(
        self,
        begin: Callable[[Request], Transfer],
        request: Request,
        twin: Twin,
        parts: list[tuple[int, int, int]],
    ) -> Transfer:
        """Begin the transfers of one request, one for each part."""
        whole = twin.sides[parts[0][2]] if len(parts) == 1 else None
        if whole is not None:
            return begin(Request(whole, *request[1:]))
        begun: list[Transfer] = []
        try:
            for at, end, side in _joined(parts):
                extent = twin.sides[side]
                if extent is None:  # a record must not read what it has not written
                    raise EngineFailedError(f"{request.what}: bytes {at} to {end} were never written")  # noqa: TRY301
                address = request.address + at - request.start
                piece = request._replace(extent=extent, start=at, address=address, nbytes=end - at)
                begun.append(begin(piece))
        except Exception:
            AllOf.settle(begun)
            raise
        return begun[0] if len(begun) == 1 else AllOf(begun)

    def where(self, extent: Extent, start: int) -> str:
        """Name a place for an error message, with its generation if that is known."""
        twin = self._twins[extent.offset]
        _, _, side = next(among(twin.live, start, start + 1))
        at = twin.sides[side]
        old = next(among(twin.committed, start, start + 1))[2] if twin.committed else None
        age = f"committed with step {self.step}" if side == old else f"written since step {self.step}"
        return "nowhere" if at is None else f"{self.store.where(at, start)}, {age}"

    # Other sides

    def other_side(self, extent: Extent) -> Extent | None:
        """Return the sides of a twin that are not live, as an extent to write to; None where a commit will go
        on to name them: where it does not name the live ones.
        """
        twin = self._twins[extent.offset]
        with self._changed:
            named = twin.committing or twin.committed
            free = named is None or named == twin.live
        return Extent(self._others, extent.offset, extent.nbytes) if free else None

    def turn(self, other: Extent) -> Extent:
        """Let what was written to `other`, from `other_side`, be what is read; return the twin."""
        twin = self._twins[other.offset]
        with self._changed:
            twin.live = tuple((stop, 1 - side) for stop, side in twin.live)
        return Extent(self, other.offset, other.nbytes)

    def read_other(self, request: Request) -> Transfer:
        """Begin to read from the sides that are not live: what was written to the other side, or, when the
        twin has turned to that, what it had before.
        """
        twin, stop = self._twins[request.extent.offset], request.start + request.nbytes
        parts = [(at, end, 1 - side) for at, end, side in among(twin.live, request.start, stop)]
        return self._together(self.store.read, request, twin, parts)

    def write_other(self, request: Request) -> Transfer:
        """Begin to write to the sides that are not live, waiting for the running commit if needed."""
        twin, start, stop = self._twins[request.extent.offset], request.start, request.start + request.nbytes
        with self._changed:
            parts = [(at, end, 1 - side) for at, end, side in among(twin.live, start, stop)]
            while any(_names(runs, *part) for part in parts for runs in (twin.committed, twin.committing)):
                self._await_commit()
            for _, _, side in parts:
                if twin.sides[side] is None:
                    twin.sides[side] = self.store.allocate(twin.nbytes, request.what)
        return self._together(self.store.write, request, twin, parts)

    def _await_commit(self) -> None:
        """Wait for the running commit a little. Holds the lock."""
        if self._failure is not None:
            raise EngineFailedError(
                f"a write waits for the commit after step {self.step}, which has failed"
            ) from self._failure
        self._changed.wait(0.5)

    # Commits

    def begin_commit(self, named: list[Extent]) -> None:
        """Record the sides that a commit will name: the current ones of the extents `named`."""
        numbers = {extent.offset for extent in named}
        with self._changed:
            for number, twin in self._twins.items():
                twin.committing = twin.live if number in numbers else None

    def be_at(self, step: int) -> None:
        """Set the step of the last commit."""
        self.step = step

    def end_commit(self, step: int) -> None:
        """The commit is on disk: sides that only the previous commit named become free."""
        with self._changed:
            self.step = step
            for twin in self._twins.values():
                twin.committed, twin.committing = twin.committing, None
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The commit has failed for good: wake the writes that wait for it, with an error."""
        with self._changed:
            self._failure = without_frames(error)
            self._changed.notify_all()

    def describe(self, extent: Extent) -> tuple[list[object], Runs]:
        """Return the places of a twin's two sides, as plain values, and its live runs."""
        twin = self._twins[extent.offset]
        return [None if side is None else self.store.describe(side) for side in twin.sides], twin.live

    def complete(self, what: str) -> None:
        """Allocate all missing sides, and from now on both sides of every new twin.

        Raises: aio.StorageFullError naming `what`.
        """
        self.lazy = False
        for twin in self._twins.values():
            twin.sides = [side or self.store.allocate(twin.nbytes, what) for side in twin.sides]

    def take_over(self, nbytes: int, sides: list[Extent | None], live: Runs) -> Extent:
        """Return the twin that an earlier process has committed."""
        twin = Twin(nbytes, sides)
        twin.live = twin.committed = live
        return self._add(twin)


class OtherSides:
    """The sides of twins that are not live, as a store to write to."""

    tier = "nvme"
    writable = True

    def __init__(self, twins: TwinStore) -> None:
        self._twins = twins

    def allocate(self, nbytes: int, what: str) -> Extent:
        """Never: they are there with their twins."""
        raise AssertionError(f"{what}: {nbytes} B of another side, without a twin")

    def free(self, extent: Extent) -> None:
        """Nothing: it stays with its twin."""

    def read(self, request: Request) -> Transfer:
        """See TwinStore.read_other."""
        return self._twins.read_other(request)

    def write(self, request: Request) -> Transfer:
        """See TwinStore.write_other."""
        return self._twins.write_other(request)

    def where(self, extent: Extent, start: int) -> str:
        """See DiskStore."""
        return f"{self._twins.where(extent, start)}, on the other side"

    def turn(self, extent: Extent) -> Extent:
        """See TwinStore.turn."""
        return self._twins.turn(extent)

    def twin(self, extent: Extent) -> Extent:
        """Return the twin of an other side."""
        return Extent(self._twins, extent.offset, extent.nbytes)


def _joined(parts: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield the parts, with adjacent ones on the same side merged."""
    before: tuple[int, int, int] | None = None
    for at, end, side in parts:
        if before is not None and before[2] == side:
            before = before[0], end, side
            continue
        if before is not None:
            yield before
        before = at, end, side
    if before is not None:
        yield before

"""Several NVMe paths as one store: every extent lies on all of them, in stripes.

[Note: stripes]
An extent is cut into stripes, dealt to the paths in proportion to their measured bandwidth, each to the path
that would first be half through it; dealing goes on from one extent to the next, so that small extents are
spread as well. A path's stripes of one extent lie one behind the other in its file. A tile of a field spans
several stripes, so one read keeps all paths busy, each with its own I/O engine, and all are done at about the
same time. Stripes are no larger than that needs: each is one request.
"""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from infinity import aio
from infinity.errors import ConfigError
from infinity.nvme import FreeExtents, NvmeStore
from infinity.sizes import BLOCK, round_up
from infinity.store import Extent, Request

STRIPE_NBYTES = 512 << 10
"""Half of the smallest field of a full tile (bf16), and large enough for a drive's full rate."""


class StripedTransfer:
    """One transfer over several paths; over when all its parts are."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[aio.Completion]) -> None:
        """Combine one or more completions."""
        self._parts = parts

    @property
    def done(self) -> bool:
        """Whether all parts are over, well or badly."""
        return all(part.done for part in self._parts)

    @property
    def began_s(self) -> float:
        """When the first part was accepted, by the clock of `time.perf_counter`."""
        return min(part.began_s for part in self._parts)

    @property
    def ended_s(self) -> float | None:
        """When the last part was over, on the same clock; None while one is not."""
        ends = [part.ended_s for part in self._parts]
        over = [end for end in ends if end is not None]
        return max(over) if len(over) == len(ends) else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all parts are over, and only then say what went wrong: the memory may be used again.

        Raises: the error of the first part that failed, as its path reported it; aio.IoTimeoutError while a
        part is still in flight.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        first: Exception | None = None
        for part in self._parts:
            try:
                part.wait(None if end_s is None else max(0.0, end_s - time.monotonic()))
            except aio.IoTimeoutError:
                raise
            except (OSError, RuntimeError) as error:
                first = first or error
        if first is not None:
            raise first


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the stripes of one extent are."""

    parts: dict[int, Extent]  # by path: what it holds of the extent, if anything
    owners: bytes  # [stripes]: the index of its path
    ranks: array[int]  # [stripes]: how many stripes of the same path are before it

    def pieces(self, start: int, nbytes: int) -> Iterator[tuple[int, Extent, int, int]]:
        """Yield (path, its extent, byte in it, bytes) of what covers a byte range, in order, neighbours as
        one.
        """
        at, end = start, start + nbytes
        while True:
            stripe, inside = divmod(at, STRIPE_NBYTES)
            owner, after = self.owners[stripe], stripe + 1
            while after * STRIPE_NBYTES < end and self.owners[after] == owner:
                after += 1
            stop = min(after * STRIPE_NBYTES, end)
            yield owner, self.parts[owner], self.ranks[stripe] * STRIPE_NBYTES + inside, stop - at
            at = stop
            if at >= end:
                return


class StripedStore:
    """Extents striped over several NvmeStores; see [Note: stripes]. Used like one of them."""

    tier = "nvme"

    def __init__(self, stores: Sequence[NvmeStore], speeds: Sequence[float]) -> None:
        """Take over `stores`; `speeds` are their rates in bytes per second, equal shares if one is 0."""
        self.stores = tuple(stores)
        known = all(speed > 0 for speed in speeds)
        self.shares = tuple(float(speed) if known else 1.0 for speed in speeds)
        if not self.stores or len(self.shares) != len(self.stores):
            raise ValueError(f"{len(self.stores)} stores and {len(self.shares)} speeds")
        self._dealt = [0] * len(self.stores)  # bytes
        self._layouts: dict[int, _Layout] = {}
        self._end = 0
        self._free = FreeExtents()

    @property
    def kind(self) -> str:
        """The kinds of the I/O engines: "io_uring", or "io_uring + threads"."""
        return " + ".join(dict.fromkeys(store.kind for store in self.stores))

    @property
    def folders(self) -> tuple[str, ...]:
        """Where the files are."""
        return tuple(store.folder for store in self.stores)

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of all files."""
        return sum(store.allocated_nbytes for store in self.stores)

    def allocate(self, nbytes: int, what: str) -> Extent:
        """Return an extent, growing the files if needed.

        Raises: aio.StorageFullError naming `what` and the path that is full; the others keep nothing of it.
        """
        nbytes = round_up(max(nbytes, 1), BLOCK)
        offset = self._free.take(nbytes)
        if offset is None:
            self._layouts[self._end] = self._lay_out(nbytes, what)
            offset = self._end
            self._end += nbytes
        return Extent(self, offset, nbytes)

    def _lay_out(self, nbytes: int, what: str) -> _Layout:
        dealt = self._dealt.copy()
        owners, ranks, sizes = bytearray(), array("L"), [0] * len(self.stores)
        for at in range(0, nbytes, STRIPE_NBYTES):
            stripe_nbytes = min(STRIPE_NBYTES, nbytes - at)
            owner = min(
                range(len(dealt)), key=lambda path: (dealt[path] + stripe_nbytes / 2) / self.shares[path]
            )
            owners.append(owner)
            ranks.append(sizes[owner] // STRIPE_NBYTES)
            dealt[owner] += stripe_nbytes
            sizes[owner] += stripe_nbytes
        parts = self._allocate_parts(sizes, what)
        self._dealt = dealt
        return _Layout(parts, bytes(owners), ranks)

    def _allocate_parts(self, sizes: Sequence[int], what: str) -> dict[int, Extent]:
        parts = {}
        with contextlib.ExitStack() as undo:
            for path, (store, nbytes) in enumerate(zip(self.stores, sizes, strict=True)):
                if nbytes:
                    parts[path] = store.allocate(nbytes, what)
                    undo.callback(store.free, parts[path])
            undo.pop_all()
        return parts

    def free(self, extent: Extent) -> None:
        """Give an extent back; its stripes stay together, for the next one of its size."""
        self._free.give(extent.offset, extent.nbytes)

    def read(self, request: Request) -> StripedTransfer:
        """Begin a read on all paths that hold a part of it; see DiskStore."""
        return self._begin([store.read for store in self.stores], request)

    def write(self, request: Request) -> StripedTransfer:
        """Begin a write on all paths that hold a part of it; see DiskStore."""
        return self._begin([store.write for store in self.stores], request)

    def _begin(
        self, starts: Sequence[Callable[[Request], aio.Completion]], request: Request
    ) -> StripedTransfer:
        """Begin what covers the bytes of a request, with one of `starts` per path."""
        layout, address = self._layouts[request.extent.offset], request.address
        parts: list[aio.Completion] = []
        try:
            for path, part, at, nbytes in layout.pieces(request.start, request.nbytes):
                piece = request._replace(extent=part, start=at, address=address, nbytes=nbytes)
                parts.append(starts[path](piece))
                address += nbytes
        except Exception:
            with contextlib.suppress(OSError, RuntimeError):
                StripedTransfer(parts).wait()  # a refused part must not free the memory of those begun
            raise
        return StripedTransfer(parts)

    def where(self, extent: Extent, start: int) -> str:
        """Name a place for an error message."""
        path, part, at, _ = next(self._layouts[extent.offset].pieces(start, 1))
        return f"{self.stores[path].where(part, at)} (from there on striped over {', '.join(self.folders)})"

    def close(self) -> None:
        """Wait for what is in flight and give the space back, on every path."""
        with contextlib.ExitStack() as closing:
            for store in reversed(self.stores):
                closing.callback(store.close)


def open_nvme(folders: Sequence[str], engine_kind: str | None, sharers: int = 1) -> NvmeStore | StripedStore:
    """Open the NVMe tier: one store, or one per folder with extents striped by their measured bandwidth.

    sharers: ranks of this machine that use the same folders, and divide what may be in flight.

    Raises: ConfigError for a folder that cannot be used, or that is named twice; see NvmeStore.
    """
    stores: list[NvmeStore] = []
    places: dict[tuple[int, int], str] = {}
    with contextlib.ExitStack() as opened:
        for folder in folders:
            store = NvmeStore(folder, engine_kind, STRIPE_NBYTES if len(folders) > 1 else 1 << 30, sharers)
            opened.callback(store.close)
            stores.append(store)
            place = os.stat(folder)
            key = place.st_dev, place.st_ino
            if key in places:
                raise ConfigError(f"nvme={list(folders)!r}: {folder!r} and {places[key]!r} are one folder")
            places[key] = folder
        opened.pop_all()
    if len(stores) == 1:
        return stores[0]
    return StripedStore(stores, [store.speed.mixed for store in stores])

"""Several NVMe paths as one store: every extent lies on all of them, in stripes.

[Note: stripes]
An extent is cut into stripes, which are dealt to the paths in proportion to their measured bandwidth: each
stripe goes to the path that would be half through it first. Dealing continues from one extent to the next, so
that small extents are spread as well. A path's stripes of one extent are contiguous in its file. A tile of a
field spans several stripes, so one read keeps all paths busy, each with its own I/O engine, and all finish at
about the same time. Each stripe is one request.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from infinity.errors import ConfigError
from infinity.sizes import BLOCK, round_up
from infinity.storage.memory import Arena, Pool
from infinity.storage.nvme import FreeExtents, NvmeStore, Opening
from infinity.storage.store import AllOf, Extent, Request, Transfer

STRIPE_NBYTES = 512 << 10
"""Half of the smallest field of a full tile (bf16), and large enough for a drive's full bandwidth."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The places of the stripes of one extent."""

    parts: dict[int, Extent]  # by path: the extent that holds its stripes, if any
    owners: bytes  # [stripes]: the index of the stripe's path
    ranks: array[int]  # [stripes]: the number of earlier stripes on the same path

    def pieces(self, start: int, nbytes: int) -> Iterator[tuple[int, Extent, int, int]]:
        """Yield (path, its extent, first byte in it, bytes) for a byte range, in order; adjacent stripes on
        one path are merged.
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
    """Extents striped over several NvmeStores, with the methods of one; see [Note: stripes]."""

    tier = "nvme"
    writable = True

    def __init__(self, stores: Sequence[NvmeStore], speeds: Sequence[float]) -> None:
        """Own `stores`. speeds: their rates in bytes per second; if one is 0, all get equal shares."""
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
    def hung(self) -> bool:
        """Whether one of the disks has stopped responding."""
        return any(store.hung for store in self.stores)

    @property
    def kind(self) -> str:
        """The kinds of the I/O engines: "io_uring", or "io_uring + threads"."""
        return " + ".join(dict.fromkeys(store.kind for store in self.stores))

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the files."""
        return tuple(store.folder for store in self.stores)

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of all files."""
        return sum(store.allocated_nbytes for store in self.stores)

    def allocate(self, nbytes: int, what: str) -> Extent:
        """Return an extent, growing the files if needed.

        Raises: aio.StorageFullError naming `what` and the full path; nothing stays allocated on the others.
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

    def describe(self, extent: Extent) -> object:
        """Return the places of an extent's stripes, as plain values for JSON."""
        layout = self._layouts[extent.offset]
        parts = {str(path): self.stores[path].describe(part) for path, part in layout.parts.items()}
        return [layout.owners.hex(), parts]

    def claim(self, place: object, nbytes: int, what: str) -> Extent:
        """Return the extent at a place that `describe` returned; see NvmeStore.

        Raises: ValueError.
        """
        try:
            owners, parts = bytes.fromhex(place[0]), dict(place[1])  # type: ignore[index]
        except (TypeError, IndexError, KeyError, ValueError):
            raise ValueError(f"{what}: {str(place)[:80]} does not describe stripes") from None
        if len(owners) != -(-nbytes // STRIPE_NBYTES) or set(map(str, set(owners))) != set(parts):
            raise ValueError(f"{what}: {len(owners)} stripes do not make {nbytes} B")
        if max(owners) >= len(self.stores):
            raise ValueError(f"{what}: a stripe on path {max(owners)} of {len(self.stores)}")
        ranks, sizes = array("L"), [0] * len(self.stores)
        for number, owner in enumerate(owners):
            ranks.append(sizes[owner] // STRIPE_NBYTES)
            sizes[owner] += min(STRIPE_NBYTES, nbytes - number * STRIPE_NBYTES)
        found = {
            int(path): self.stores[int(path)].claim(one, sizes[int(path)], what)
            for path, one in parts.items()
        }
        self._layouts[self._end] = _Layout(found, owners, ranks)
        self._end += nbytes
        return Extent(self, self._end - nbytes, nbytes)

    def open_gaps(self) -> None:
        """See NvmeStore."""
        for store in self.stores:
            store.open_gaps()

    def descriptors(self) -> list[int]:
        """Return the descriptor of each file."""
        return [fd for store in self.stores for fd in store.descriptors()]

    def keep(self, pool: Pool | Arena, *others: object) -> None:
        """Register the pool with each engine, and keep it for ever if a disk hangs: see NvmeStore."""
        for store in self.stores:
            store.keep(pool, *others)

    def sync(self) -> None:
        """Flush written data to the drives: see NvmeStore."""
        for store in self.stores:
            store.sync()

    def free(self, extent: Extent) -> None:
        """Free an extent; its stripes stay together for the next one of its size."""
        self._free.give(extent.offset, extent.nbytes)

    def read(self, request: Request) -> AllOf:
        """Begin a read on all paths that hold a part of it; see DiskStore."""
        return self._begin([store.read for store in self.stores], request)

    def write(self, request: Request) -> AllOf:
        """Begin a write on all paths that hold a part of it; see DiskStore."""
        return self._begin([store.write for store in self.stores], request)

    def _begin(self, starts: Sequence[Callable[[Request], Transfer]], request: Request) -> AllOf:
        """Begin the transfers of a request, with one of `starts` per path."""
        layout, address = self._layouts[request.extent.offset], request.address
        parts: list[Transfer] = []
        try:
            for path, part, at, nbytes in layout.pieces(request.start, request.nbytes):
                piece = request._replace(extent=part, start=at, address=address, nbytes=nbytes, more=False)
                parts.append(starts[path](piece))
                address += nbytes
        except Exception:
            AllOf.settle(parts)
            raise
        return AllOf(parts)

    def where(self, extent: Extent, start: int) -> str:
        """Name a place for an error message."""
        path, part, at, _ = next(self._layouts[extent.offset].pieces(start, 1))
        return f"{self.stores[path].where(part, at)} (striped from there over {', '.join(self.folders)})"

    def close(self) -> None:
        """Wait for transfers in flight and close the files, on every path."""
        with contextlib.ExitStack() as closing:
            for store in reversed(self.stores):
                closing.callback(store.close)


def open_nvme(
    folders: Sequence[str],
    engine_kind: str | None,
    sharers: int = 1,
    openings: Sequence[Opening] | None = None,
) -> NvmeStore | StripedStore:
    """Open the NVMe tier: one store, or one per folder with extents striped by their measured bandwidth.

    sharers: ranks of this machine that use the same folders, and divide the requests in flight.
    openings: open the file in each folder; None: nameless files.

    Raises: ConfigError for a folder that cannot be used or is named twice; see NvmeStore.
    """
    stores: list[NvmeStore] = []
    places: dict[tuple[int, int], str] = {}
    with contextlib.ExitStack() as opened:
        for number, folder in enumerate(folders):
            opening = openings[number] if openings else None
            most_nbytes = STRIPE_NBYTES if len(folders) > 1 else 1 << 30
            store = NvmeStore(folder, engine_kind, most_nbytes, sharers, opening)
            opened.callback(store.close)
            stores.append(store)
            place = os.stat(folder)
            key = place.st_dev, place.st_ino
            if key in places:
                raise ConfigError(
                    f"nvme={list(folders)!r}: {folder!r} and {places[key]!r} are one folder: name it once"
                )
            places[key] = folder
        opened.pop_all()
    if len(stores) == 1:
        return stores[0]
    return StripedStore(stores, [store.speed.mixed for store in stores])

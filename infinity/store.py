"""Where records lie: extents on NVMe and in host memory, and the hashes that prove what is read is what was
written.

A *record* has one place per field. Places are moved between tiers (pinning) by copying and then switching;
readers and writers only ever see `Record.read` and `Record.write`, so CPU offload and NVMe offload are the
same code.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import xxhash

from infinity import kernels
from infinity.errors import CorruptionError, HostMemoryError
from infinity.memory import Arena, Ledger, view
from infinity.shard import FIELD_NBYTES, Shard
from infinity.sizes import BLOCK, format_size, round_up


class Transfer(Protocol):
    """One transfer between storage and memory that may still be under way."""

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the bytes are where they belong; raise what went wrong."""


class _Done:
    """A transfer that was over before it was asked about."""

    done = True

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""


DONE = _Done()


@dataclass(frozen=True, slots=True)
class Extent:
    """One aligned byte range of one store."""

    store: Store
    offset: int  # bytes from the start of the store
    nbytes: int


class Store(Protocol):
    """Somewhere that extents lie."""

    tier: str

    def allocate(self, nbytes: int, what: str) -> Extent:
        """Return a new extent of `nbytes`, rounded up to whole blocks; `what` names its owner in errors."""

    def free(self, extent: Extent) -> None:
        """Give an extent back."""

    def read(
        self, extent: Extent, start: int, address: int, nbytes: int, what: str, owner: object
    ) -> Transfer:
        """Begin to copy bytes [start, start + nbytes) of `extent` to `address`."""

    def write(
        self, extent: Extent, start: int, address: int, nbytes: int, what: str, owner: object
    ) -> Transfer:
        """Begin to copy `nbytes` bytes at `address` to byte `start` of `extent`."""

    def where(self, extent: Extent, start: int) -> str:
        """Name byte `start` of `extent` for an error message."""


class HostStore:
    """Extents in host memory, charged to a ledger."""

    tier = "host"

    def __init__(self, ledger: Ledger) -> None:
        """Open an empty store that may hold what `ledger` allows."""
        self.ledger = ledger
        self._arenas: dict[int, Arena] = {}

    def allocate(self, nbytes: int, what: str) -> Extent:
        """Return an extent in memory of its own.

        Raises: HostMemoryError naming `what`, with the numbers, where the ledger has no room.
        """
        nbytes = round_up(max(nbytes, 1), BLOCK)
        if not self.ledger.try_reserve(nbytes):
            raise HostMemoryError(
                f"{what}: {format_size(nbytes)} do not fit host memory, which holds "
                f"{format_size(self.ledger.held_nbytes)} of "
                f"{format_size(self.ledger.limit_nbytes)}. Give Config a larger host_memory, or a folder on "
                "NVMe (nvme=...)."
            )
        return self._extent(nbytes)

    def allocate_promised(self, nbytes: int) -> Extent:
        """Return an extent for bytes that were set aside in the ledger, and are free by now."""
        self.ledger.set_aside(-nbytes)
        self.ledger.reserve_anyway(nbytes)
        return self._extent(nbytes)

    def _extent(self, nbytes: int) -> Extent:
        arena = Arena(max(nbytes, BLOCK))  # parameters may be empty
        self._arenas[arena.address] = arena
        return Extent(self, arena.address, nbytes)

    def free(self, extent: Extent) -> None:
        """Give an extent's memory back to the system."""
        del self._arenas[extent.offset]
        self.ledger.release(extent.nbytes)

    def read(
        self, extent: Extent, start: int, address: int, nbytes: int, what: str, owner: object
    ) -> Transfer:
        """Copy now; see Store."""
        kernels.copy(nbytes, address, extent.offset + start)
        return DONE

    def write(
        self, extent: Extent, start: int, address: int, nbytes: int, what: str, owner: object
    ) -> Transfer:
        """Copy now; see Store."""
        kernels.copy(nbytes, extent.offset + start, address)
        return DONE

    def where(self, extent: Extent, start: int) -> str:
        """Name a place for an error message."""
        return f"host memory, byte {start} of the extent"


@dataclass(slots=True)
class Traffic:
    """Bytes moved, by (tier, field)."""

    read: Counter[tuple[str, str]] = field(default_factory=Counter)
    written: Counter[tuple[str, str]] = field(default_factory=Counter)


class Record:
    """One unit's fields on storage, read and written tile by tile, each tile hashed as it is written.

    A field that was never written is absent: it has no extent and no bytes.
    """

    def __init__(self, shard: Shard, tile_numel: int, traffic: Traffic, *, verify: bool) -> None:
        """Describe a record of `shard` with no field yet."""
        self.name = "?"
        self.shard = shard
        self._tile_numel = tile_numel
        self._traffic = traffic
        self._verify = verify
        self._extents: dict[str, Extent] = {}
        self._hashes: dict[str, array[int]] = {}

    def __contains__(self, name: str) -> bool:
        """Whether the record has this field."""
        return name in self._extents

    def rename(self, segments: Sequence[str]) -> None:
        """Give the parameters their names in the finished model."""
        renamed = tuple(
            replace(one, name=name) for one, name in zip(self.shard.segments, segments, strict=True)
        )
        self.shard = Shard(renamed, self.shard.numel)

    def written(self, name: str, start: int) -> bool:
        """Whether the tile at element `start` of a field was ever written; what was not counts as zero."""
        return name in self._hashes and self._hashes[name][start // self._tile_numel] != 0

    def tier(self, name: str) -> str:
        """Where a field lies."""
        return self._extents[name].store.tier

    def tiers(self) -> tuple[tuple[str, str], ...]:
        """Return (field, tier) of every field it has."""
        return tuple((name, extent.store.tier) for name, extent in self._extents.items())

    def nbytes(self, tier: str) -> int:
        """Bytes the record takes in a tier."""
        return sum(extent.nbytes for extent in self._extents.values() if extent.store.tier == tier)

    def add(self, name: str, store: Store) -> None:
        """Give the record a field in `store`; its content is undefined until each tile is written."""
        self._extents[name] = store.allocate(self.shard.nbytes(name), f"{self.name}.{name}")
        self._hashes[name] = array("Q", bytes(8 * -(-self.shard.numel // self._tile_numel)))

    def drop(self, name: str) -> None:
        """Take a field away and give its extent back."""
        extent = self._extents.pop(name, None)
        if extent is not None:
            extent.store.free(extent)
            del self._hashes[name]

    def move(self, name: str, extent: Extent) -> None:
        """Let a field lie in `extent`, which holds the same bytes; the old extent is given back."""
        old = self._extents[name]
        self._extents[name] = extent
        old.store.free(old)

    def read(self, name: str, start: int, stop: int, address: int, owner: object) -> Transfer:
        """Begin to read elements [start, stop) of a field to `address`; `check` them when the transfer is
        over.
        """
        extent, size = self._extents[name], FIELD_NBYTES[name]
        nbytes = (stop - start) * size
        self._traffic.read[extent.store.tier, name] += nbytes
        return extent.store.read(extent, start * size, address, nbytes, f"{self.name}.{name}", owner)

    def write(self, name: str, start: int, stop: int, address: int, owner: object) -> Transfer:
        """Hash elements [start, stop) at `address`, whole tiles, and begin to write them."""
        extent, size = self._extents[name], FIELD_NBYTES[name]
        nbytes = (stop - start) * size
        for tile, tile_nbytes, tile_address in self._tiles(start, stop, size, address):
            self._hashes[name][tile] = _hash(tile_address, tile_nbytes) if self._verify else 1
        self._traffic.written[extent.store.tier, name] += nbytes
        return extent.store.write(extent, start * size, address, nbytes, f"{self.name}.{name}", owner)

    def check(self, name: str, start: int, stop: int, address: int) -> None:
        """Compare elements [start, stop), whole tiles just read to `address`, with the hashes of what was
        written.

        Raises: CorruptionError naming unit, field, file and offset.
        """
        if not self._verify:
            return
        extent, size = self._extents[name], FIELD_NBYTES[name]
        for tile, tile_nbytes, tile_address in self._tiles(start, stop, size, address):
            found, expected = _hash(tile_address, tile_nbytes), self._hashes[name][tile]
            if found != expected:
                where = extent.store.where(extent, tile * self._tile_numel * size)
                raise CorruptionError(
                    f"{self.name}.{name}: the {tile_nbytes} bytes read from {where} are not those that were "
                    "written "
                    f"(xxh3 {found:016x}, expected {expected:016x}). Likely cause: the device returned stale "
                    "or damaged data. "
                    "Check it (smartctl, dmesg) and go on from your last checkpoint."
                )

    def _tiles(self, start: int, stop: int, size: int, address: int) -> list[tuple[int, int, int]]:
        """Return (tile, bytes, address) of each hashed tile in elements [start, stop)."""
        if start % self._tile_numel:
            raise ValueError(f"{self.name}: element {start} is inside a tile of {self._tile_numel}")
        return [
            (
                at // self._tile_numel,
                (min(at + self._tile_numel, stop) - at) * size,
                address + (at - start) * size,
            )
            for at in range(start, stop, self._tile_numel)
        ]


def _hash(address: int, nbytes: int) -> int:
    """Return the tile's hash, never 0: that stands for "not written"."""
    return xxhash.xxh3_64_intdigest(view(address, nbytes)) or 1

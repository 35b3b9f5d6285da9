"""Where records lie: extents on NVMe and in host memory, and the hashes that prove what is read is what was
written.

A *record* has one place per field, in one of two tiers. A field in host memory is worked on where it lies; a
field on NVMe is read into memory, worked on and written back. A field moves up (is pinned) without any
transfer of its own: the pass that has read it leaves it in its target. It moves down by being written.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from mmap import mmap
from typing import TYPE_CHECKING

from infinity.errors import CorruptionError
from infinity.planning.layout import FP32, FieldCuts, Format, Shard
from infinity.records.checksums import FieldTile, TileChecksums
from infinity.sizes import BLOCK
from infinity.storage.store import DONE, DiskStore, Extent, HostStore, Request, Store, Transfer

if TYPE_CHECKING:
    import torch
SAMPLED = 16
"""With verify="sample": one tile in so many is compared when it is read."""

_GOLDEN = 2654435769  # 2**32 / the golden ratio: multiples of it, mod 2**32, are spread evenly


@dataclass(slots=True)
class Traffic:
    """Bytes moved, by (tier, field)."""

    read: Counter[tuple[str, str]] = field(default_factory=Counter)
    written: Counter[tuple[str, str]] = field(default_factory=Counter)


class Record:
    """One unit's fields on storage, by tiles.

    A field that lies in host memory is worked on where it is. A field on NVMe is read and written tile by
    tile, and each tile is hashed as it is written; where several tiles share a block, `span` of them at once.
    A field that was never written is absent: it has no extent and no bytes.
    """

    def __init__(
        self,
        shard: Shard,
        tile_numel: int,
        traffic: Traffic,
        *,
        verify: str = "always",
        form: Format = FP32,
        whole: Shard | None = None,
        name: str = "?",
    ) -> None:
        """Describe a record of `shard` with no field yet; it is a rank's share of `whole`. verify: "always",
        "sample" or "off"; see Config.
        """
        self.name = name
        self.shard = shard
        self.whole = whole or shard
        """The unit of which `shard` is this rank's share: itself, where there is one rank."""
        self.form = form
        self.targets: dict[str, Extent] = {}
        """Extents in host memory that fields on NVMe are to lie in: the next pass that has all of such a
        field in memory puts it there, and `adopt`s the extent.
        """
        self.changed_in_host: set[str] = set()
        """Fields in host memory that were changed there since somebody took them out of this set."""
        self.tile_numel = tile_numel
        """Elements of a tile: what passes read, work on and write at once."""
        self._traffic = traffic
        self._hashes_tiles = verify != "off"
        self._samples = verify == "sample"
        """Whether only some of the tiles are compared when they are read."""
        self._reads = 0
        self.all_in_host = True
        """Whether every field it has, spilled gradients apart, lies in host memory."""
        self._extents: dict[str, Extent] = {}
        self.fields: tuple[str, ...] = ()
        """The weights, and the state that its optimizers keep, as far as it has them: no gradients."""
        self.packed: frozenset[str] = frozenset()
        """Those of them of which several tiles share a block; see packing."""
        self._cuts = FieldCuts(form, tile_numel)
        self._hashes: dict[str, array[int]] = {}
        self._whole: dict[str, int] | None = None

    def __contains__(self, name: str) -> bool:
        """Whether the record has this field."""
        return name in self._extents

    def name_unit(self, name: str) -> None:
        """Give the unit its name in the finished model."""
        self.name = name

    @contextmanager
    def comparing_all(self) -> Iterator[None]:
        """Compare every tile that is read in this while, whatever `verify` says of samples."""
        samples, self._samples = self._samples, False
        try:
            yield
        finally:
            self._samples = samples

    def rename(self, segments: Sequence[str]) -> None:
        """Give the parameters their names in the finished model."""
        self.shard, self.whole = (_renamed(one, segments) for one in (self.shard, self.whole))

    def part(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter's values, one-dimensional, a view of `whole`."""
        segment = self.shard.segments[index]
        return whole.reshape(-1)[segment.first : segment.first + segment.numel]

    def written(self, name: str, start: int) -> bool:
        """Whether the tile at element `start` of a field was ever written, or one that shares a block with
        it; what was not counts as zero.
        """
        return name in self._hashes and self._hashes[name][start // self.span(name)] != 0

    def tier(self, name: str) -> str:
        """Where a field lies."""
        return self._extents[name].store.tier

    def tiers(self) -> tuple[tuple[str, str], ...]:
        """Return (field, tier) of every field it has."""
        return tuple((name, extent.store.tier) for name, extent in self._extents.items())

    def in_host(self, name: str) -> bool:
        """Whether a field lies in host memory."""
        return isinstance(self._extents[name].store, HostStore)

    def nbytes(self, tier: str) -> int:
        """Bytes the record takes in a tier."""
        return sum(extent.nbytes for extent in self._extents.values() if extent.store.tier == tier)

    def span(self, name: str) -> int:
        """Elements of a field that are moved, and hashed, at once: a tile, or more where it is `packed`."""
        return self._cuts.span(name)

    def new_hashes(self, name: str) -> array[int]:
        """Return the hashes of a field, as the record has it, of which nothing is written."""
        return array("Q", bytes(8 * -(-self.shard.numel // self.span(name))))

    def field_nbytes(self, name: str) -> int:
        """Bytes of a field of the whole unit."""
        return self.tile_nbytes(name, self.shard.numel)

    def tile_nbytes(self, name: str, numel: int) -> int:
        """Bytes that `numel` elements from the start of a span take, on NVMe as in memory: whole blocks."""
        return self._cuts.nbytes(name, numel)

    # Where fields lie

    def add(self, name: str, store: Store) -> None:
        """Give the record a field in `store`; its content is undefined until each tile is written."""
        self._extents[name] = store.allocate(self.field_nbytes(name), f"{self.name}.{name}")
        self._moved()
        self._hashes[name] = self.new_hashes(name)

    def drop(self, name: str) -> None:
        """Take a field away and give its extent back."""
        target = self.targets.pop(name, None)
        if target is not None:
            target.store.free(target)
        extent = self._extents.pop(name, None)
        if extent is not None:
            self._cuts.reset(name)
            self._moved()
            extent.store.free(extent)
            del self._hashes[name]

    def adopt(self, name: str) -> None:
        """Let a field lie in its target, which holds all of it."""
        old = self._extents[name]
        self._extents[name] = self.targets.pop(name)
        self._moved()
        self.changed_in_host.add(name)
        old.store.free(old)

    def move(self, name: str, extent: Extent, hashes: array[int]) -> None:
        """Let a field lie in `extent`, on NVMe, where its tiles with these `hashes` were written."""
        old = self._extents[name]
        self._extents[name], self._hashes[name] = extent, hashes
        self._moved()
        old.store.free(old)

    def _moved(self) -> None:
        self.fields = tuple(name for name in self.form.fields if name in self._extents)
        several = self.shard.numel > self.tile_numel
        self.packed = frozenset(name for name in self.fields if several and self.span(name) > self.tile_numel)
        self.all_in_host = all(self.in_host(name) for name in self.fields)
        self._whole = None

    def place(self, name: str) -> tuple[Extent, array[int]]:
        """Return where a field lies, and its tiles' hashes, both as they are now."""
        return self._extents[name], self._hashes[name]

    def span_of(self, name: str, nbytes: int) -> int | None:
        """Return the span of a field that takes `nbytes`, as a run has left it: before fields were packed,
        each tile had blocks of its own. None where it is of another unit, or another format.
        """
        for span in (self.form.span(name, self.tile_numel), self.tile_numel):
            if self.form.stored_nbytes(name, self.shard.numel, span) == nbytes:
                return span
        return None

    def restore(self, name: str, extent: Extent, hashes: array[int], span: int) -> None:
        """Let a field, whether or not the record has it, lie in `extent`, and have this span and hashes."""
        self.drop(name)
        self._extents[name], self._hashes[name] = extent, hashes
        self._cuts.put(name, span)
        self._moved()

    def address(self, name: str, start: int) -> int | None:
        """Return the address of element `start` of a field in host memory; None for a field on NVMe."""
        extent = self._extents[name]
        return extent.offset + self._cuts.offset(name, start) if isinstance(extent.store, HostStore) else None

    def there(self, name: str, start: int) -> int:
        """Return the address of element `start` of a field, which lies in host memory."""
        return self._extents[name].offset + self._cuts.offset(name, start)

    def target_address(self, name: str, start: int) -> int:
        """Return the address of element `start` in a field's target."""
        return self.targets[name].offset + self._cuts.offset(name, start)

    def memory(self, name: str) -> mmap | None:
        """Return the host memory that holds a field, or is going to; None where there is none."""
        extent = self.targets.get(name, self._extents[name])
        return extent.store.memory(extent) if isinstance(extent.store, HostStore) else None

    def leave(self, name: str) -> None:
        """Move a field in host memory to new memory: others keep the old, with the values it has."""
        extent = self._extents[name]
        if isinstance(extent.store, HostStore):
            self._extents[name] = extent.store.replace(extent)
            self._whole = None

    # Transfers of fields on NVMe

    def read(
        self,
        name: str,
        start: int,
        stop: int,
        address: int,
        owner: object,
        *,
        urgent: bool = False,
        more: bool = False,
    ) -> Transfer:
        """Begin to read elements [start, stop) of a field, whole spans, to `address`; compare their `sums`
        when the transfer is over. urgent, more: see Request.
        """
        extent, nbytes = self._extents[name], self.tile_nbytes(name, stop - start)
        disk = self._disk(extent, name)
        self._traffic.read[disk.tier, name] += nbytes
        what, offset = f"{self.name}.{name}", self._cuts.offset(name, start)
        return disk.read(Request(extent, offset, address, nbytes, what, owner, urgent, more))

    def _disk(self, extent: Extent, name: str) -> DiskStore:
        """Return the store of a field's extent, which has to be one on NVMe."""
        if isinstance(extent.store, HostStore):
            raise TypeError(f"{self.name}.{name} lies in host memory: it is used there, not transferred")
        return extent.store

    def write(
        self, name: str, start: int, stop: int, address: int, owner: object, *, more: bool = False
    ) -> Transfer:
        """Begin to write elements [start, stop) of a field, whole spans, whose checksums were kept: see
        `sums`. more: see Request.
        """
        return self._write(self._extents[name], name, start, stop, address, owner, more=more)

    def write_to(
        self,
        extent: Extent,
        hashes: array[int],
        name: str,
        start: int,
        stop: int,
        address: int,
        owner: object,
    ) -> Transfer:
        """Begin to write elements [start, stop) of a field in host memory to an extent, and put their
        checksums into `hashes`: all spans that end among them.
        """
        span = self.span(name)
        first, last = start // span * span, stop if stop == self.shard.numel else stop // span * span
        if first >= last:
            return DONE
        address -= self._cuts.offset(name, start) - self._cuts.offset(name, first)
        self._sums(first, last, {name: address}, (), {name: hashes}).keep()
        return self._write(extent, name, first, last, address, owner)

    def _write(
        self,
        extent: Extent,
        name: str,
        start: int,
        stop: int,
        address: int,
        owner: object,
        *,
        more: bool = False,
    ) -> Transfer:
        disk, nbytes = self._disk(extent, name), self.tile_nbytes(name, stop - start)
        self._traffic.written[disk.tier, name] += nbytes
        what, offset = f"{self.name}.{name}", self._cuts.offset(name, start)
        return disk.write(Request(extent, offset, address, nbytes, what, owner, more=more))

    def in_one_piece(self, names: Sequence[str]) -> bool:
        """Whether fields lie without gaps between their tiles, and each was written altogether or not at
        all: then any range of tiles can be worked on at once, where it lies.
        """
        hashes = [self._hashes[name] for name in names]
        return self._is_even(names) and all(0 not in one or not any(one) for one in hashes)

    def _is_even(self, names: Sequence[str]) -> bool:
        """Whether no field has a gap behind its tiles."""
        return all(self.form.nbytes(name, self.span(name)) % BLOCK == 0 for name in names)

    def whole_in_host(self) -> dict[str, int] | None:
        """Return the addresses of `fields`, if they lie in host memory without gaps and every tile of them
        was written, else None.
        """
        if self._whole is not None:
            return self._whole
        written = all(0 not in self._hashes[name] for name in self.fields)
        if written and self.all_in_host and self._is_even(self.fields):
            self._whole = {name: self.there(name, 0) for name in self.fields}
        return self._whole

    def note_written(self, name: str, start: int, stop: int) -> None:
        """Remember that elements [start, stop) of a field were written where they lie.

        Of a hash in host memory only that it is not 0 counts.
        """
        hashes, span = self._hashes[name], self.span(name)
        self.changed_in_host.add(name)
        for tile in range(start // span, -(-stop // span)):
            hashes[tile] = hashes[tile] or 1

    def sums(
        self, start: int, stop: int, at: Mapping[str, int], reads: Sequence[str], writes: Sequence[str]
    ) -> TileChecksums:
        """Return the checksums of elements [start, stop), whole spans, which are `at` these addresses: of the
        fields that were read, to compare, and of those to be written, to keep.
        """
        return self._sums(start, stop, at, reads, {name: self._hashes[name] for name in writes})

    def _sums(
        self,
        start: int,
        stop: int,
        at: Mapping[str, int],
        reads: Sequence[str],
        writes: Mapping[str, array[int]],
    ) -> TileChecksums:
        if not self._hashes_tiles:
            reads = ()
        parts = []
        for name in dict.fromkeys((*reads, *writes)):
            span, base, hashes = self.span(name), at[name] - self._cuts.offset(name, start), writes.get(name)
            if start % span:
                raise ValueError(f"{self.name}.{name}: element {start} is inside a tile of {span}")
            for first in range(start, stop, span):
                compared = name in reads and self._is_compared()
                if compared or hashes is not None:
                    nbytes = self.tile_nbytes(name, min(span, stop - first))
                    address = base + self._cuts.offset(name, first)
                    parts.append(FieldTile(name, first // span, address, nbytes, compared, hashes))
        return TileChecksums(self.form, parts, self.compare, taken=self._hashes_tiles)

    def _is_compared(self) -> bool:
        """Whether the next tile that is read is compared."""
        self._reads += 1
        return not self._samples or self._reads * _GOLDEN % (1 << 32) < (1 << 32) // SAMPLED

    def compare(self, name: str, tile: int, nbytes: int, found: int) -> None:
        """Compare the checksum of a tile that was read with that of what was written.

        Raises: CorruptionError naming unit, field, file and offset.
        """
        expected = self._hashes[name][tile]
        if found == expected:
            return
        extent, offset = self._extents[name], self._cuts.offset(name, tile * self.span(name))
        where = self._disk(extent, name).where(extent, offset)
        raise CorruptionError(
            f"{self.name}.{name}: the {nbytes} bytes read from {where} are not those that were written "
            f"(checksum {found:016x}, expected {expected:016x}). Likely cause: the device returned stale or "
            "damaged data. Check it (smartctl, dmesg) and go on from your last checkpoint; a durable run "
            "from its older generation, infinity.resume(..., older=True), if that is still whole."
        )


def _renamed(shard: Shard, names: Sequence[str]) -> Shard:
    segments = zip(shard.segments, names, strict=True)
    return Shard(tuple(replace(one, name=name) for one, name in segments), shard.numel)

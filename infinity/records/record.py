"""Records: a unit's fields in extents on NVMe and in host memory, and the checksums of what was written.

A field in host memory is worked on in place; a field on NVMe is read into memory, worked on and written back.
Pinning a field in host memory needs no transfer of its own: the pass that reads it puts it into its target
extent. A field moves back to NVMe by being written there.

[Note: fields in files]
The weights of a record may lie in a checkpoint's own files: `hi` alone, whose bytes are ranges of them. They
are read as those on NVMe are, and never written; what is pinned goes back by being dropped. Checksums are
taken by the first read of each tile, and compared from then on. Before such a record is written, `make_own`
gives it extents of its own.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from mmap import mmap
from typing import TYPE_CHECKING

from infinity import kernels
from infinity.planning.layout import ALONE, FP32, FieldCuts, FlatLayout, Holders, RecordSchema
from infinity.records.checksums import FieldTile, ReadSample, TileChecksums
from infinity.records.corruption import corruption
from infinity.sizes import BLOCK
from infinity.storage.checkpoint_store import Arriving, CheckpointStore
from infinity.storage.packed import FileRange, Packed
from infinity.storage.store import (
    DONE,
    DiskStore,
    Extent,
    HostStore,
    Request,
    Store,
    TensorStore,
    Transfer,
)

if TYPE_CHECKING:
    import torch
_UNSEEN = 2
"""Stands for the checksum of a tile in a file that nobody has read yet."""


@dataclass(slots=True)
class Traffic:
    """Bytes moved, by (tier, field)."""

    read: Counter[tuple[str, str]] = field(default_factory=Counter)
    written: Counter[tuple[str, str]] = field(default_factory=Counter)


class Record:
    """One unit's fields, by tiles, in host memory or on NVMe.

    A field on NVMe is read and written tile by tile, and each tile is hashed as it is written; where tiles
    share a block, `span` elements at once. A field that was never added has no extent and no bytes.
    """

    def __init__(
        self,
        shard: FlatLayout,
        tile_numel: int,
        traffic: Traffic,
        *,
        verify: str = "always",
        schema: RecordSchema = FP32,
        unit_layout: FlatLayout | None = None,
        name: str = "?",
        holders: Holders = ALONE,
    ) -> None:
        """Make a record of `shard`, this rank's part of the unit that lies as `unit_layout` says, without
        fields. verify: "always", "sample" or "off"; see Config. holders: the ranks that have parts.
        """
        self.name, self.holders = name, holders
        self.is_elsewhere = not holders.are_all and not shard.numel  # other ranks alone have parts
        self.shard = shard
        self.unit_layout = unit_layout or shard
        """How the unit lies that `shard` is this rank's part of; the same with one rank."""
        self.schema = schema
        self.targets: dict[str, Extent] = {}
        """Extents in host memory for fields that are on NVMe and to be pinned: the next pass that reads all
        of such a field puts it there, and calls `adopt`.
        """
        self.changed_in_host: set[str] = set()
        """Fields that were changed in host memory, or on the device; a commit takes those it writes out of
        this set.
        """
        self.tile_numel = tile_numel
        """Elements that passes read, work on and write at once."""
        self._traffic = traffic
        self._hashes_tiles = verify != "off"
        self._sample = ReadSample(verify == "sample")
        self.all_in_host = True
        """Whether all of `fields` are in host memory."""
        self.on_device = False
        """Whether all of `fields` are in the memory of an accelerator, which uses and updates them there."""
        self._has_tensors = False
        """Whether any is."""
        self._extents: dict[str, Extent] = {}
        self.fields: tuple[str, ...] = ()
        """Its fields of weights and optimizer state; no spilled gradients."""
        self.packed: frozenset[str] = frozenset()
        """Those of `fields` whose tiles share blocks; see packing."""
        self._cuts = FieldCuts(schema, tile_numel)
        self._hashes: dict[str, array[int]] = {}
        self._addresses: dict[str, int] | None = None
        """Those of `fields`, where `addresses_in_host` has found them."""
        self._in_files: tuple[CheckpointStore, Extent] | None = None
        self.watchers: set[Callable[[], None]] = set()
        """Called when the values of fields are about to change; see records/next_fields.py."""
        self._told: tuple[set[int], int] | None = None
        self._alone: dict[int, tuple[str, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._extents

    def name_unit(self, name: str) -> None:
        """Give the unit its name in the finished model."""
        self.name = name

    def comparing_all(self) -> AbstractContextManager[None]:
        """Compare every tile that is read within the `with`, also with verify="sample"."""
        return self._sample.of_all()

    def rename(self, segments: Sequence[str]) -> None:
        """Give the parameters their names in the finished model."""
        self.shard, self.unit_layout = (one.renamed(segments) for one in (self.shard, self.unit_layout))

    def rank_part(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter's values, one-dimensional, a view of `whole`."""
        segment = self.shard.segments[index]
        return whole.resolve_neg().reshape(-1)[segment.first : segment.first + segment.numel]

    def written(self, name: str, start: int) -> bool:
        """Whether the tile at element `start` of a field, or one in the same span, was ever written. A tile
        that was not counts as zeros.
        """
        return name in self._hashes and self._hashes[name][start and start // self._cuts.span(name)] != 0

    def tier(self, name: str) -> str:
        """Return the name of the tier that a field is in."""
        return self._extents[name].store.tier

    def tiers(self) -> tuple[tuple[str, str], ...]:
        """Return (field, tier) of every field it has."""
        return tuple((name, extent.store.tier) for name, extent in self._extents.items())

    def in_host(self, name: str) -> bool:
        """Whether a field is in host memory."""
        return isinstance(self._extents[name].store, HostStore)

    def in_device(self, name: str) -> bool:
        """Whether a field is in the memory of an accelerator."""
        return isinstance(self._extents[name].store, TensorStore)

    def volatile(self, name: str) -> bool:
        """Whether a field is where the end of the process, or a crash, loses it."""
        return self.in_host(name) or self.in_device(name)

    def nbytes(self, tier: str) -> int:
        """Bytes the record takes in a tier."""
        kept = self.packed_copy if tier == "host" else None
        fields = sum(extent.nbytes for extent in self._extents.values() if extent.store.tier == tier)
        return fields + (kept.nbytes if kept is not None else 0)

    def span(self, name: str) -> int:
        """Elements of a field that are moved and hashed at once: a tile, or several if it is `packed`."""
        return self._cuts.span(name)

    def new_hashes(self, name: str) -> array[int]:
        """Return the checksums of a field, one per span, all "never written"."""
        return array("Q", bytes(8 * -(-self.shard.numel // self.span(name))))

    def field_nbytes(self, name: str) -> int:
        """Bytes of this rank's part of a field, in whole blocks."""
        return self.tile_nbytes(name, self.shard.numel)

    def tile_nbytes(self, name: str, numel: int) -> int:
        """Bytes, in whole blocks, of `numel` elements from the start of a span, on NVMe and in memory."""
        return self._cuts.nbytes(name, numel)

    # Places of fields

    def add(self, name: str, store: Store) -> None:
        """Add a field in `store`; each tile is undefined until it is written."""
        self._extents[name] = store.allocate(self.field_nbytes(name), f"{self.name}.{name}")
        self._moved()
        self._hashes[name] = self.new_hashes(name)

    def may_have(self, names: Sequence[str]) -> None:
        """Let it have further fields, of fp32, beside those of its schema."""
        if not set(names) <= set(self.schema.names):
            self.schema = self.schema.with_fields(names)
            self._cuts.know(self.schema)

    def keep_moments(self, index: int, kept: Iterable[str]) -> None:
        """Note which of `m` and `v` the optimizer of a parameter keeps, where it has fields by itself."""
        self._alone[index] = self.schema.moments_of(kept)

    def moments_of(self, index: int) -> tuple[str, ...]:
        """Return the fields in which a parameter's moments are kept."""
        return self._alone.get(index, self.schema.moments_of(("m", "v")))

    @property
    def in_files(self) -> Extent | None:
        """Where `hi`, all that there is of the weights, lies in a checkpoint's files, pinned or not; None for
        a record of its own. See [Note: fields in files].
        """
        return None if self._in_files is None else self._in_files[1]

    def lie_in(self, store: CheckpointStore, ranges: Sequence[FileRange | Packed]) -> None:
        """Let the weights be these ranges, one for each whole parameter, of a checkpoint's files.

        Raises: CorruptionError, OSError naming the file.
        """
        parts = [
            store.part(one, self.schema, segment.first, segment.numel, segment.start)
            for segment, one in zip(self.shard.segments, ranges, strict=True)
            if segment.numel
        ]
        extent = self._extents["hi"] = store.lay(parts, self.field_nbytes("hi"))
        self._in_files = store, extent
        self._hashes["hi"] = array("Q", [_UNSEEN]) * -(-self.shard.numel // self.span("hi"))
        self._moved()

    def trust(self, hashes: array[int]) -> None:
        """Compare what is read of the files with these checksums, of an earlier process."""
        self._hashes["hi"] = hashes

    @property
    def packed_nbytes(self) -> int | None:
        """Bytes of the files that `hi` is, where any of its parameters are packed in them; else None."""
        if self._in_files is None:
            return None
        store, extent = self._in_files
        return store.packed_nbytes(extent)

    @property
    def is_transposed(self) -> bool:
        """Whether anything of it is packed in files in another order: it is best read at once."""
        return self._in_files is not None and self._in_files[0].transposes(self._in_files[1])

    def keep_packed(self, extent: Extent) -> None:
        """Keep what is packed in files in host memory as it is there: `extent`, of `packed_nbytes`."""
        if self._in_files is not None:
            store, packed = self._in_files
            store.keep(packed, extent)

    @property
    def packed_copy(self) -> Extent | None:
        """Where in host memory what is packed in files is kept as it is there; None for nowhere."""
        if self._in_files is None:
            return None
        store, extent = self._in_files
        return store.copy_of(extent)

    def make_own(self, store: Store) -> None:
        """Leave the files: give the weights extents in `store`, undefined until they are written; `hi` stays
        in host memory if it is pinned.

        Raises: HostMemoryError, aio.StorageFullError; then the record is as before.
        """
        new: dict[str, Extent] = {}
        names = [one for one in self.schema.weights if one not in self or not self.in_host(one)]
        try:
            for name in names:
                new[name] = store.allocate(self.field_nbytes(name), f"{self.name}.{name}")
        except BaseException:
            for extent in new.values():
                store.free(extent)
            raise
        if isinstance(store, HostStore) and (target := self.targets.pop("hi", None)) is not None:
            target.store.free(target)  # `hi` is in host memory by itself from now on
        if self._in_files is not None:
            files, extent = self._in_files
            files.free(extent)
        self._in_files = None
        for name, extent in new.items():
            self._extents[name], self._hashes[name] = extent, self.new_hashes(name)
        self.changed_in_host.add("hi")
        self._moved()

    def drop_host_copy(self) -> None:
        """Let go of the copy in host memory of what lies in files."""
        if self._in_files is None:
            return
        pinned, (store, extent) = self._extents["hi"], self._in_files
        store.forget(extent)
        if pinned is not extent:
            self._extents["hi"] = extent
            self._moved()
            pinned.store.free(pinned)

    def drop(self, name: str) -> None:
        """Remove a field and free its extent, if the record has it."""
        if name in self.fields:
            self.values_change()
        if name == "hi" and self._in_files is not None:
            self.drop_host_copy()
            self._in_files = None
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
        """Move a field to its target, into which a pass has put all of it."""
        old = self._extents[name]
        self._extents[name] = self.targets.pop(name)
        self._moved()
        self.changed_in_host.add(name)
        if old is not self.in_files:
            old.store.free(old)

    def move(self, name: str, extent: Extent, hashes: array[int]) -> None:
        """Move a field to `extent`, where it was written with these checksums."""
        old = self._extents[name]
        self._extents[name], self._hashes[name] = extent, hashes
        self._moved()
        if self.volatile(name):  # a durable run's copy on NVMe may be of a time before it was there itself
            self.changed_in_host.add(name)
        old.store.free(old)

    def exchange(self, homes: Mapping[str, tuple[Extent, array[int]]]) -> dict[str, Extent]:
        """Let fields be what was written to other extents, on NVMe, with these checksums. Return the extents
        that they leave; one in host memory becomes the target of its field, which comes back to it.
        """
        left: dict[str, Extent] = {}
        for name, home in homes.items():
            if self._hashes[name] is home[1]:  # it was interrupted here
                continue
            old, (self._extents[name], self._hashes[name]) = self._extents[name], home
            (self.targets if isinstance(old.store, HostStore) else left)[name] = old
        self._moved()
        return left

    def values_change(self) -> None:
        """Tell those who watch that the values of fields are about to change."""
        for call in list(self.watchers):
            call()

    def _moved(self) -> None:
        before, self.fields = self.fields, tuple(name for name in self.schema.names if name in self._extents)
        several = self.shard.numel > self.tile_numel
        self.packed = frozenset(name for name in self.fields if several and self.span(name) > self.tile_numel)
        self.all_in_host = all(self.in_host(name) for name in self.fields)
        there = sum(map(self.in_device, self.fields))
        self._has_tensors, self.on_device = there > 0, 0 < there == len(self.fields)
        self._addresses = None
        if self._told is not None and self.fields != before:
            self._told[0].add(self._told[1])

    def tell_fields(self, changed: set[int], index: int) -> None:
        """Put `index` into `changed` whenever `fields` come or go, or may take other bytes, from now on."""
        self._told = changed, index

    def home(self, name: str) -> tuple[Extent, array[int]]:
        """Return a field's extent and its checksums, as they are now."""
        return self._extents[name], self._hashes[name]

    def span_of(self, name: str, nbytes: int) -> int | None:
        """Return the span with which a field takes `nbytes`; None where no record like this one has any."""
        return self._cuts.span_of(name, self.shard.numel, nbytes)

    def restore(self, name: str, extent: Extent, hashes: array[int], span: int) -> None:
        """Set a field's extent, span and checksums; replace the field if the record has it."""
        self.drop(name)
        self._extents[name], self._hashes[name] = extent, hashes
        self._cuts.put(name, span)
        self._moved()

    def address(self, name: str, start: int) -> int | None:
        """Return the address of element `start` of a field in host memory; None for a field on NVMe."""
        extent = self._extents[name]
        return extent.offset + self._cuts.offset(name, start) if isinstance(extent.store, HostStore) else None

    def host_address(self, name: str, start: int) -> int:
        """Return the address of element `start` of a field that is in host memory."""
        return self._extents[name].offset + self._cuts.offset(name, start)

    def target_address(self, name: str, start: int) -> int:
        """Return the address of element `start` in a field's target."""
        return self.targets[name].offset + self._cuts.offset(name, start)

    def memory(self, name: str) -> mmap | None:
        """Return the host memory of a field's target, or of the field itself; None for one on NVMe alone."""
        extent = self.targets.get(name, self._extents[name])
        return extent.store.memory(extent) if isinstance(extent.store, HostStore) else None

    def give_new_memory(self, name: str) -> None:
        """Give a field in host memory, or on the device, new memory; holders of the old keep its values."""
        extent = self._extents[name]
        if isinstance(extent.store, HostStore | TensorStore):
            self._extents[name] = extent.store.replace(extent)
            self._addresses = None

    # Fields on the device, which work there goes between `arrived` and `used`: see TensorStore

    def tensor(self, name: str) -> torch.Tensor:
        """Return the bytes of a field on the device, always the same tensor while it is there."""
        store, extent = self._on_device(name)
        return store.tensor(extent)

    def arrived(self, *names: str) -> None:
        """Have later work on the calling thread's stream see what is in fields on the device."""
        for name in names:
            store, extent = self._on_device(name)
            store.arrived(extent)

    def used(self, *names: str) -> None:
        """Have later copies of fields on the device wait for the work queued so far."""
        for name in names:
            store, extent = self._on_device(name)
            store.used(extent)

    def note_updated(self) -> None:
        """Mark all that is on the device as written, and as changed."""
        for name in self.fields:
            hashes = self._hashes[name]
            if 0 in hashes:  # see note_written
                self._hashes[name] = array("Q", [one or 1 for one in hashes])
        self.changed_in_host.update(self.fields)

    def _on_device(self, name: str) -> tuple[TensorStore, Extent]:
        extent = self._extents[name]
        if not isinstance(extent.store, TensorStore):
            raise TypeError(f"{self.name}.{name} is on {extent.store.tier}, not on the device")
        return extent.store, extent

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
        window: tuple[int, int] = (0, 0),
        framed: bool = False,
        extent: Extent | None = None,
    ) -> Transfer:
        """Start to read elements [start, stop) of a field, whole spans, to `address`. The caller compares
        their `checksums` when the transfer has ended. urgent, more, window, framed: see Request. extent:
        another one than the field lies in.
        """
        extent, nbytes = extent or self._extents[name], self._cuts.nbytes(name, stop - start)
        disk, what, offset = self._disk(extent, name), f"{self.name}.{name}", self._cuts.offset(name, start)
        begun = disk.read(Request(extent, offset, address, nbytes, what, owner, urgent, more, window, framed))
        self._traffic.read[disk.tier, name] += begun.moved_nbytes if isinstance(begun, Arriving) else nbytes
        return begun

    def _disk(self, extent: Extent, name: str) -> DiskStore:
        """Return the store of a field's extent, which has to be on NVMe."""
        if isinstance(extent.store, HostStore):
            raise TypeError(f"{self.name}.{name} is in host memory: it is used in place, not transferred")
        return extent.store

    def write(
        self, name: str, start: int, stop: int, address: int, owner: object, *, more: bool = False
    ) -> Transfer:
        """Start to write elements [start, stop) of a field, whole spans. Call `checksums(...).keep()` for
        them before. more: see Request.
        """
        return self.write_at(self._extents[name], name, start, stop, address, owner, more=more)

    def write_to(
        self, extent: Extent, hashes: array[int], name: str, start: int, stop: int, at: int, owner: object
    ) -> Transfer:
        """Start to write those spans of a field in memory that end within elements [start, stop) to an
        extent, and put their checksums into `hashes`; to one in host memory they are copied at once.
        """
        span = self.span(name)
        first, last = start // span * span, stop if stop == self.shard.numel else stop // span * span
        if first >= last:
            return DONE
        at -= self._cuts.offset(name, start) - self._cuts.offset(name, first)
        self.checksums_kept_in(first, last, {name: at}, (), {name: hashes}).keep()
        if isinstance(extent.store, HostStore):
            nbytes = self.tile_nbytes(name, last - first)
            kernels.copy(nbytes, extent.offset + self._cuts.offset(name, first), at)
            return DONE
        return self.write_at(extent, name, first, last, at, owner)

    def write_at(
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
        """Start to write elements [start, stop) of a field, whole spans, to an extent; see `write`."""
        disk, nbytes = self._disk(extent, name), self._cuts.nbytes(name, stop - start)
        self._traffic.written[disk.tier, name] += nbytes
        what, offset = f"{self.name}.{name}", self._cuts.offset(name, start)
        return disk.write(Request(extent, offset, address, nbytes, what, owner, more=more))

    def in_one_piece(self, names: Sequence[str]) -> bool:
        """Whether fields have no gaps between their tiles, and each was written completely or never: then
        any range of tiles can be worked on at once, in place.
        """
        hashes = [self._hashes[name] for name in names]
        return self._is_even(names) and all(0 not in one or not any(one) for one in hashes)

    def _is_even(self, names: Sequence[str]) -> bool:
        """Whether no field has gaps between its tiles."""
        return all(self.schema.nbytes(name, self.span(name)) % BLOCK == 0 for name in names)

    def addresses_in_host(self) -> dict[str, int] | None:
        """Return the addresses of `fields` if all are in host memory, without gaps and completely written;
        else None.
        """
        if self._addresses is not None:
            return self._addresses
        written = all(0 not in self._hashes[name] for name in self.fields)
        if written and self.all_in_host and self._is_even(self.fields):
            self._addresses = {name: self.host_address(name, 0) for name in self.fields}
        return self._addresses

    def note_written(self, name: str, start: int, stop: int) -> None:
        """Mark elements [start, stop) of a field in host memory as written, by any checksum but 0: those of
        host memory are not compared.
        """
        hashes, span = self._hashes[name], self.span(name)
        self.changed_in_host.add(name)
        for tile in range(start // span, -(-stop // span)):
            hashes[tile] = hashes[tile] or 1

    def checksums(
        self, start: int, stop: int, at: Mapping[str, int], reads: Sequence[str], writes: Sequence[str]
    ) -> TileChecksums:
        """Return the checksums of elements [start, stop), whole spans, at these addresses: to compare for the
        fields that were read, and to keep for those that are to be written.
        """
        return self.checksums_kept_in(start, stop, at, reads, {name: self._hashes[name] for name in writes})

    def checksums_kept_in(
        self,
        start: int,
        stop: int,
        at: Mapping[str, int],
        reads: Sequence[str],
        writes: Mapping[str, array[int]],
        compare: Callable[[str, int, int, int], None] | None = None,
    ) -> TileChecksums:
        """As `checksums`; those to be kept are kept in these arrays. compare: in the place of the method."""
        if not self._hashes_tiles:
            reads = ()
        elif self._has_tensors:  # what is updated on the device has no checksums
            reads = [name for name in reads if not self.in_device(name)]
        parts, cuts = [], self._cuts
        for name in dict.fromkeys((*reads, *writes)):
            span, hashes, address = cuts.span(name), writes.get(name), at[name]
            if start % span:
                raise ValueError(f"{self.name}.{name}: element {start} is inside a tile of {span}")
            for first in range(start, stop, span):
                compared = name in reads and self._sample.has_next()
                nbytes = cuts.nbytes(name, min(span, stop - first))
                if compared or hashes is not None:
                    parts.append(FieldTile(name, first // span, address, nbytes, compared, hashes))
                address += nbytes  # spans are whole blocks, one behind the other
        return TileChecksums(self.schema, parts, compare or self.compare, taken=self._hashes_tiles)

    def compare(
        self, name: str, tile: int, nbytes: int, found: int, home: tuple[Extent, array[int]] | None = None
    ) -> None:
        """Compare the checksum of a tile that was read with the one kept when it was written. home: where it
        was read, if not where the field is.

        Raises: CorruptionError naming unit, field, file and offset.
        """
        extent, hashes = home or self.home(name)
        expected = hashes[tile]
        if found == expected:
            return
        if expected == _UNSEEN and name == "hi" and self._in_files is not None:
            self._hashes[name][tile] = found
            return
        offset = self._cuts.offset(name, tile * self.span(name))
        where = self._disk(extent, name).where(extent, offset)
        raise corruption(
            f"{self.name}.{name}", nbytes, where, found, expected, in_files=self._in_files is not None
        )

"""The passes that a step is made of: fetch a unit, update it, or do both on one walk over its record.

On the CPU, `hi` is read straight into the memory of the unit, and updated and written from there. Updates
that need whole matrices take two walks: see matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Protocol

import torch

from infinity import kernels
from infinity.device.device import Device, Download
from infinity.lane.base import Pass
from infinity.lane.matrices import MatrixOwners, WholeMatrices
from infinity.lane.outgoing import Lease
from infinity.lane.passes import clear, piece_address, piece_addresses
from infinity.lane.spans import address_of, miss, zeros_of
from infinity.planning.layout import RecordSchema, TilePiece, pieces, tiles
from infinity.planning.queue import JobLane
from infinity.records.checksums import TileChecksums
from infinity.records.in_files import comes_straight, tiles_read_at_once
from infinity.records.record import Record
from infinity.records.update_rules import Recipe, UpdateSpan
from infinity.records.updates import PendingUpdates, Update
from infinity.records.weights import KERNEL_DTYPE, compute_dtype
from infinity.sizes import round_up
from infinity.storage.checkpoint_store import Arriving
from infinity.storage.store import Transfer


class FetchTarget(Protocol):
    """What these passes need of the unit that they are for."""

    record: Record
    base: int
    flat: torch.Tensor

    @property
    def framed(self) -> bool:
        """Whether the blocks in which the memory of `flat` begins and ends are its own."""

    @property
    def pending(self) -> PendingUpdates:
        """Updates that wait for a pass."""


class _UnitPass(Pass):
    """A pass that works on `hi` in the unit's memory, `flat`; without it, where the record lies."""

    moves = "upload"

    def __init__(self, unit: FetchTarget, device: Device, tile_numel: int, flat: torch.Tensor | None) -> None:
        """Prepare a pass over the record of `unit`."""
        super().__init__(unit.record)
        self._base = unit.base
        self._flat = flat
        self._target: FetchTarget | None = unit
        """Kept with its memory: what may count that."""
        self._device = device
        self._tile_numel = tile_numel
        self.on_finished.append(self._drop_memory)

    def own_address(self, field: str, start: int) -> int | None:
        """On the CPU, `hi` is worked on in the unit's memory."""
        return self._place_of_hi(start) if field == "hi" else None

    def _place_of_hi(self, start: int) -> int | None:
        if self._flat is None or not self._device.is_host:
            return None
        return int(self._flat.data_ptr()) + self._flat.itemsize * (self._base + start)

    def _hi_lies_in_place(self) -> bool:
        """Whether the record's `hi` is the unit's memory itself."""
        here = self._place_of_hi(0)
        return here is not None and here == self.record.address("hi", 0)

    @property
    def own_memory(self) -> object:
        """The unit's memory, where fields are read to it and written from it."""
        return self._flat if self._device.is_host else None

    def _filled(self) -> int:
        """Return the elements up to the end of the last tile that holds a parameter."""
        return min(self.record.shard.numel, round_up(self.record.shard.end, self._tile_numel))

    def _upload(self, start: int, stop: int, addresses: dict[str, int]) -> Sequence[Transfer] | None:
        """Begin to copy `hi` of a tile to the unit's memory, unless it was read there."""
        if self._flat is None:
            raise AssertionError(
                f"{self.record.name}: expected the unit's memory while tiles are uploaded, got none"
            )
        if addresses["hi"] == self._place_of_hi(start):
            return None
        return (self._device.upload(self._flat, self._base + start, addresses["hi"], stop - start),)

    def let_copies_end(self) -> None:
        """See Pass: uploads are over when all of the device's copies are."""
        self._device.synchronize()

    def done_processing(self) -> None:
        """Hold an accelerator's memory no longer: who frees it orders that behind its uploads, and until the
        lane finds these over it would be held beyond what device_memory counts.
        """
        super().done_processing()
        if not self._device.is_host:
            self._drop_memory()

    def _drop_memory(self) -> None:
        self._flat = self._target = None


class FetchPass(_UnitPass):
    """Bring the `hi` of a unit without pending updates to its memory."""

    def __init__(
        self, unit: FetchTarget, device: Device, tile_numel: int, stage: Lease | None = None
    ) -> None:
        """Prepare to fill the memory that the unit has now. stage: its bytes, of the outgoing share: it is
        put together in so much host memory before it goes to an accelerator; see tiles.
        """
        super().__init__(unit, device, tile_numel, unit.flat)
        self._lease = stage
        self._stage: torch.Tensor | None = None
        self._framed = unit.framed
        self._sums: dict[int, TileChecksums] = {}
        """Of tiles on their way from files, by their first element."""
        self.on_finished.append(self._drop_stage)

    def _drop_stage(self) -> None:
        self._stage = None
        if self._lease is not None:
            self._lease.end()

    def own_address(self, field: str, start: int) -> int | None:
        """See Pass: in the unit's memory, or where it is put together."""
        if field != "hi" or self._stage is None:
            return super().own_address(field, start)
        return int(self._stage.data_ptr()) + self._stage.itemsize * start

    @property
    def own_memory(self) -> object:
        """See Pass."""
        return super().own_memory if self._stage is None else self._stage

    @property
    def only_uploads(self) -> bool:
        """See Pass: `hi` lies in host memory, in one piece, and an accelerator computes. A thread under a
        TorchDispatchMode is not to begin copies, which the mode would see, and may replace: the lane's thread
        has none.
        """
        record = self.record
        if self._device.is_host or torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - no public one
            return False
        if not record.in_host("hi") or record.targets or record.packed:
            return False
        return record.in_one_piece(("hi",)) and record.written("hi", 0) and self._filled() > 0

    @property
    def in_memory(self) -> bool:
        """See Pass; quick where any field of the record is on NVMe."""
        return self.record.all_in_host and super().in_memory

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Cut the record into what a slot holds: several tiles, as `hi` is narrower than a whole record, and
        more of what is packed in files, which comes to the unit's memory through the slot. What is uploaded
        from host memory takes no slot, and is one tile. So is what its file has transposed, of which any tile
        would be read, and widened, whole: it is put together in host memory, where there is room.
        """
        self.adopts = frozenset({"hi"} & self.record.targets.keys())
        if self._hi_lies_in_place():
            return iter(())
        if self.only_uploads:
            return iter([(0, self._filled())])
        schema, at_once = self.record.schema, tiles_read_at_once(self.record)
        if self._lease is not None:
            self._stage = self._device.take_host_buffer(self._filled(), compute_dtype(schema))
        if at_once is not None and self.own_address("hi", 0) is not None:
            return tiles(self._filled(), self._tile_numel * at_once)
        # What lies in files takes its window, twice as much for small parameters: see checkpoint_store.
        place, in_files = self.own_address("hi", 0), self.record.in_files is not None
        windows = 2 * schema.width if in_files and not self._comes_straight(place) else 0
        width = windows + schema.width * (windows == 0 or place is None)
        return tiles(self._filled(), self._tile_numel * max(1, schema.slot_nbytes // width))

    def _comes_straight(self, place: int | None) -> bool:
        """Whether what lies in files is read straight to the unit's memory, at `place`."""
        return place is not None and not self.adopts and comes_straight(self.record, place)

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """`hi`, which is left in its target if it has one."""
        return (("hi",) if self.record.written("hi", start) else ()), tuple(self.adopts)

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> Sequence[Transfer] | None:
        """Upload."""
        return self._upload(start, stop, addresses)

    def read(
        self,
        name: str,
        start: int,
        stop: int,
        address: int,
        owner: object,
        *,
        more: bool = False,
        window: tuple[int, int] = (0, 0),
    ) -> Transfer:
        """See Pass; what is copied from a file's window is summed on the way."""
        where, framed = (name, start, stop, address, owner), self._framed and not self.adopts
        begun = self.record.read(*where, urgent=self.urgent, more=more, window=window, framed=framed)
        if isinstance(begun, Arriving):
            self._sums[start] = sums = self.record.checksums(start, stop, {name: address}, (name,), ())
            if sums.fields is not None:
                begun.sum_by(sums.fields)
        return begun

    def checksums_of(
        self, start: int, stop: int, addresses: dict[str, int], reads: Sequence[str], writes: Sequence[str]
    ) -> TileChecksums:
        """See Pass: those that `read` has prepared."""
        return self._sums.pop(start, None) or super().checksums_of(start, stop, addresses, reads, writes)


class _UpdatingPass(_UnitPass):
    """A pass that applies a unit's pending updates."""

    rewrites = True

    def __init__(self, unit: FetchTarget, device: Device, tile_numel: int, flat: torch.Tensor | None) -> None:
        """Begin with what is pending for `unit`, which is this pass's own as soon as it is taken over."""
        super().__init__(unit, device, tile_numel, flat)
        pending = unit.pending
        self.updates: dict[int, Update] = pending
        self._pending, self._taken = pending, False
        self._updates_all = self._steps_all = False
        self._found: tuple[int, int, list[TilePiece]] = 0, 0, []
        self._matrices: WholeMatrices | None = None
        self._owners: MatrixOwners | None = None

    def orthogonalize_by(self, owners: MatrixOwners | None) -> None:
        """Have several ranks orthogonalize whole matrices; None for one rank. Before the pass is queued."""
        self._owners = owners

    def submitted(self, lane: JobLane) -> None:
        """Find out which updates need whole matrices."""
        super().submitted(lane)
        if WholeMatrices.any(self.updates):
            self._matrices = WholeMatrices(self.record, self.updates)
            if self._owners is not None:
                self._matrices.wait_for(self._owners.orthogonalize(self._matrices))

    @property
    def computes(self) -> bool:
        """See QueuedPass."""
        return True

    @property
    def paused(self) -> bool:
        """See QueuedPass."""
        return self._matrices is not None and self._matrices.pauses(self.progress.open_tiles)

    @property
    def ready(self) -> bool:
        """Whether the gradients have come."""
        for update in self.updates.values():  # noqa: SIM110 - as in `in_memory`
            if not update.arriving.done:
                return False
        return True

    def take_over(self) -> None:
        """From now on the updates are this pass's."""
        if not self._taken:
            self.updates, self._taken = self._pending.take(), True

    def hand_back(self) -> None:
        """Leave the updates to another pass."""
        if self._taken:
            self._pending.put_back(self.updates)
            self.updates, self._taken = self._pending, False

    def _filled(self) -> int:
        """All of a record with fields that go on behind its parameters, which may go to their targets."""
        return self.record.shard.numel if self.record.schema.of_workers else super()._filled()

    @property
    def in_memory(self) -> bool:
        """See Pass."""
        record = self.record
        if not record.all_in_host:
            return False
        for one in self.updates.values():  # noqa: SIM110 - all() takes twice as long, and each update asks
            if one.field and not record.in_host(one.field):
                return False
        return True

    def touched(self) -> Iterable[str]:
        """Gradients only where they are spilled."""
        return [*self.record.fields, *(one.field for one in self.updates.values() if one.field)]

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Return the record's tiles, or all of it as one where it is updated in host memory."""
        self.adopts = frozenset(self.record.targets if self.updates else ())
        self._updates_all = len(self.updates) == len(self.record.shard.segments)
        recipes = {one.recipe.name: one.recipe for one in self.updates.values()}
        self._steps_all = all(self._stepped(one) == self.record.fields for one in recipes.values())
        filled = self._filled()
        ranges = tiles(filled, max(filled, self._tile_numel) if self._is_one_tile() else self._tile_numel)
        if self._matrices is None:
            return ranges
        several = list(ranges)
        return chain(self._matrices.first_walk(several), several)

    def _is_one_tile(self) -> bool:
        """Whether all parameters are updated in host memory, without slots or gaps that limit a tile."""
        return (
            len(self.updates) == len(self.record.unit_layout.segments)
            and self.in_memory
            and self.record.in_one_piece(tuple(self.touched()))
        )

    def _pieces(self, start: int, stop: int) -> list[TilePiece]:
        """Return the parameters' parts in a tile, found once for all who ask."""
        found = self._found
        if found[:2] != (start, stop):
            self._found = found = start, stop, pieces(self.record.shard, start, stop)
        return found[2]

    def _changes(self, start: int, stop: int) -> bool:
        if start >= self.record.shard.end:
            return False
        if self._updates_all or not self.updates:
            return self._updates_all
        return any(piece.index in self.updates for piece in self._pieces(start, stop))

    def _changes_all(self, start: int, stop: int) -> bool:
        return self._updates_all or all(piece.index in self.updates for piece in self._pieces(start, stop))

    def _hi_is_given(self) -> bool:
        """Whether `hi` need not be read: it is in the unit's memory."""
        return False

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """The fields that updates of the tile work on, and the spilled gradients; without an update in it,
        `_wanted_anyway`.
        """
        record, matrices = self.record, self._matrices
        if matrices is not None and matrices.admits_first():
            return self._gathered_fields(matrices, start, stop)
        given = {"hi"} if self._hi_is_given() else set()
        if not self._changes(start, stop):
            names = [name for name in self._wanted_anyway() if name not in given]
            return [name for name in names if record.written(name, start)], tuple(self.adopts)
        if record.schema.derived and self._changes_all(start, stop):
            given.update(record.schema.derived)
        fields = record.fields if self._steps_all else self._fields(start, stop)
        if matrices is not None and matrices.was_walked(start):
            given.update(self.adopts & set(matrices.fields))  # the first walk has left it there
        reads = [name for name in fields if name not in given and self._is_written(name, start)]
        apart = matrices.updates if matrices is not None else ()
        spilled = {
            one: update.field for one, update in self.updates.items() if update.field and one not in apart
        }
        if spilled:
            here = {piece.index for piece in self._pieces(start, stop)}
            reads += sorted({field for index, field in spilled.items() if index in here})
        return reads, fields

    def _stepped(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the fields of the record that the kernels of a recipe work on."""
        return _stepped(recipe, self.record.schema, self.record.fields)

    def _fields(self, start: int, stop: int) -> tuple[str, ...]:
        """Return the fields that updates of a tile work on, and those that go to their targets."""
        here = (self.updates.get(piece.index) for piece in self._pieces(start, stop))
        stepped = {name for one in here if one is not None for name in self._stepped(one.recipe)}
        adopts = self.adopts
        if self._matrices is not None and self._matrices.was_walked(start):
            adopts -= set(self._matrices.fields)
        return tuple(name for name in self.record.fields if name in stepped or name in adopts)

    def _gathered_fields(
        self, matrices: WholeMatrices, start: int, stop: int
    ) -> tuple[Sequence[str], Sequence[str]]:
        """Return what the first walk reads and writes of a tile: the momentum, and spilled gradients."""
        here = {piece.index for piece in self._pieces(start, stop)}
        spilled = {one.field for index, one in matrices.updates.items() if index in here and one.field}
        reads = [name for name in matrices.fields if self.record.written(name, start)]
        return [*reads, *sorted(spilled)], matrices.fields

    def _is_written(self, name: str, start: int) -> bool:
        """Whether a tile of a field counts: the first walk may have worked on it, its span not be over."""
        matrices = self._matrices
        return self.record.written(name, start) or (
            matrices is not None and name in matrices.fields and matrices.was_walked(start)
        )

    def _wanted_anyway(self) -> Iterable[str]:
        """Return the fields to read of a tile without updates: those that go to their targets."""
        return self.adopts

    def takes_checksums(self, start: int, stop: int) -> bool:
        """Where one step of one parameter is all that is done, by a kernel that takes checksums."""
        parts = self._pieces(start, stop)
        update = self.updates.get(parts[0].index) if len(parts) == 1 and parts[0].start == start else None
        if update is None or update.missed or update.after or not update.has_gradient:
            return False
        return (self.record.schema.kept, self.record.schema.state_dtype) in update.recipe.summing

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> Sequence[Transfer] | None:
        """Work on one tile of the first walk, or as the subclass does."""
        if self._matrices is None or not self._matrices.works_on_first():
            return self._process(start, stop, addresses)
        fields = self._matrices.fields
        for name in fields:
            if not self.record.written(name, start):
                clear(self.record, addresses, name, stop - start)
        for piece in self._pieces(start, stop):
            update = self._matrices.updates.get(piece.index)
            if update is not None:
                at = piece_addresses(
                    self.record, {name: addresses[name] for name in fields}, piece.start, start
                )
                zeros = zeros_of(0 if update.has_gradient else piece.numel)
                given = self._gradient(update, piece, start, addresses) or address_of(zeros)
                self._matrices.gather(piece, at, given)
        return None

    def _process(self, start: int, stop: int, addresses: dict[str, int]) -> Sequence[Transfer] | None:
        """Work on one tile."""
        self._apply_updates(start, stop, addresses)
        return None

    def _apply_updates(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        if self._changes(start, stop):
            for name in self.record.schema.moments:
                if name in addresses and not self._is_written(name, start):
                    clear(self.record, addresses, name, stop - start)
            self._apply(start, stop, addresses)

    def _apply(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        for piece in self._pieces(start, stop):
            update = self.updates.get(piece.index)
            if update is not None:
                self._step(update, piece, start, addresses)

    def _step(self, update: Update, piece: TilePiece, start: int, addresses: dict[str, int]) -> None:
        """Make the steps of one parameter's piece of a tile, those that were missed first."""
        state = addresses
        if piece.start != start:
            state = piece_addresses(self.record, addresses, piece.start, start)
        step = update.recipe.kernels[self.record.schema.kept, self.record.schema.state_dtype]
        if self._matrices is not None and update.recipe.matrices is not None:
            self._matrices.settle()
            direction = self._matrices.parts[piece.index].data_ptr() + 2 * piece.within
            scalars = update.recipe.matrices.of_shape(update.scalars, self._matrices.shape(piece.index))
            step(UpdateSpan(piece.numel, state, direction, "bf16"), scalars)
            return
        given = self._gradient(update, piece, start, addresses)
        if given is None:
            miss(step, piece, state, (*update.missed, (update.scalars, update.key)))
            return
        miss(step, piece, state, update.missed)
        told = self.told_gradient(piece.index)
        span = UpdateSpan(piece.numel, state, *given, update.key, piece.element, self.checksums, told)
        step(span, update.scalars)
        miss(step, piece, state, update.after)

    def told_gradient(self, index: int) -> kernels.ToldGradient | None:
        """Return what the step of a parameter tells of its gradient, where it is to; see told."""
        return None

    def _gradient(
        self, update: Update, piece: TilePiece, start: int, addresses: dict[str, int]
    ) -> tuple[int, kernels.AnyGradientDtype] | None:
        """Return where the gradient of a piece of a tile is, and its type; None for one of zeros."""
        if update.tensor is not None:
            update.arriving.wait()
            return address_of(update.tensor, piece.within)
        if update.field is None:
            return None
        at = piece_address(self.record, addresses[update.field], piece.start, start, update.field)
        dtype = torch.float32 if update.field == "grad32" else compute_dtype(self.record.schema)
        return at, KERNEL_DTYPE[dtype]

    def done_processing(self) -> None:
        """Drop the gradients."""
        self.updates, self._matrices = {}, None
        super().done_processing()


@lru_cache(maxsize=256)  # a model has few different records, and each pass asks
def _stepped(recipe: Recipe, schema: RecordSchema, fields: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of a record's fields that the kernels of a recipe work on."""
    names = {*schema.weights, *recipe.stepped(schema)}
    return tuple(name for name in fields if name in names)


class FetchAndUpdatePass(_UpdatingPass):
    """Bring a unit's `hi` to its memory; the pending updates are applied on the way and written behind."""

    def __init__(self, unit: FetchTarget, device: Device, tile_numel: int) -> None:
        """Prepare to fill the memory that the unit has now."""
        super().__init__(unit, device, tile_numel, unit.flat)

    def _wanted_anyway(self) -> Iterable[str]:
        """Return `hi` as well."""
        return dict.fromkeys(("hi", *self.adopts))

    def _process(self, start: int, stop: int, addresses: dict[str, int]) -> Sequence[Transfer] | None:
        """Apply the updates, then upload."""
        self._apply_updates(start, stop, addresses)
        return self._upload(start, stop, addresses) if start < self.record.shard.end else None


class UpdatePass(_UpdatingPass):
    """Apply a unit's pending updates, and bring nothing to the device.

    `hi` is taken from `flat`, the memory of a unit that is resident on the CPU; None: from the record.
    """

    def __init__(
        self, unit: FetchTarget, device: Device, tile_numel: int, flat: torch.Tensor | None = None
    ) -> None:
        """Begin with what is pending for `unit`, which is this pass's own as soon as it is taken over."""
        super().__init__(unit, device, tile_numel, flat)
        self._copy: Download | None = None

    def start_from_copy(self, values: Download) -> None:
        """Take `hi` from a copy that comes from the device, before the pass is queued."""
        self._copy = values

    @property
    def ready(self) -> bool:
        """Whether the copy has come as well."""
        return super().ready and (self._copy is None or self._copy.done)

    @property
    def deferrable(self) -> bool:
        """See QueuedPass: the unit's next use is in the next forward, or later."""
        return True

    def start_from(self, flat: torch.Tensor | None) -> None:
        """Take `hi` from `flat` instead, before the pass is queued."""
        self._flat = flat

    def _hi_is_given(self) -> bool:
        return self._flat is not None or self._copy is not None

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Tiles that change, or of which a field goes to its target."""
        return (one for one in super().tiles() if self.adopts or self._changes(*one))

    def run_in_memory(self) -> None:
        """Update fields that are contiguous in host memory in one call, others tile by tile."""
        record = self.record
        whole = None if self._hi_is_given() or record.targets else record.addresses_in_host()
        for update in self.updates.values():
            whole = None if update.field else whole
        if whole is None or self._matrices is not None:
            super().run_in_memory()
            return
        self._apply(0, record.shard.numel, whole)
        record.changed_in_host.update(whole)

    def _process(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        """Apply the updates, to the values in the unit's memory if `hi` is given."""
        if self._hi_is_given() and "hi" in addresses:
            self._bring_hi(start, stop, addresses["hi"])
        self._apply_updates(start, stop, addresses)

    def _bring_hi(self, start: int, stop: int, address: int) -> None:
        """Copy the unit's values to where they are updated, unless they are updated where they are."""
        flat = self._place_of_hi(start)
        if self._copy is not None:
            self._copy.wait()
            flat = int(self._copy.tensor.data_ptr()) + self._copy.tensor.itemsize * start
        if flat is None:
            raise AssertionError(f"{self.record.name}: expected values that the CPU computes with, got none")
        if address != flat:
            kernels.copy(self.record.schema.width * (stop - start), address, flat)

    def done_processing(self) -> None:
        """Drop the copy as well."""
        self._copy = None
        super().done_processing()

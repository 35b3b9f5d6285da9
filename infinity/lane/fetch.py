"""The passes that a step is made of: fetch a unit, update it, or do both on one walk over its record.

On the CPU, `hi` is read straight into the memory of the unit, and updated and written from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from infinity import kernels
from infinity.device.device import Device, Download
from infinity.lane.base import Pass
from infinity.lane.passes import clear, piece_address
from infinity.planning.layout import TilePiece, pieces, tiles
from infinity.records.record import Record
from infinity.records.update_rules import UpdateSpan
from infinity.records.updates import PendingUpdates, Update
from infinity.records.weights import KERNEL_DTYPE, compute_dtype
from infinity.sizes import round_up
from infinity.storage.store import Transfer


class FetchTarget(Protocol):
    """What these passes need of the unit that they are for."""

    record: Record
    base: int
    flat: torch.Tensor
    pending: PendingUpdates


class _UnitPass(Pass):
    """A pass that works on `hi` in the unit's memory, `flat`; without it, where the record lies."""

    moves = "upload"

    def __init__(self, unit: FetchTarget, device: Device, tile_numel: int, flat: torch.Tensor | None) -> None:
        """Prepare a pass over the record of `unit`."""
        super().__init__(unit.record)
        self._base = unit.base
        self._flat = flat
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
        """The unit's memory."""
        return self._flat

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

    def _drop_memory(self) -> None:
        self._flat = None


class FetchPass(_UnitPass):
    """Bring the `hi` of a unit without pending updates to its memory."""

    def __init__(self, unit: FetchTarget, device: Device, tile_numel: int) -> None:
        """Prepare to fill the memory that the unit has now."""
        super().__init__(unit, device, tile_numel, unit.flat)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Cut the record into what a slot holds: several tiles, as `hi` is narrower than a whole record, and
        more of what is packed in files, which comes to the unit's memory through the slot.
        """
        self.adopts = frozenset({"hi"} & self.record.targets.keys())
        if self._hi_lies_in_place():
            return iter(())
        schema, at_once = self.record.schema, self.record.tiles_read_at_once()
        if at_once is not None and self._place_of_hi(0) is not None:
            return tiles(self._filled(), self._tile_numel * at_once)
        # What lies in files takes its window, too, twice as much for small parameters: see checkpoint_store.
        width = schema.width if self.record.in_files is None else 3 * schema.width
        return tiles(self._filled(), self._tile_numel * max(1, schema.slot_nbytes // width))

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """`hi`, which is left in its target if it has one."""
        return (("hi",) if self.record.written("hi", start) else ()), tuple(self.adopts)

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> Sequence[Transfer] | None:
        """Upload."""
        return self._upload(start, stop, addresses)


class _UpdatingPass(_UnitPass):
    """A pass that applies a unit's pending updates."""

    def __init__(self, unit: FetchTarget, device: Device, tile_numel: int, flat: torch.Tensor | None) -> None:
        """Begin with what is pending for `unit`, which is this pass's own as soon as it is taken over."""
        super().__init__(unit, device, tile_numel, flat)
        self.updates: dict[int, Update] = unit.pending
        self._pending, self._taken = unit.pending, False
        self._updates_all = False
        computes = compute_dtype(unit.record.schema)
        self._dtypes = {"grad16": KERNEL_DTYPE[computes], "grad32": KERNEL_DTYPE[torch.float32]}

    @property
    def ready(self) -> bool:
        """Whether the gradients have come."""
        return all(update.arriving.done for update in self.updates.values())

    def take_over(self) -> None:
        """From now on the updates are this pass's."""
        if not self._taken:
            self.updates, self._taken = self._pending.take(), True

    def hand_back(self) -> None:
        """Leave the updates to another pass."""
        if self._taken:
            self._pending.put_back(self.updates)
            self.updates, self._taken = self._pending, False

    @property
    def in_memory(self) -> bool:
        """See Pass."""
        record = self.record
        spilled = [one.field for one in self.updates.values() if one.field]
        return record.all_in_host and all(record.in_host(field) for field in spilled)

    def touched(self) -> Iterable[str]:
        """Gradients only where they are spilled."""
        return [*self.record.fields, *(one.field for one in self.updates.values() if one.field)]

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Return the record's tiles, or all of it as one where it is updated in host memory."""
        self.adopts = frozenset(self.record.targets if self.updates else ())
        self._updates_all = len(self.updates) == len(self.record.shard.segments)
        filled = self._filled()
        return tiles(filled, max(filled, self._tile_numel) if self._is_one_tile() else self._tile_numel)

    def _is_one_tile(self) -> bool:
        """Whether all parameters are updated in host memory, without slots or gaps that limit a tile."""
        return (
            len(self.updates) == len(self.record.unit_layout.segments)
            and self.in_memory
            and self.record.in_one_piece(tuple(self.touched()))
        )

    def _changes(self, start: int, stop: int) -> bool:
        if self._updates_all or not self.updates:
            return self._updates_all
        return any(piece.index in self.updates for piece in pieces(self.record.shard, start, stop))

    def _changes_all(self, start: int, stop: int) -> bool:
        return self._updates_all or all(
            piece.index in self.updates for piece in pieces(self.record.shard, start, stop)
        )

    def _hi_is_given(self) -> bool:
        """Whether `hi` need not be read: it is in the unit's memory."""
        return False

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """All fields, and the spilled gradients; without an update in the tile, `_wanted_anyway`."""
        record = self.record
        given = {"hi"} if self._hi_is_given() else set()
        if not self._changes(start, stop):
            names = [name for name in self._wanted_anyway() if name not in given]
            return [name for name in names if record.written(name, start)], tuple(self.adopts)
        if record.schema.derived and self._changes_all(start, stop):
            given.update(record.schema.derived)
        reads = [name for name in record.fields if name not in given and record.written(name, start)]
        spilled = {index: update.field for index, update in self.updates.items() if update.field}
        if spilled:
            here = {piece.index for piece in pieces(self.record.shard, start, stop)}
            reads += sorted({field for index, field in spilled.items() if index in here})
        return reads, record.fields

    def _wanted_anyway(self) -> Iterable[str]:
        """Return the fields to read of a tile without updates: those that go to their targets."""
        return self.adopts

    def takes_checksums(self, start: int, stop: int) -> bool:
        """Where one step of one parameter is all that is done, by a kernel that takes checksums."""
        parts = list(pieces(self.record.shard, start, stop))
        update = self.updates.get(parts[0].index) if len(parts) == 1 and parts[0].start == start else None
        if update is None or update.missed or update.after or not update.has_gradient:
            return False
        return (self.record.schema.dtype, self.record.schema.state_dtype) in update.recipe.summing

    def _apply_updates(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        if not self._changes(start, stop):
            return
        for name in self.record.schema.moments:
            if name in addresses and not self.record.written(name, start):
                clear(self.record, addresses, name, stop - start)
        self._apply(start, stop, addresses)

    def _apply(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        for piece in pieces(self.record.shard, start, stop):
            update = self.updates.get(piece.index)
            if update is not None:
                self._step(update, piece, start, addresses)

    def _step(self, update: Update, piece: TilePiece, start: int, addresses: dict[str, int]) -> None:
        """Make the steps of one parameter's piece of a tile, those that were missed first."""
        state = {
            name: piece_address(self.record, addresses[name], piece.start, start, name)
            for name in self.record.schema.fields
            if name in addresses
        }
        step = update.recipe.kernels[self.record.schema.dtype, self.record.schema.state_dtype]
        misses = update.missed or update.after or not update.has_gradient
        zeros = torch.zeros(piece.numel if misses else 0, dtype=torch.bfloat16, device="cpu")

        def miss(steps: Iterable[tuple[Any, int]]) -> None:
            for scalars, key in steps:
                of_zeros = zeros.data_ptr(), KERNEL_DTYPE[zeros.dtype]
                step(UpdateSpan(piece.numel, state, *of_zeros, key, piece.element), scalars)

        miss(update.missed)
        if update.tensor is not None:
            update.arriving.wait()
            gradient = update.tensor.data_ptr() + piece.within * update.tensor.element_size()
            given = gradient, KERNEL_DTYPE[update.tensor.dtype]
        elif update.field is not None:
            given = (
                piece_address(self.record, addresses[update.field], piece.start, start, update.field),
                self._dtypes[update.field],
            )
        else:
            miss([(update.scalars, update.key)])
            return
        step(
            UpdateSpan(piece.numel, state, *given, update.key, piece.element, self.checksums), update.scalars
        )
        miss(update.after)

    def done_processing(self) -> None:
        """Drop the gradients."""
        self.updates = {}
        super().done_processing()


class FetchAndUpdatePass(_UpdatingPass):
    """Bring a unit's `hi` to its memory; the pending updates are applied on the way and written behind."""

    def __init__(self, unit: FetchTarget, device: Device, tile_numel: int) -> None:
        """Prepare to fill the memory that the unit has now."""
        super().__init__(unit, device, tile_numel, unit.flat)

    def _wanted_anyway(self) -> Iterable[str]:
        """Return `hi` as well."""
        return dict.fromkeys(("hi", *self.adopts))

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> Sequence[Transfer] | None:
        """Apply the updates, then upload."""
        self._apply_updates(start, stop, addresses)
        return self._upload(start, stop, addresses)


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
        if whole is None or any(update.field for update in self.updates.values()):
            super().run_in_memory()
            return
        self._apply(0, record.shard.numel, whole)
        record.changed_in_host.update(whole)

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> None:
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

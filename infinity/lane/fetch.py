"""The walk over a record that a step is made of: fetch a unit, and apply the updates pending for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from infinity import kernels
from infinity.device.device import Device
from infinity.lane.passes import clear, piece_address
from infinity.lane.queue import Pass
from infinity.planning.layout import pieces, tiles
from infinity.records.record import Record
from infinity.records.update_rules import UpdateSpan
from infinity.records.updates import PendingUpdates, Update
from infinity.records.weights import KERNEL_DTYPE, WEIGHTS
from infinity.sizes import round_up
from infinity.storage.store import Transfer

_T = TypeVar("_T")


class FetchTarget(Protocol):
    """What a fetch needs of the unit that it is for."""

    record: Record
    base: int
    flat: torch.Tensor
    pending: PendingUpdates


class FetchPass(Pass):
    """Bring a unit's `hi` to the device; updates that were pending are applied on the way and written behind.

    Without `upload`, only update: `hi` is taken from the unit's memory on the CPU if `resident`, else from
    the record.
    """

    def __init__(
        self,
        unit: FetchTarget,
        device: Device,
        tile_numel: int,
        *,
        upload: bool = True,
        resident: bool = False,
    ) -> None:
        """Begin with what is pending for `unit`, which is this pass's own as soon as it is taken over."""
        super().__init__(unit.record)
        self.pending: dict[int, Update] = unit.pending
        self._waiting, self._taken = unit.pending, False
        self._base = unit.base
        self._flat = unit.flat if upload or resident else None
        self._device = device
        self._tile_numel = tile_numel
        self._upload = upload
        self._resident = resident
        self._updates_everywhere = False
        computes = WEIGHTS[unit.record.form.dtype].dtype
        self._dtypes = {"grad16": KERNEL_DTYPE[computes], "grad32": KERNEL_DTYPE[torch.float32]}
        self.on_finished.append(self._let_go)
        self.on_processed: Callable[[], None] | None = None

    def call_when_processed(self, call: Callable[[], None]) -> None:
        """Have `call`, and nothing else, called when the last tile was worked on, under the lane's lock."""
        self.on_processed = call

    def take_over(self) -> None:
        """From now on the updates are this pass's."""
        if not self._taken:
            self.pending, self._taken = self._waiting.take(), True

    def hand_back(self) -> None:
        """Leave the updates to another pass."""
        if self._taken:
            self._waiting.put_back(self.pending)
            self.pending, self._taken = self._waiting, False

    @property
    def in_memory(self) -> bool:
        """See Pass."""
        record = self.record
        spilled = [one.field for one in self.pending.values() if one.field]
        return record.all_in_host and all(record.in_host(field) for field in spilled)

    def touched(self) -> Iterable[str]:
        """Gradients only where they are spilled."""
        return [*self.record.fields, *(one.field for one in self.pending.values() if one.field)]

    def works_in(self, flat: torch.Tensor | None) -> None:
        """Start from the values in `flat`, the unit's memory; None: from the record's."""
        self._flat, self._resident = flat, flat is not None

    def _is_one_tile(self) -> bool:
        """Whether all parameters are updated in host memory, and nothing says how much to do at once."""
        return (
            len(self.pending) == len(self.record.whole.segments)
            and self.in_memory
            and self.record.in_one_piece(tuple(self.touched()))
        )

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Whole records tile by tile; where only `hi` moves, as much as a slot holds at once."""
        self.adopts = frozenset(
            name for name in tuple(self.record.targets) if self.pending or (name == "hi" and self._upload)
        )
        self._updates_everywhere = len(self.pending) == len(self.record.shard.segments)
        here = self._in_place("hi", 0)
        if not self.pending and here is not None and here == self.record.address("hi", 0):
            return
        form = self.record.form
        wide = self._tile_numel * (1 if self.pending else form.slot_nbytes // form.width)
        filled = min(self.record.shard.numel, round_up(self.record.shard.end, self._tile_numel))
        if self._is_one_tile():
            wide = max(wide, filled)
        for start, stop in tiles(filled, wide):
            if self._upload or self.adopts or self._updates(start, stop):
                yield start, stop

    def _updates(self, start: int, stop: int) -> bool:
        if self._updates_everywhere or not self.pending:
            return self._updates_everywhere
        return any(piece.index in self.pending for piece in pieces(self.record.shard, start, stop))

    def _updates_all(self, start: int, stop: int) -> bool:
        return self._updates_everywhere or all(
            piece.index in self.pending for piece in pieces(self.record.shard, start, stop)
        )

    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Without an update in the tile, `hi` alone, and what this pass adopts."""
        record = self.record
        given = ["hi"] if self._resident else []
        if not self._updates(start, stop):
            names = dict.fromkeys((*(["hi"] if self._upload else []), *self.adopts))
            reads = [name for name in names if name not in given and record.written(name, start)]
            return reads, tuple(self.adopts)
        if record.form.derived and self._updates_all(start, stop):
            given += record.form.derived
        reads = [name for name in record.fields if name not in given and record.written(name, start)]
        spilled = {index: update.field for index, update in self.pending.items() if update.field}
        if spilled:
            here = {piece.index for piece in pieces(self.record.shard, start, stop)}
            reads += sorted({field for index, field in spilled.items() if index in here})
        return reads, record.fields

    def place(self, field: str, start: int) -> int | None:
        """On the CPU, `hi` is read straight into the unit's memory, and updated and written from there."""
        return self._in_place(field, start)

    def _in_place(self, field: str, start: int) -> int | None:
        if field != "hi" or self._flat is None or not self._device.is_host:
            return None
        return int(self._flat.data_ptr()) + self._flat.itemsize * (self._base + start)

    @property
    def keeps(self) -> object:
        """The unit's memory."""
        return self._flat

    def run_in_memory(self) -> None:
        """Updates alone, of fields that are there whole, need no walk over tiles."""
        record = self.record
        whole = None if self._upload or self._resident or record.targets else record.whole_in_host()
        if whole is None or any(update.field for update in self.pending.values()):
            super().run_in_memory()
            return
        self._apply(0, record.shard.numel, whole)
        record.changed_in_host.update(whole)

    def sums_up(self, start: int, stop: int) -> bool:
        """Where one step of one parameter is all that is done, by a kernel that takes checksums."""
        parts = list(pieces(self.record.shard, start, stop))
        update = self.pending.get(parts[0].index) if len(parts) == 1 and parts[0].start == start else None
        if update is None or update.missed or (update.tensor is None and update.field is None):
            return False
        return (self.record.form.dtype, self.record.form.state_dtype) in update.recipe.summing

    def process(self, start: int, stop: int, at: dict[str, int]) -> Sequence[Transfer] | None:
        """Apply the updates, then upload."""
        flat = self._in_place("hi", start)
        if self._resident and "hi" in at and at["hi"] != flat:
            kernels.copy(self.record.form.width * (stop - start), at["hi"], _known(flat))
        if self._updates(start, stop):
            for name in self.record.form.moments:
                if name in at and not self.record.written(name, start):
                    clear(self.record, at, name, stop - start)
            self._apply(start, stop, at)
        if not self._upload or at["hi"] == flat:
            return None
        return (self._device.upload(_known(self._flat), self._base + start, at["hi"], stop - start),)

    def _apply(self, start: int, stop: int, at: dict[str, int]) -> None:
        for piece in pieces(self.record.shard, start, stop):
            update = self.pending.get(piece.index)
            if update is None:
                continue
            state = {
                name: piece_address(self.record, at[name], piece.start, start, name)
                for name in self.record.form.fields
                if name in at
            }
            step = update.recipe.kernels[self.record.form.dtype, self.record.form.state_dtype]
            if update.missed or (update.tensor is None and update.field is None):
                zeros = torch.zeros(piece.numel, dtype=torch.bfloat16)
                gradient, dtype = zeros.data_ptr(), KERNEL_DTYPE[zeros.dtype]
                for scalars, key in update.missed:
                    step(UpdateSpan(piece.numel, state, gradient, dtype, key, piece.element), scalars)
            if update.tensor is not None:
                update.arriving.wait()
                gradient = update.tensor.data_ptr() + piece.within * update.tensor.element_size()
                dtype = KERNEL_DTYPE[update.tensor.dtype]
            elif update.field is not None:
                field = update.field
                gradient = piece_address(self.record, at[field], piece.start, start, field)
                dtype = self._dtypes[field]
            span = UpdateSpan(piece.numel, state, gradient, dtype, update.key, piece.element, self.sums)
            step(span, update.scalars)

    def _let_go(self) -> None:
        self._flat = None

    def done_processing(self) -> None:
        """Let go of the gradients."""
        self.pending = {}
        call, self.on_processed = self.on_processed, None  # it may refer to this pass
        if call:
            call()


def _known(value: _T | None) -> _T:
    if value is None:
        raise AssertionError("expected the unit's memory, or a gradient, got none")
    return value

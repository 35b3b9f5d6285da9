"""Updates of records that live on an accelerator: made there, in the order of the stream that computes.

[Note: updates on the device]
Such an update is no pass: nothing has to be moved, and its kernels run behind those that make the gradient
and before those that use the weights next, because they are queued between them. The host waits for nothing.
Passes over the same record (a checkpoint that is read, weights that are set) are waited for first; those that
come later wait, on the streams of their copies, for the update (see DeviceStore). A gradient that is not on
the device, because there was no room for it, is brought. Updates are pending until all of this is queued, and
the record is marked as changed: a commit on another thread takes a record without any for one that is up to
date, and is woken then.

Of several ranks each updates its own part of a unit, before it gives that to the others at the next use. A
mean of gradients is there when the thread of the collectives has seen it, so such updates wait for that use,
also those that a backward decides.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from infinity.device.blocks import wrap
from infinity.device.device import Device, Download
from infinity.errors import UnsupportedError
from infinity.lane.lane import StreamLane
from infinity.lane.passes import ReadPass
from infinity.records.record import Record
from infinity.records.tensor_steps import Scratch, square_sum
from infinity.records.updates import Update
from infinity.records.weights import compute_dtype
from infinity.storage.store import Extent, TensorStore
from infinity.timeline import Timeline
from infinity.units.fused_updates import is_fused, make_step
from infinity.units.unit import Unit

_FOR_NOW_NBYTES = (16 << 20, 1 << 20, 16 << 10)
"""Of intermediate values that are needed for a while: the first of these that fits."""
_STATE_DTYPES = {"lo": torch.int16, "m": torch.float32, "v": torch.float32}


class DeviceUpdates:
    """Applies updates on the device; see [Note: updates on the device]. Used by the thread that computes."""

    def __init__(self, store: TensorStore, device: Device, lane: StreamLane, timeline: Timeline) -> None:
        """Begin without memory. store: gives the memory of intermediate values."""
        self.busy: Unit | None = None
        """The unit that is being updated, whose record has to stay."""
        self._store, self._device, self._lane, self._timeline = store, device, lane, timeline
        self._extent: Extent | None = None
        self._scratch: Scratch | None = None
        self._later: dict[Unit, list[Callable[[], None]]] = {}
        """What follows updates that wait for a use."""

    @property
    def is_open(self) -> bool:
        """Whether it has memory for intermediate values."""
        return self._scratch is not None

    def open(self, scratch_nbytes: int) -> None:
        """Take memory for intermediate values, once; 0: what needs any takes it while it needs it.

        Raises: DeviceMemoryError where device_memory has no room for it.
        """
        if self._extent is None and scratch_nbytes:
            self._extent = self._store.allocate(scratch_nbytes, "intermediate values of updates")
            self._scratch = Scratch(self._store.tensor(self._extent))

    def close(self) -> None:
        """Give it back."""
        if self._extent is not None:
            self._store.free(self._extent)
            self._extent = self._scratch = None

    def apply(self, unit: Unit) -> None:
        """Apply what is pending for a unit whose record is on the device, when no pass uses it any more."""
        self.settle(unit.record)
        if not unit.pending:
            return
        brought = self._take_room(unit)
        began_s, before, self.busy = time.perf_counter(), self.busy, unit
        try:
            if not unit.in_parts:
                unit.allocate()
                unit.stop_sharing()  # others keep the values that they see
            self._apply(unit)
        except BaseException as error:  # a record half changed is not to be trained on
            self._lane.fail(error)
            raise
        finally:
            self.busy = before
            if self._device.room is not None:
                self._device.room.give_back(brought)
        for call in self._later.pop(unit, ()):
            call()
        self._timeline.span("update", unit.name, began_s, time.perf_counter())

    def apply_later(self, unit: Unit, on_done: Callable[[], None]) -> None:
        """Leave what is pending for a unit to the next `apply`. on_done: called then."""
        self._later.setdefault(unit, []).append(on_done)

    def bring_part(self, unit: Unit) -> None:
        """Copy `hi` of a record, which is this rank's part of the unit, to the unit's memory."""
        record = unit.record
        record.arrived("hi")
        with torch.inference_mode(mode=False), torch.no_grad():
            unit.part_of_rank.copy_(wrap(record.tensor("hi"), record.shard.numel, unit.flat.dtype))
        record.used("hi")
        self._device.assembled(unit.flat)

    def settle(self, record: Record) -> None:
        """Wait for all passes over a record, their writes included."""
        with self._lane.lock:
            passes = self._lane.unfinished(record)
        for one in passes:
            self._lane.wait(one, finished=True)
        self._lane.check_open()

    def _apply(self, unit: Unit) -> None:
        record, place = unit.record, self._device.torch_device
        kinds = [self._kind(unit, one) for one in unit.pending.values()]
        steps = zip(unit.pending.values(), kinds, strict=True)
        with self._memory(needed=not all(is_fused(one.recipe.tensors, place, kind) for one, kind in steps)):
            self._make_steps(unit)
        with self._lane.lock:
            record.note_updated()
            unit.pending.clear()
            self._lane.changed.notify_all()

    @staticmethod
    def _kind(unit: Unit, update: Update) -> torch.dtype | None:
        """Return the type of an update's gradient; None for zeros."""
        if update.tensor is not None:
            return update.tensor.dtype
        if update.field is None:
            return None
        return torch.float32 if update.field == "grad32" else compute_dtype(unit.record.schema)

    @contextlib.contextmanager
    def _memory(self, *, needed: bool) -> Iterator[None]:
        """Have memory for intermediate values ready inside the `with`; where it is needed and there is none,
        for as long as that.
        """
        for_now = needed and self._extent is None
        if for_now:
            room = self._device.room
            fits = (one for one in _FOR_NOW_NBYTES if room is None or room.fits(one))
            self.open(next(fits, _FOR_NOW_NBYTES[-1]))
        try:
            if self._extent is not None:
                self._store.arrived(self._extent)
            yield
            if self._extent is not None:
                self._store.used(self._extent)
        finally:
            if for_now:
                self.close()

    def _make_steps(self, unit: Unit) -> None:
        record, scratch = unit.record, self._scratch
        at = {name: record.tensor(name).view(dtype) for name, dtype in _dtypes(record).items()}
        record.arrived(*at)
        for index, update in unit.pending.items():
            if update.recipe.tensors is None:
                raise UnsupportedError(
                    f"{unit.name}: {update.recipe.name} has no step for a device, and this record lives "
                    "there. Give its Recipe one (`tensors`, see records/tensor_steps.py)."
                )
            segment = record.shard.segments[index]
            part = {name: one[segment.start : segment.stop] for name, one in at.items()}
            gradient = self._gradient(unit, index, update)
            if not segment.numel:  # other ranks have all of it
                continue
            steps = [*_of_zeros(update.missed), (gradient, update.scalars), *_of_zeros(update.after)]
            for values, scalars in steps:
                make_step(update.recipe.tensors, part, values, scalars, scratch)
        record.used(*at)

    def _take_room(self, unit: Unit) -> int:
        """Count the gradients of a unit that are to be brought; return the bytes to give back.

        Raises: DeviceMemoryError where they have no room; then nothing is changed.
        """
        room, before, self.busy = self._device.room, self.busy, unit
        segments, width = unit.record.shard.segments, compute_dtype(unit.record.schema).itemsize
        sizes = []
        for index, update in unit.pending.items():
            if update.has_gradient and not update.on_device:
                wide = 4 if update.field == "grad32" else width
                wide = wide if update.tensor is None else update.tensor.itemsize
                sizes.append(segments[index].numel * wide)
        if unit.in_parts and sizes:  # each rank has other parts of parameters, and all take the same
            sizes = [4 * unit.record.shard.numel, *[1] * len(segments)]
        try:
            return room.take_all(sizes, f"{unit.name}: gradients that are brought") if room is not None else 0
        finally:
            self.busy = before

    def _gradient(self, unit: Unit, index: int, update: Update) -> torch.Tensor | None:
        """Return an update's gradient, on the device; None for zeros."""
        if update.tensor is None and update.field is None:
            return None
        if update.tensor is not None:
            update.arriving.wait()
            return update.tensor if update.on_device else self._device.bring(update.tensor)
        record = unit.record
        dtype = torch.float32 if update.field == "grad32" else compute_dtype(record.schema)
        values = torch.empty(record.shard.segments[index].numel, dtype=dtype, device="cpu")
        job = ReadPass(record, index, record.tile_numel, {str(update.field): values})
        self._lane.submit(job, urgent=True)
        self._lane.wait(job, finished=True)
        return self._device.bring(values)

    def square_sums(self, gradients: list[torch.Tensor]) -> list[float]:
        """Return the fp64 sum of the squares of each of these gradients, which are on the device. The host
        waits for it once.
        """
        room, nbytes = self._device.room, 8 * len(gradients)
        taken = room.take(nbytes, "sums of squares of gradients") if room is not None else 0
        try:
            sums = torch.empty(len(gradients), dtype=torch.float64, device=gradients[0].device)
            with self._memory(needed=True):
                for gradient, total in zip(gradients, sums, strict=True):
                    if self._scratch is not None:
                        square_sum(gradient, self._scratch, total)
            found: list[float] = self._device.to_host(sums, ours=False).tolist()
            return found
        finally:
            if room is not None:
                room.give_back(taken)


def _of_zeros(steps: Iterable[tuple[Any, int]]) -> list[tuple[None, Any]]:
    """Return steps without gradients, by their scalars and keys, as `make_step` takes them."""
    return [(None, scalars) for scalars, _ in steps]


def bring_down(unit: Unit, device: Device) -> None:
    """Have the gradients of pending updates leave the device, for a pass of the lane to apply them."""
    for index, update in list(unit.pending.items()):
        if update.on_device and update.tensor is not None:
            update.arriving.wait()
            copy: Download = device.download(update.tensor, ours=False)
            here = update._replace(tensor=copy.tensor, arriving=copy.transfer, on_device=False)
            unit.pending.put(index, here)


def _dtypes(record: Record) -> dict[str, torch.dtype]:
    """Return the types of a record's fields."""
    return {name: _STATE_DTYPES.get(name, compute_dtype(record.schema)) for name in record.fields}

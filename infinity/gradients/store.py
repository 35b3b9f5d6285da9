"""The owner of stored gradients: takes them as they accumulate, keeps them, spills them, sums them."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from infinity import kernels
from infinity.device.device import Device
from infinity.errors import HostMemoryError
from infinity.gradients.gradient import Form, Gradient, total_of
from infinity.gradients.reduction import Reduction
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import Lease, Outgoing, end_all
from infinity.lane.passes import ReadPass, SpillPart, SpillPass
from infinity.planning.budget import Budget
from infinity.ranks.group import Ranks
from infinity.records.record import Record
from infinity.records.weights import WEIGHTS
from infinity.sizes import format_size
from infinity.storage.memory import Ledger
from infinity.storage.store import DONE, Future, Store
from infinity.tensors import is_part
from infinity.units.unit import Unit

_OWN_NBYTES = 1 << 18
"""Bytes. Smaller gradients stay where torch has put them."""


class Flusher(Protocol):
    """What the store needs of those who own the units."""

    def flush(self, unit: Unit) -> None:
        """Apply a unit's pending updates, before its gradient changes."""


class Peers(Protocol):
    """The other ranks, each of which holds its part of every gradient."""

    def collect(self, record: Record, index: int, part: torch.Tensor) -> torch.Tensor:
        """Return a parameter's values from the ranks' parts of them. Every rank calls it."""


class GradientStore:
    """Takes gradients as they accumulate and keeps them until they are used or dropped."""

    def __init__(
        self,
        lane: StreamLane,
        device: Device,
        kept: Ledger,
        spill_store: Store,
        outgoing: Outgoing,
        flusher: Flusher,
        least_total: Callable[[str], int],
        ranks: Ranks,
        sharing: tuple[Peers, Reduction] | None,
    ) -> None:
        """Keep gradients in `kept`; what does not fit goes to `spill_store`, by `outgoing` and `lane`.

        least_total: says which host_memory, in bytes, holds all gradients in a field as well. sharing: how
        several ranks share each gradient; None with one rank.
        """
        self._lane = lane
        self._device = device
        self._spill_store = spill_store
        self._kept = kept
        self._share = outgoing
        self._flusher = flusher
        self._least_total = least_total
        self.ranks = ranks
        self._peers: Peers | None
        self._reduction: Reduction | None
        self._peers, self._reduction = sharing or (None, None)
        self._at_once: dict[int, int] = {}
        self._in_record: defaultdict[Unit, WeakValueDictionary[int, Gradient]]
        self._in_record = defaultdict(WeakValueDictionary)  # those that somebody has
        self._outgoing: defaultdict[Unit, dict[int, Gradient]] = defaultdict(dict)
        self._received: Callable[[torch.Tensor], torch.Tensor] | None = None

    def open(self, budget: Budget, units: Sequence[Unit]) -> None:
        """Prepare for the gradients of `units`, which come only later."""
        self._at_once = _at_once(units, budget.outgoing_nbytes)
        self._device.room_for_downloads(self._kept, self._share.ledger)

    # What a backward brings

    def receive_by(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Have `call` say what a gradient counts as that a backward brings; a DeepSpeedEngine's."""
        self._received = call

    def receive_plainly(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Take gradients as they come, where `call` has had a say."""
        if self._received == call:
            self._received = None

    def received(self, grad: torch.Tensor) -> torch.Tensor:
        """Return what counts as the gradient that a backward has brought."""
        return grad if self._received is None else self._received(grad)

    # Several ranks

    @property
    def shared(self) -> bool:
        """Whether other ranks have their part in each gradient."""
        return self._reduction is not None

    def deferring(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients stay on each rank, whole, until the next backward or step."""
        return contextlib.nullcontext() if self._reduction is None else self._reduction.deferring()

    def reduce(self, unit: Unit, *, at_once: bool) -> None:
        """Begin to sum a unit's gradients, all of which have come, over the ranks: where that is deferred,
        only if it has to be `at_once`.
        """
        if self._reduction is not None and (at_once or not self._reduction.deferred):
            self._reduction.reduce(unit, self)

    def end_backward(self, units: Iterable[Unit]) -> None:
        """Sum over the ranks what has not been, unless that is deferred."""
        if self._reduction is not None and not self._reduction.deferred:
            self._reduction.settle(units, self)

    def settle_ranks(self, units: Iterable[Unit]) -> None:
        """Have the ranks sum the gradients of units, if they have not yet."""
        if self._reduction is not None:
            self._reduction.settle(units, self)

    def _collect(self, gradient: Gradient, part: torch.Tensor) -> torch.Tensor:
        """Put the ranks' parts of a parameter's gradient together."""
        if self._peers is None:
            return part
        return self._peers.collect(gradient.unit.record, gradient.index, part)

    def reduced(self, gradient: Gradient, mean: torch.Tensor, arriving: Future, *, keep: bool) -> None:
        """Give a local gradient this rank's part of the mean, which may be read when `arriving` is over."""
        gradient.comes(arriving)
        self._place(gradient, mean, keep=keep)

    def replaced(self, old: Gradient, part: torch.Tensor) -> Gradient:
        """Return a gradient in the place of `old`, of which `part` is what this rank holds."""
        fresh = old.fresh()
        if old.checked:
            fresh.was_seen_finite()
        old.charge(0)
        self.reduced(fresh, part, DONE, keep=True)
        return fresh

    def arrive(self, unit: Unit, index: int, grad: torch.Tensor, *, keep: bool) -> Gradient:
        """Take a gradient that starts anew. With `keep` False it stays on its way, to be applied when the
        unit is complete. With several ranks it is this rank's.
        """
        if self._reduction is not None:
            return self._reduction.arrive(unit, index, grad, keep=keep)
        gradient = Gradient(unit, index, self._kept)
        self._share.await_buffer(grad.nbytes, self._at_once.get(grad.nbytes, 1))
        download = self._device.download(grad)
        gradient.comes(download.transfer)
        tensor = download.tensor
        if keep and download.done:  # and in the cache
            gradient.measure(tensor)
        if keep or not unit.record.all_in_host or is_part(tensor):
            tensor = self._own(tensor)
        self._place(gradient, tensor, keep=keep)
        return gradient

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in memory of ours of a large gradient of the CPU's: it stays for a while; see
        buffers. Of one that is part of something larger, too: all of that would stay.
        """
        if not self._device.is_host:
            return tensor
        if tensor.nbytes < _OWN_NBYTES:
            return tensor.clone() if is_part(tensor) else tensor
        own = self._share.buffers.lend(tensor.numel(), tensor.dtype).view(tensor.shape)
        kernels.copy(tensor.nbytes, own.data_ptr(), tensor.data_ptr())
        return own

    def add(self, gradient: Gradient, grad: torch.Tensor) -> None:
        """Add a further backward's gradient to the stored one, in fp32."""
        gradient.check("a second backward before step()")
        if self._reduction is not None:
            self._reduction.add(gradient, grad)
        else:
            self._share.await_buffer(grad.nbytes, 1)
            self.add_mean(gradient, self._device.to_host(grad))

    def add_mean(self, gradient: Gradient, tensor: torch.Tensor) -> None:
        """Add what a further backward brought to the stored gradient."""
        unit = gradient.unit
        gradient.arriving.wait()
        gradient.comes(DONE)
        if gradient.index in unit.pending:
            self._flusher.flush(unit)
        if gradient.form is Form.OUTGOING:
            self.spill(unit)
        if gradient.form is Form.SPILLED:
            self._send(gradient, tensor)
        elif gradient.form is Form.ZERO:
            gradient.measure(tensor)
            self._place(gradient, tensor, keep=True)
        else:
            total = total_of(gradient.in_memory, tensor)
            gradient.measure(total)
            self._place(gradient, total, keep=True)

    def _place(self, gradient: Gradient, tensor: torch.Tensor, *, keep: bool) -> None:
        if keep and gradient.charge(tensor.nbytes):
            gradient.keep(tensor)
            return
        gradient.charge(0)
        self._send(gradient, tensor)

    def _send(self, gradient: Gradient, tensor: torch.Tensor) -> None:
        """Let a gradient wait for the rest of its unit; a spilled one is added to what is stored."""
        gradient.send(tensor, self._share.lease(tensor.nbytes))
        self._outgoing[gradient.unit][gradient.index] = gradient

    def outgoing_of(self, unit: Unit) -> dict[int, Gradient]:
        """Return a unit's gradients, by parameter, that wait for the rest of them to be spilled together."""
        return dict(self._outgoing.get(unit, {}))

    def take_outgoing(self, unit: Unit) -> dict[int, Gradient]:
        """Return the same, which wait no more."""
        return self._outgoing.pop(unit, {})

    def settle(self, unit: Unit) -> None:
        """Keep a complete unit's outgoing gradients: in host memory where they fit by now, else in the
        record.
        """
        for index, gradient in self.outgoing_of(unit).items():
            if gradient.form is Form.OUTGOING and gradient.parts is None and gradient.arriving.done:
                gradient.measure(gradient.in_memory)
            if gradient.form is Form.OUTGOING and gradient.charge(gradient.in_memory.nbytes):
                del self._outgoing[unit][index]
                gradient.keep(gradient.in_memory)
        self.spill(unit)

    def spill(self, unit: Unit) -> None:
        """Write a unit's outgoing gradients to its record."""
        if not self.outgoing_of(unit):
            return
        if any(update.field for update in unit.pending.values()):
            self._flusher.flush(unit)  # what a step has decided reads what is stored now
        outgoing = self.take_outgoing(unit)
        stored = {index: one for index, one in self._in_record[unit].items() if one.form is Form.SPILLED}
        for index, gradient in stored.items():
            if outgoing.get(index, gradient) is not gradient:
                self._take_out(gradient)
        adds = {index for index, gradient in outgoing.items() if gradient.form is Form.SPILLED}
        carried = {index: gradient for index, gradient in stored.items() if index not in outgoing}
        wide = bool(adds) or any(gradient.in_memory.dtype == torch.float32 for gradient in outgoing.values())
        survivors = [*carried.values(), *(outgoing[index] for index in adds)]
        source = survivors[0].field if survivors else None
        target = "grad32" if wide or source == "grad32" else "grad16"
        parts = {
            index: SpillPart(
                gradient.in_memory,
                add=index in adds,
                measure=index in adds or gradient.parts is None,
                arriving=gradient.arriving,
            )
            for index, gradient in outgoing.items()
        }
        if target not in unit.record:
            self._make_space(unit, target)
        job = SpillPass(unit.record, unit.record.tile_numel, parts, set(carried), source, target)
        leases = []
        for index, gradient in (*outgoing.items(), *carried.items()):
            leases.append(gradient.spill(target))
            self._in_record[unit][index] = gradient
            if index in parts and parts[index].measure:
                gradient.measured_by(parts[index], job)
        job.give_parts_to(partial(_spilled, leases))
        try:
            self._lane.submit(job)
        except BaseException as error:  # interrupted: nobody else has these gradients
            self._lane.fail(error)
            raise
        self._share.sent(job)

    def _take_out(self, gradient: Gradient) -> None:
        """Bring a gradient whose place a later one takes to memory: no p.grad holds it, but somebody does."""
        gradient.bring_back(self._read(gradient))

    def _make_space(self, unit: Unit, field: str) -> None:
        """Give the record of `unit` a field for its gradients.

        Raises: HostMemoryError, with the host_memory that would do, where records lie in host memory.
        """
        try:
            unit.record.add(field, self._spill_store)
        except HostMemoryError as error:
            raise HostMemoryError(
                f"{error} With the gradients of the whole model, as this step makes them, "
                f"host_memory={format_size(self._least_total(field))} would do."
            ) from None

    def square_sums(self, gradients: Sequence[Gradient]) -> list[float]:
        """Return the fp64 sum of each stored gradient's squares, over all ranks; see `square_sum`."""
        return self.ranks.totals([self.square_sum(gradient) for gradient in gradients], "norms")

    def square_sum_of_all(self, gradients: Iterable[Gradient]) -> float:
        """Return the fp64 sum of the squares of all these, over all ranks."""
        return self.ranks.totals([sum(map(self.square_sum, gradients), 0.0)], "norm")[0]

    def square_sum(self, gradient: Gradient) -> float:
        """Return the fp64 sum of the squares of what this rank has of a stored gradient, clipping not
        applied; waits for a pass that is computing it.
        """
        gradient.check("clipping, or reading a gradient,")
        self.settle_ranks([gradient.unit])
        if gradient.form is Form.ZERO:
            return 0.0
        if gradient.form is Form.SPILLED and gradient.index in self.outgoing_of(gradient.unit):
            self.spill(gradient.unit)
        parts = gradient.parts or gradient.measure(gradient.await_tensor())
        job = gradient.job
        if job is not None:
            self._lane.wait(job)
        self._lane.check_open()  # a pass that failed is forgotten too
        return parts.square_sum if parts.finite else math.nan

    def dense(self, gradient: Gradient, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient as a new tensor, clipping applied, in the parameter's shape and device."""
        parameter = gradient.unit.parameters[gradient.index]
        gradient.check("reading a gradient")
        self.settle_ranks([gradient.unit])
        if gradient.index in self.outgoing_of(gradient.unit):
            self.spill(gradient.unit)
        if gradient.form is Form.ZERO:
            return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        spilled = gradient.form is Form.SPILLED
        part = self._read(gradient) if spilled else gradient.await_tensor()
        values = self._collect(gradient, part)
        scaled = values.float().mul(float(gradient.scale)).to(dtype)
        return scaled.view(parameter.shape).to(parameter.device)

    def _read(self, gradient: Gradient) -> torch.Tensor:
        """Return what this rank has of a spilled gradient."""
        record = gradient.unit.record
        dtype = torch.float32 if gradient.field == "grad32" else WEIGHTS[record.form.dtype].dtype
        values = torch.empty(record.shard.segments[gradient.index].numel, dtype=dtype)
        job = ReadPass(record, gradient.index, record.tile_numel, {gradient.field: values})
        self._lane.submit(job, urgent=True)
        self._lane.wait(job)
        return values


def _spilled(leases: Sequence[Lease | None], parts: dict[int, SpillPart]) -> None:
    for part in parts.values():
        part.let_go()
    end_all(leases)


def _at_once(units: Sequence[Unit], outgoing_nbytes: int) -> dict[int, int]:
    """Return, by their bytes, how many gradients may be on their way at once: those of one unit, and of as
    many more as the outgoing share holds.
    """
    sizes = [
        Counter(segment.numel * unit.flat.dtype.itemsize for segment in unit.shard.segments) for unit in units
    ]
    largest = max((sum(size * count for size, count in one.items()) for one in sizes), default=0)
    rounds = 1 + outgoing_nbytes // max(largest, 1)
    total = sum(sizes, Counter[int]())
    return {size: min(total[size], rounds * max(one[size] for one in sizes)) for size in total}

"""Stored gradients: taken as they accumulate, kept in host memory or spilled to records, used up, measured
and read.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Protocol
from weakref import ref

import torch

from infinity import kernels
from infinity.device.device import Device, Download
from infinity.errors import HostMemoryError, UnsupportedError
from infinity.gradients.gradient import Form, Gradient, applied_message, total_of
from infinity.gradients.in_flight import at_once
from infinity.gradients.on_device import GradientsOnDevice
from infinity.gradients.one_bit import Momenta
from infinity.gradients.reduction import Reducers, Reduction
from infinity.gradients.spilling import Outbound, plan_spill
from infinity.gradients.unkept import UnkeptGradients
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import Lease, OutgoingShare, end_all
from infinity.lane.passes import ReadPass, SpillPart, SpillPass
from infinity.lane.told import TARGET, SpillUntoldPass, ToldGradients
from infinity.planning.budget import Budget
from infinity.ranks.group import Ranks
from infinity.records.record import Record
from infinity.records.updates import Update
from infinity.records.weights import compute_dtype
from infinity.sizes import format_size
from infinity.storage.memory import Ledger, is_mapped_apart
from infinity.storage.store import DONE, Future, HostStore, Store
from infinity.tensors import is_part, spread_as
from infinity.units.residency import UnitResidency
from infinity.units.stages import Stages
from infinity.units.unit import Unit

_OWN_NBYTES = 1 << 18
"""Bytes. Smaller gradients stay where torch has put them."""


class Peers(Reducers, Protocol):
    """What ranks do together that each hold a part of every gradient."""

    def collect(self, record: Record, index: int, part: torch.Tensor) -> torch.Tensor:
        """Return a parameter's values from the ranks' parts of them. Every rank calls it."""


class GradientStore:
    """Keeps gradients where `Gradient` says that they are. Used by the thread that computes."""

    def __init__(
        self,
        lane: StreamLane,
        device: Device,
        kept: Ledger,
        spill_store: Store,
        outgoing_share: OutgoingShare,
        residency: UnitResidency,
        least_total: Callable[[str], int],
        ranks: Ranks,
        stages: Stages,
        peers: Peers | None,
        *,
        deferred: bool,
        bucket_nbytes: int,
    ) -> None:
        """Keep gradients in `kept`; what does not fit goes to `spill_store`, by `outgoing_share` and `lane`.

        least_total: says which host_memory, in bytes, holds all gradients in a field as well. peers: None for
        one rank. deferred: ranks sum gradients only when a step is decided. bucket_nbytes: see Reduction.
        """
        self._lane = lane
        self._device = device
        self._spill_store = spill_store
        self._kept = kept
        self._outgoing_share = outgoing_share
        self._residency = residency
        self._least_total = least_total
        self.ranks = ranks
        self.stages = stages
        self._peers = peers
        self._reduction: Reduction | None = None
        if peers is not None:
            self._reduction = Reduction(
                peers, lane, device, kept, outgoing_share, deferred=deferred, bucket_nbytes=bucket_nbytes
            )
        self._at_once: dict[int, int] = {}
        self._in_record: dict[Unit, dict[int, ref[Gradient]]] = {}
        """Those that were spilled last, to some of which nobody may refer any more."""
        self._outgoing: defaultdict[Unit, dict[int, Gradient]] = defaultdict(dict)
        self.on_device = GradientsOnDevice(device, residency, self._outgoing, self._comes_down)
        """Those that stay on an accelerator."""
        self.unkept = UnkeptGradients(lane, device, kept)
        """Those that moments tell."""
        self._received: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._charged_nbytes = 0

    def open(self, budget: Budget, units: Sequence[Unit]) -> None:
        """Prepare for the gradients of `units`, which come only later."""
        self._at_once = at_once(units, budget.outgoing_nbytes)
        if self._reduction is not None:
            self._reduction.open(units)
        self._device.room_for_downloads(self._kept)  # the outgoing share's are made ahead

    # What a backward brings

    def receive_by(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Have `call` return the gradient that counts for each that a backward brings, as a DeepSpeedEngine
        does.
        """
        self._received = call

    def receive_plainly(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Undo `receive_by`, unless another call has taken the place of `call`."""
        if self._received == call:
            self._received = None

    def received(self, grad: torch.Tensor) -> torch.Tensor:
        """Return what counts as the gradient that a backward has brought."""
        return grad if self._received is None else self._received(grad)

    # Several ranks

    def device_nbytes(self, unit: Unit) -> int:
        """Return the bytes that a unit's gradients take on the device, until they have left it."""
        room = self._device.room
        if room is None or not unit.trainable:
            return 0
        if self._reduction is not None:
            return self._reduction.device_nbytes(unit)
        return sum(room.nbytes(one.numel * unit.flat.itemsize) for one in unit.layout.segments)

    @property
    def shared(self) -> bool:
        """Whether each rank has a part of each gradient: there are several."""
        return self._reduction is not None

    def has_local(self, unit: Unit, index: int) -> bool:
        """Whether this rank has a gradient of a parameter that the ranks have not summed."""
        return self._reduction is not None and self._reduction.has_local(unit, index)

    def deferring(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients stay on each rank, whole, until the next backward or step."""
        return contextlib.nullcontext() if self._reduction is None else self._reduction.deferring()

    def reduce(self, unit: Unit, *, at_once: bool) -> None:
        """Begin to sum a unit's gradients, all of which have come, over the ranks; where that is deferred,
        only with `at_once`.
        """
        if self._reduction is None:
            return
        if at_once:
            self._reduction.reduce([unit], self)
        elif not self._reduction.deferred:
            for one in self._reduction.complete(unit, self):
                self.settle(one)

    def end_backward(self, units: Iterable[Unit]) -> None:
        """Sum over the ranks the gradients that have not been summed, unless that is deferred."""
        if self._reduction is not None and not self._reduction.deferred:
            self._reduction.settle(units, self)

    def settle_ranks(self, units: Iterable[Unit]) -> None:
        """Have the ranks sum the gradients of units, if they have not yet."""
        if self._reduction is not None:
            self._reduction.settle(units, self)

    def reduced(
        self, gradient: Gradient, mean: torch.Tensor, arriving: Future, lease: Lease | None, *, keep: bool
    ) -> None:
        """See MeanSink."""
        gradient.comes(arriving)
        if lease is not None:
            self.on_device.stay(gradient, mean, lease, keep=keep)
        else:
            self._place(gradient, mean, keep=keep)

    def send_momenta_of(self, optimizer: Momenta) -> None:
        """See Reduction."""
        if self._reduction is not None:
            self._reduction.send_momenta_of(optimizer)

    def replaced(self, old: Gradient, part: torch.Tensor) -> Gradient:
        """Return a gradient in the place of `old`, of which `part` is what this rank holds."""
        fresh = old.fresh()
        if old.checked:
            fresh.was_seen_finite()
        old.charge(0)
        self.reduced(fresh, part, DONE, None, keep=True)
        return fresh

    def arrive(self, unit: Unit, index: int, grad: torch.Tensor, *, keep: bool) -> Gradient:
        """Take a gradient that starts anew. With `keep` False it stays on its way, to be applied when the
        unit is complete. With several ranks it is this rank's.
        """
        if self._reduction is not None:
            return self._reduction.arrive(unit, index, grad, keep=keep)
        gradient = Gradient(unit, index, self._kept)
        if not self._device.is_host:
            if self.on_device.take(gradient, grad, keep=keep):
                return gradient
            self._await_buffer(grad.nbytes)
        download = self._device.download(grad)
        gradient.comes(download.transfer)
        tensor = download.tensor
        if keep and download.done:  # and in the cache
            gradient.measure(tensor)
        stays = keep or not unit.record.all_in_host or is_part(tensor)
        self._place(gradient, tensor, keep=keep, own=stays)
        return gradient

    def be_elsewhere(self, unit: Unit, index: int) -> Gradient:
        """Return a gradient, of a backward, of which other ranks have all parts."""
        gradient = Gradient(unit, index, self._kept)
        gradient.keep(torch.empty(0, dtype=unit.flat.dtype, device="cpu"))
        return gradient

    def leave_device(self, unit: Unit) -> None:
        """Take a unit's gradients off the device, where its record stays no longer."""
        self.on_device.leave(unit)
        self.spill(unit)

    def _comes_down(self, gradient: Gradient, tensor: torch.Tensor) -> None:
        """A gradient has left the device."""
        self._place(gradient, tensor, keep=True)

    def _await_buffer(self, nbytes: int) -> None:
        """Wait for memory for a download. What is made ahead beyond the outgoing share is charged to the kept
        share.
        """
        self._outgoing_share.await_buffer(nbytes, self._at_once.get(nbytes, 1))
        beyond = self._device.made_ahead_nbytes - self._outgoing_share.ledger.limit_nbytes
        if beyond > self._charged_nbytes:
            self._kept.reserve_anyway(beyond - self._charged_nbytes)
            self._charged_nbytes = beyond

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, in a buffer, of a large gradient that torch has allocated on the CPU, since it stays
        for a while (see buffers), and of one that is part of a larger storage, all of which would stay. One
        that malloc has mapped by itself leaves no hole, and stays where it is.
        """
        if not self._device.is_host:
            return tensor
        if tensor.nbytes < _OWN_NBYTES:
            return tensor.clone() if is_part(tensor) else tensor
        buffers = self._outgoing_share.buffers
        if is_mapped_apart(tensor.nbytes) and not is_part(tensor):
            buffers.trim(buffers.spare_nbytes)  # its bytes of the share are not free any more
            return tensor
        own = buffers.take(tensor.numel(), tensor.dtype).view(tensor.shape)
        kernels.copy(tensor.nbytes, own.data_ptr(), tensor.data_ptr())
        return own

    def refusal(self, unit: Unit) -> UnsupportedError:
        """Return the error for a second backward of what was applied in the first, having told other ranks,
        which may go on without one: they wait for what this one sends no more.
        """
        error = UnsupportedError(applied_message(unit, "a second backward before step()"))
        self.ranks.post_failure(f"{type(error).__name__}: {error}", ends=False)
        return error

    def add(self, gradient: Gradient, grad: torch.Tensor) -> None:
        """Add a further backward's gradient to the stored one, in fp32."""
        if gradient.form is Form.APPLIED:
            raise self.refusal(gradient.unit)
        gradient.check("a second backward before step()")
        gradient.is_added_to()
        if gradient.form is not Form.ZERO:
            self.on_device.are_added_to()
        if self._reduction is not None:
            if self._reduction.has_complete(gradient.unit):
                for one in self._reduction.close_bucket(self):
                    self.settle(one)
            self._reduction.add(gradient, grad)
        elif not self.on_device.add(gradient, grad):
            self.on_device.bring_down(gradient)
            self._outgoing_share.await_buffer(grad.nbytes, 1)
            self.add_mean(gradient, self._device.to_host(grad))

    def add_mean(self, gradient: Gradient, tensor: torch.Tensor, lease: Lease | None = None) -> None:
        """See MeanSink; on one rank, add what a further backward brought to the stored gradient."""
        unit = gradient.unit
        gradient.arriving.wait()
        gradient.comes(DONE)
        if lease is not None:
            if self.on_device.add_mean(gradient, tensor, lease):
                return
            tensor = self.on_device.in_host(tensor)
            lease.end()
        self.on_device.bring_down(gradient)
        if gradient.index in unit.pending:
            self._residency.flush(unit)
        if gradient.form is Form.OUTGOING:
            self.spill(unit)
        if gradient.form is Form.SPILLED:
            self._send(gradient, tensor)
        elif gradient.form is Form.ZERO:
            gradient.measure(tensor)
            self._place(gradient, tensor, keep=True)
        else:
            if gradient.in_memory.dtype == torch.float32:
                self._lane.settle(unit.record)  # it is changed in place: an update by it may be under way
            total = total_of(gradient.in_memory, tensor)
            gradient.measure(total)
            self._place(gradient, total, keep=True)

    def _place(self, gradient: Gradient, tensor: torch.Tensor, *, keep: bool, own: bool = False) -> None:
        """Keep a gradient, or let it wait on its way out. own: in a copy, which is made when it is paid for:
        computing waits for that with one of it in memory, not two.
        """
        unit = gradient.unit
        told = keep and not gradient.additions and self.unkept.expects(unit)
        stays = keep and not told and not self.rests(unit)
        if stays and gradient.charge(tensor.nbytes):
            gradient.keep(self._own(tensor) if own else tensor)
            return
        gradient.charge(0)
        self._send(gradient, tensor, own=own)

    def rests(self, unit: Unit) -> bool:
        """Whether a unit's gradients go to its record even if host memory has room: they would wait there for
        long, as those of a slice that is seldom used. To write a gradient of 16 bits and read it again moves
        4 bytes per parameter; a pass that applies it in time, and another one for the next use, 24 more. So
        that is so where a use in the next step is less likely than five to one.
        """
        if unit.record.is_elsewhere:
            return False  # there is nothing of it here
        seldom = 6 * self._residency.share_of_steps(unit) < 5
        return seldom and not isinstance(self._spill_store, HostStore) and not unit.record.all_in_host

    def _send(self, gradient: Gradient, tensor: torch.Tensor, *, own: bool = False) -> None:
        """Let a gradient wait for the others of its unit; a spilled one is added to what is stored."""
        unit = gradient.unit
        lease = self._outgoing_share.lease(tensor.nbytes)
        gradient.send(self._own(tensor) if own else tensor, lease)
        self._outgoing[unit][gradient.index] = gradient

    def units_outgoing(self) -> list[Unit]:
        """Return the units that have such, in order."""
        return sorted((unit for unit, any_ in self._outgoing.items() if any_), key=attrgetter("index"))

    def outgoing_of(self, unit: Unit) -> dict[int, Gradient]:
        """Return a unit's gradients, by parameter, that wait for its others, to be applied or spilled."""
        return dict(self._outgoing.get(unit, {}))

    def settle(self, unit: Unit) -> None:
        """Keep a complete unit's outgoing gradients: in host memory as far as they fit now, the others in
        the record, unless moments tell them.
        """
        told = self.unkept.prepared(unit)
        self.on_device.wait_no_more(unit)
        outgoing = self._outgoing.get(unit)
        if not outgoing:
            return
        leave = told is not None or self.rests(unit)
        for index, gradient in list(outgoing.items()):
            if gradient.form is not Form.OUTGOING:
                continue
            if gradient.square_sum is None and gradient.arriving.done:
                gradient.measure(gradient.in_memory)
            if not leave and gradient.charge(gradient.in_memory.nbytes):
                del outgoing[index]
                gradient.keep(gradient.in_memory)
        self.spill(unit, told)

    def apply(self, unit: Unit, gradients: Sequence[Gradient], decide: Callable[[Gradient], Update]) -> None:
        """Use up a unit's gradients in an update now, in the backward. decide: says what the optimizer makes
        of each.

        Raises: UnsupportedError for one that was clipped: this update cannot apply the factor any more.
        """
        if not gradients:
            return
        pending, outgoing = unit.pending, self._outgoing[unit]
        if pending:  # steps that a slice missed, before a gradient was assigned to it
            self._residency.flush(unit)
        leases = []
        for gradient in gradients:
            if gradient.scale != 1:
                raise UnsupportedError(applied_message(unit, "clipping"))
            pending.put(gradient.index, decide(gradient))
            outgoing.pop(gradient.index, None)
            leases.append(gradient.apply())
        unit.values_changed()
        if unit.record.on_device:
            self._residency.apply_on_device(unit, partial(end_all, leases))
            return
        values = self._values_on_device(unit, leases)
        self._outgoing_share.sent(self._residency.apply(unit, partial(end_all, leases), values))

    def _values_on_device(self, unit: Unit, leases: list[Lease | None]) -> Download | None:
        """Begin to bring a unit's values from an accelerator, so that its update need not read them from NVMe
        again. Return None where it need not in any case, or where the outgoing share has no room for the copy
        beside the gradients.
        """
        room, record = self._device.room, unit.record
        if room is None or record.in_host("hi") or record.schema.derived:
            return None
        part = unit.part_of_rank
        if 2 * part.nbytes > self._outgoing_share.ledger.limit_nbytes:
            return None
        if not unit.residence.processed or unit.residence.outdated:
            return None
        leases.append(self._outgoing_share.lease(part.nbytes))
        self._await_buffer(part.nbytes)
        self._device.arrived(unit.flat)  # it may have been fetched for a later use, and not been used yet
        return self._device.download_part(unit.flat, part)

    def spill(self, unit: Unit, told: ToldGradients | None = None) -> None:
        """Write a unit's outgoing gradients to its record. told: may tell them, so that they need not be."""
        self.on_device.wait_no_more(unit)
        if not self._outgoing.get(unit):
            return
        if any(update.field for update in unit.pending.values()):
            self._residency.flush(unit)  # pending updates read the gradients that are stored now
        self.unkept.write(unit)  # to the place that is to be read, or written
        outgoing = self._outgoing.pop(unit)
        stored = {
            index: one
            for index, last in self._in_record.get(unit, {}).items()
            if (one := last()) is not None and one.form is Form.SPILLED
        }
        plan = plan_spill(
            {
                index: Outbound(one.in_memory.dtype == torch.float32, one.form is Form.SPILLED)
                for index, one in outgoing.items()
            },
            {index: one.field for index, one in stored.items()},
        )
        for index in plan.superseded:  # as p.grad, while the user still refers to the old one
            stored[index].bring_back(self._read(stored[index]))
        parts = {
            index: SpillPart(
                gradient.in_memory,
                add=index in plan.adds,
                measure=index in plan.adds or gradient.square_sum is None,
                arriving=gradient.arriving,
            )
            for index, gradient in outgoing.items()
        }
        if plan.target not in unit.record:
            self._make_space(unit, plan.target)
        carried = {index: stored[index] for index in plan.carried}
        record = unit.record
        told = told if plan.target == TARGET and not stored else None
        if told is None or any(one.measure for one in parts.values()) or not told.of.keys() >= parts.keys():
            job = SpillPass(record, record.tile_numel, parts, set(carried), plan.source, plan.target)
        else:
            job = SpillUntoldPass(record, record.tile_numel, parts, told)
        leases = []
        spilled = outgoing | carried
        self._in_record[unit] = {index: ref(gradient) for index, gradient in spilled.items()}
        for index, gradient in spilled.items():
            leases.append(gradient.spill(plan.target))
            if index in parts and parts[index].measure:
                gradient.measured_by(parts[index].square_sum, job)
        job.give_parts_to(partial(_let_go, leases))
        try:
            if told is not None and isinstance(job, SpillUntoldPass):
                self.unkept.leave(unit, told, outgoing)
            self._lane.submit(job)
        except BaseException as error:  # interrupted: nothing else refers to these gradients
            self._lane.fail(error)
            raise
        self._outgoing_share.sent(job)

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
        self.settle_ranks(dict.fromkeys(one.unit for one in gradients))
        self.on_device.measure(gradients)
        own = self.ranks.totals([self.square_sum(gradient) for gradient in gradients], "norms")
        return self.stages.mesh.totals_of(own, [one.parameter for one in gradients], "norms")

    def square_sum_of_all(self, gradients: Iterable[Gradient]) -> float:
        """Return the fp64 sum of the squares of all these, over all ranks and stages."""
        gradients = list(gradients)
        self.settle_ranks(dict.fromkeys(one.unit for one in gradients))
        self.on_device.measure(gradients)
        mesh = self.stages.mesh
        counted = (mesh.share(self.square_sum(one), one.parameter) for one in gradients)
        own = mesh.totals(self.ranks.totals([sum(counted, 0.0)], "norm"), "norm")[0]
        return sum(self.stages.each(own, "the norm of the gradients"))

    def square_sum(self, gradient: Gradient) -> float:
        """Return the fp64 sum of the squares of what this rank has of a stored gradient, without clipping;
        NaN where one is not finite. Waits for the pass that computes it.
        """
        gradient.check("clipping, or reading a gradient,")
        self.settle_ranks([gradient.unit])
        if gradient.form is Form.ZERO:
            return 0.0
        if gradient.form is Form.SPILLED and gradient.index in self.outgoing_of(gradient.unit):
            self.spill(gradient.unit)
        self.on_device.measure([gradient])
        measured = gradient.square_sum or gradient.measure(gradient.await_tensor())
        job = gradient.job
        if job is not None:
            self._lane.wait(job)
        self._lane.check_open()  # a pass that failed is forgotten too
        return measured.value if measured.finite else math.nan

    def dense(self, gradient: Gradient, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient as a new tensor, clipped, in the parameter's shape and on its device. With
        several ranks every rank calls it.
        """
        parameter, shape = gradient.parameter, gradient.unit.layout.segments[gradient.index].shape
        gradient.check("reading a gradient")
        self.settle_ranks([gradient.unit])
        if gradient.index in self.outgoing_of(gradient.unit):
            self.spill(gradient.unit)
        if gradient.form is Form.ZERO:
            return spread_as(parameter, torch.zeros(shape, dtype=dtype, device=parameter.device))
        part = self._read(gradient) if gradient.form is Form.SPILLED else gradient.await_tensor()
        if gradient.on_device and self._peers is not None:
            part = self.on_device.in_host(part)
        if self._peers is not None:
            if not gradient.unit.record.holders.are_all:  # others know not whether it is a sum, in fp32
                part = part.float()
            part = self._peers.collect(gradient.unit.record, gradient.index, part)
        scaled = part.float().mul(float(gradient.scale)).to(dtype)
        return spread_as(parameter, scaled.view(shape).to(parameter.device))

    def _read(self, gradient: Gradient) -> torch.Tensor:
        """Return what this rank has of a spilled gradient."""
        self.unkept.write(gradient.unit, read=True)
        record = gradient.unit.record
        dtype = torch.float32 if gradient.field == "grad32" else compute_dtype(record.schema)
        values = torch.empty(record.shard.segments[gradient.index].numel, dtype=dtype, device="cpu")
        job = ReadPass(record, gradient.index, record.tile_numel, {gradient.field: values})
        self._lane.submit(job, urgent=True)
        self._lane.wait(job)
        return values


def _let_go(leases: Sequence[Lease | None], parts: dict[int, SpillPart]) -> None:
    """Drop the tensors that a pass has written, and end their leases."""
    for part in parts.values():
        part.let_go()
    end_all(leases)

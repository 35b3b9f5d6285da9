"""Gradients of several ranks: from the moment a rank has its own until each rank has its share of the mean.

A unit's gradients are reduced together, when the last of them has accumulated. Until then they are *local*:
whole, and this rank's alone. Where reducing is deferred (ZeRO stage 1, `no_sync`), they stay so, and further
backwards add to them in fp32, until the step: one reduction for any number of backwards, for the price of
whole gradients in memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from infinity import kernels
from infinity.device.buffers import Buffers
from infinity.device.device import Device
from infinity.errors import HostMemoryError
from infinity.gradients.collectives import CollectiveLane, Reducing
from infinity.gradients.gradient import Form, Gradient, total_of
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import Lease, OutgoingShare
from infinity.ranks.group import Ranks
from infinity.records.weights import WIDEN
from infinity.sizes import format_size
from infinity.storage.memory import Ledger
from infinity.storage.store import Future
from infinity.units.unit import Unit


class Reducers(Protocol):
    """Where ranks sum gradients."""

    ranks: Ranks

    def reduces(self, unit: Unit) -> CollectiveLane:
        """Return the lane of the ranks that sum a unit's gradients: of those that have parts of it."""


class MeanSink(Protocol):
    """Where this rank's part of the mean goes."""

    def reduced(self, gradient: Gradient, mean: torch.Tensor, arriving: Future, *, keep: bool) -> None:
        """Give a local gradient this rank's part of the mean, which may be read when `arriving` is over."""

    def add_mean(self, gradient: Gradient, tensor: torch.Tensor) -> None:
        """Add what a further backward brought to the stored gradient."""


@dataclass(slots=True)
class _Local:
    """A gradient of this rank, and its values. keep: whether the mean is kept until the step."""

    gradient: Gradient
    values: torch.Tensor
    keep: bool
    taken_nbytes: int = 0
    """Of device_memory."""


class Reduction:
    """Owns local gradients, and what is on its way between the ranks. Used by the thread that computes."""

    def __init__(
        self,
        reducers: Reducers,
        lane: StreamLane,
        device: Device,
        kept: Ledger,
        outgoing_share: OutgoingShare,
        *,
        deferred: bool,
    ) -> None:
        """Reduce by `reducers`, with leases of `outgoing_share` for what is on its way. deferred:
        gradients stay local until the step, charged to `kept`.
        """
        self._deferred = deferred
        self._reducers = reducers
        self._lane = lane
        self._device = device
        self._kept = kept
        self._outgoing_share = outgoing_share
        self._buffers = Buffers(outgoing_share.ledger)
        self._local: defaultdict[Unit, dict[int, _Local]] = defaultdict(dict)
        self._under_way: deque[tuple[Reducing, int]] = deque()
        self._further_means: deque[tuple[Gradient, torch.Tensor, Reducing]] = deque()

    def device_nbytes(self, unit: Unit) -> int:
        """Return the bytes that a unit's reduction takes on an accelerator: its gradients, what is sent and
        received, and a rank's share of the sum, the mean, and the mean as it leaves.
        """
        room = self._device.room
        if room is None:
            return 0
        whole, share = unit.layout.numel * unit.flat.itemsize, 4 * unit.record.shard.numel
        return 3 * room.nbytes(whole) + 3 * room.nbytes(share)

    @property
    def deferred(self) -> bool:
        """Whether gradients stay local until the step."""
        return self._deferred

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Let the gradients that come inside the `with` stay local."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def arrive(self, unit: Unit, index: int, grad: torch.Tensor, *, keep: bool) -> Gradient:
        """Take a gradient of this rank that starts anew. keep: whether the mean is kept until the step."""
        gradient = Gradient(unit, index, self._kept)
        gradient.be_local()
        self._hold(gradient, grad, keep=keep)
        return gradient

    def has_local(self, unit: Unit, index: int) -> bool:
        """Whether this rank has a gradient of a parameter that the ranks have not summed."""
        return index in self._local.get(unit, {})

    def add(self, gradient: Gradient, grad: torch.Tensor) -> None:
        """Take a further backward's gradient of this rank."""
        before = self._local[gradient.unit].get(gradient.index)
        if before is None:
            self._hold(gradient, grad, keep=True)
        else:
            self._hold(gradient, total_of(before.values, grad.contiguous()), keep=before.keep)

    def _hold(self, gradient: Gradient, grad: torch.Tensor, *, keep: bool) -> None:
        grad = grad.contiguous()
        stays = self._deferred and gradient.form is Form.LOCAL and self._device.is_host
        if stays and not gradient.charge(grad.nbytes):
            raise HostMemoryError(
                f"{gradient.unit.name}: {format_size(grad.nbytes)} of whole gradients do not fit "
                "host_memory, where stage=1 and no_sync() keep those of all parameters until the step. Use "
                "stage=2 or 3 without no_sync(), or give more host_memory."
            )
        room, of_unit = self._device.room, self._local[gradient.unit]
        taken = room.take(grad.nbytes, f"{gradient.unit.name}: a whole gradient") if room is not None else 0
        before = of_unit.get(gradient.index)
        of_unit[gradient.index] = _Local(gradient, grad, keep, taken)
        if before is not None:
            self._give_back([before])

    def _give_back(self, local: Iterable[_Local]) -> None:
        """Count the memory of gradients that are used up no more."""
        room = self._device.room
        if room is not None:
            room.give_back(sum(one.taken_nbytes for one in local))

    def reduce(self, unit: Unit, into: MeanSink) -> None:
        """Begin to reduce a unit's local gradients. Every rank does so at the same point of its step."""
        local = self._local.pop(unit, {})
        taken = {index: one for index, one in sorted(local.items()) if one.gradient.is_current}
        if taken:
            job, mean = self._begin(unit, {index: one.values for index, one in taken.items()})
            for index, one in taken.items():
                segment = unit.record.shard.segments[index]
                self._deliver(one, mean[segment.start : segment.stop], job, into)
        self._give_back(local.values())
        local.clear()
        taken.clear()
        self._add_means(into)

    def _deliver(self, one: _Local, mean: torch.Tensor, job: Reducing, into: MeanSink) -> None:
        if one.gradient.form is Form.LOCAL:
            one.gradient.charge(0)
            into.reduced(one.gradient, mean, job, keep=one.keep)
        else:
            self._further_means.append((one.gradient, mean, job))

    def _begin(self, unit: Unit, grads: dict[int, torch.Tensor]) -> tuple[Reducing, torch.Tensor]:
        wide = any(grad.dtype == torch.float32 for grad in grads.values())
        dtype = torch.float32 if wide else unit.flat.dtype
        whole, share = unit.layout.numel * dtype.itemsize, unit.record.shard.numel
        room = self._device.room
        nbytes = 2 * whole if room is None else share * dtype.itemsize
        lease = self._lease(nbytes)
        # What is sent and received, and of this rank's share the sum, the mean, and its copy.
        parts = (whole, whole, *[4 * share] * 3) if room is not None else ()
        taken = room.take_all(parts, f"{unit.name}: a reduction") if room is not None else 0
        if self._device.is_host:
            sent = self._buffers.take(unit.layout.numel, dtype)
            _pack(unit, grads, sent)
        else:
            sent = torch.zeros(unit.layout.numel, dtype=dtype, device=self._device.torch_device)
            self._device.allocated(sent)
            for index, grad in grads.items():
                segment = unit.layout.segments[index]
                sent[segment.start : segment.stop].copy_(grad.view(-1))
            self._device.assembled(sent)
        take_mean = self._buffers.take if self._device.is_host else self._device.take_host_buffer
        mean = take_mean(share, dtype)
        what = f"{unit.name} ({', '.join(map(str, grads))} of {len(unit.parameters)}, {str(dtype)[6:]})"
        allocate = (
            self._buffers.take if self._device.is_host else partial(_on_device, self._device.torch_device)
        )
        count = self._reducers.ranks.size
        job = Reducing(what, sent, mean, allocate, lease, self._lane, self._device, count)
        self._reducers.reduces(unit).submit(job)
        if room is not None:
            room.leaves(taken, job)
        self._under_way.append((job, nbytes))
        return job, mean

    def _lease(self, nbytes: int) -> Lease:
        """Return a lease when half of the outgoing share has room for it, or no reduction is under way."""
        while self._under_way and self._under_way[0][0].done:
            self._under_way.popleft()
        limit = self._outgoing_share.ledger.limit_nbytes // 2
        while self._under_way and sum(size for _, size in self._under_way) + nbytes > limit:
            job, _ = self._under_way.popleft()
            self._outgoing_share.stall(job)
        return self._outgoing_share.lease_anyway(nbytes)

    def _add_means(self, into: MeanSink, *, wait: bool = False) -> None:
        """Add the means of further backwards to the stored ones, in order, as far as they have come."""
        while self._further_means and (wait or self._further_means[0][2].done):
            gradient, mean, job = self._further_means.popleft()
            self._outgoing_share.stall(job)
            into.add_mean(gradient, mean)

    def settle(self, units: Iterable[Unit], into: MeanSink) -> None:
        """Reduce what is local of `units`, and return when every mean has come and been added."""
        for unit in units:
            if self._local.get(unit):
                self.reduce(unit, into)
        self._add_means(into, wait=True)


def _on_device(device: torch.device, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _pack(unit: Unit, grads: dict[int, torch.Tensor], sent: torch.Tensor) -> None:
    """Lay gradients out as the unit is, zeros where there is none."""
    end = 0
    for index, segment in enumerate(unit.layout.segments):
        grad = grads.get(index)
        if grad is None:
            continue
        sent[end : segment.start].zero_()
        to = sent.data_ptr() + segment.start * sent.element_size()
        if grad.dtype == sent.dtype:
            kernels.copy(grad.nbytes, to, grad.data_ptr())
        else:
            WIDEN[grad.dtype](segment.numel, grad.data_ptr(), to)
        end = segment.stop
    sent[end:].zero_()

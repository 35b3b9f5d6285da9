"""Gradients of several ranks: from the moment a rank has its own until each rank has its share of the mean.

A unit's gradients are reduced together, when the last of them has accumulated. Until then they are *local*:
whole, and this rank's alone. Where reducing is deferred (ZeRO stage 1, `no_sync`), they stay so, and further
backwards add to them in fp32, until the step: one reduction for any number of backwards, for the price of
whole gradients in memory.

[Note: buckets of gradients]
Complete units stay local, too, until there are as many bytes of them as fill a *bucket*, or the backward
ends: then all are reduced in one collective. One that somebody asks for is reduced by itself. So no pass and
no thread ever waits for a bucket that is open, and which units share one depends on their sizes and on the
order of the program alone, never on timing: every rank fills the same buckets. A further gradient of a unit
that is in the open bucket closes it first, so that the bits are those of units reduced one by one. A unit
whose update is applied in the backward is reduced at once, by itself: its values are still there to start
from.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from infinity import kernels
from infinity.device.buffers import Buffers
from infinity.device.device import Device
from infinity.errors import HostMemoryError
from infinity.gradients.coded import CodedReducing
from infinity.gradients.coded_hops import beside_nbytes, reduce_in_hops
from infinity.gradients.coding import Coding
from infinity.gradients.collectives import Allocate, Collective, CollectiveLane, Reducing
from infinity.gradients.gradient import Form, Gradient, total_of
from infinity.gradients.machine_reducing import GradientPlaces, MachineReducing
from infinity.gradients.one_bit import Momenta, reduce_momenta
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import Lease, OutgoingShare, leases_of
from infinity.ranks.group import Ranks
from infinity.ranks.machines import RankGrid
from infinity.records.weights import WIDEN
from infinity.sizes import format_size
from infinity.storage.memory import Ledger
from infinity.storage.store import Future
from infinity.tensors import is_part
from infinity.units.unit import Unit


class Reducers(Protocol):
    """Where ranks sum gradients."""

    ranks: Ranks
    coding: Coding | None
    """By which gradients are sent; None: in their own type."""

    def reduces(self, unit: Unit) -> CollectiveLane:
        """Return the lane of the ranks that sum a unit's gradients: of those that have parts of it."""

    def share_gradients(self, share_nbytes: int) -> GradientPlaces | None:
        """Return where the ranks, of one machine, sum gradients in memory that they share; None where they
        send them. share_nbytes: of the budget, for what is on its way. Every rank calls it, once.
        """

    def feed_back(self, unit: Unit, indices: Collection[int], rows: torch.Tensor) -> None:
        """Add what was left out before of a unit's gradients to them, in `rows`, where they are coded so."""

    def feed_back_sums(self, unit: Unit, indices: Collection[int], rows: torch.Tensor) -> None:
        """Likewise, of the sums of this machine, of which each goes to another."""


class MeanSink(Protocol):
    """Where this rank's part of the mean goes."""

    def reduced(
        self, gradient: Gradient, mean: torch.Tensor, arriving: Future, lease: Lease | None, *, keep: bool
    ) -> None:
        """Give a local gradient this rank's part of the mean, which may be read when `arriving` is over.
        lease: of device_memory, where it is on the device, to stay.
        """

    def add_mean(self, gradient: Gradient, tensor: torch.Tensor, lease: Lease | None) -> None:
        """Add what a further backward brought to the stored gradient. lease: as for `reduced`."""


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
        bucket_nbytes: int,
    ) -> None:
        """Reduce by `reducers`, with leases of `outgoing_share` for what is on its way. deferred:
        gradients stay local until the step, charged to `kept`. bucket_nbytes: the most bytes of several units
        that are reduced at once.
        """
        self._bucket_nbytes = bucket_nbytes
        self._most_of_unit_nbytes = 0
        """Bytes of an accelerator that the gradients of a unit take at most."""
        self._deferred = deferred
        self._reducers = reducers
        self._lane = lane
        self._device = device
        self._kept = kept
        self._outgoing_share = outgoing_share
        self._buffers = Buffers(outgoing_share.ledger)
        self._local: defaultdict[Unit, dict[int, _Local]] = defaultdict(dict)
        self._complete: dict[Unit, Lease] = {}
        """The open bucket, with leases of its gradients' bytes; see [Note: buckets of gradients]."""
        self._under_way: deque[tuple[Collective, int]] = deque()
        self._further_means: deque[tuple[Gradient, torch.Tensor, Collective, Lease | None]] = deque()
        self._momenta: list[weakref.ref[Momenta]] = []
        self._places: GradientPlaces | None = None
        self._places_lease: Lease | None = None

    def open(self, units: Iterable[Unit]) -> None:
        """Size the buckets, alike on all ranks, when the outgoing share is known: of it a bucket takes three
        times its size, beside an earlier one that is under way. On an accelerator a bucket takes no more than
        the largest of `units`.
        """
        most = min(self._bucket_nbytes, self._outgoing_share.ledger.limit_nbytes // 8)
        if self._device.room is not None:
            units = list(units)
            self._most_of_unit_nbytes = max(map(self.device_nbytes, units), default=0)
            most = min(most, max((one.layout.numel * one.flat.itemsize for one in units), default=0))
        self._bucket_nbytes = self._reducers.ranks.least(most, "size buckets")
        self._places = self._reducers.share_gradients(self._outgoing_share.ledger.limit_nbytes)
        if self._places is not None:
            self._places_lease = self._outgoing_share.lease_anyway(self._places.nbytes)

    def send_momenta_of(self, optimizer: Momenta) -> None:
        """Send what `optimizer` makes of the gradients of those units of which it says so."""
        self._momenta = [one for one in self._momenta if one() not in (None, optimizer)]
        self._momenta.append(weakref.ref(optimizer))

    def _momenta_of(self, unit: Unit, indices: Collection[int]) -> Momenta | None:
        """Return the optimizer whose momenta are sent of parameters of a unit; None for their gradients."""
        alive = (one() for one in self._momenta)
        return next((one for one in alive if one is not None and one.sends(unit, indices)), None)

    def device_nbytes(self, unit: Unit) -> int:
        """Return the bytes that a unit's reduction takes on an accelerator: its gradients, what is sent and
        received, a rank's share of the sum, the mean, and the mean as it leaves, and the number of ranks.
        """
        room = self._device.room
        if room is None:
            return 0
        whole, share = unit.layout.numel * unit.flat.itemsize, 4 * unit.record.shard.numel
        return 3 * room.nbytes(whole) + 3 * room.nbytes(share) + room.nbytes(4)

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
        self._hold(gradient, grad, keep=before is None or before.keep)

    def _hold(self, gradient: Gradient, grad: torch.Tensor, *, keep: bool) -> None:
        """Hold a gradient, or its sum with the one that is held already."""
        room, of_unit, taken = self._device.room, self._local[gradient.unit], 0
        before = of_unit.get(gradient.index)
        if room is not None:
            widens = before is not None and before.values.dtype != torch.float32
            nbytes = 4 * grad.numel() if widens else grad.nbytes if before is None else 0
            taken = room.take(nbytes, f"{gradient.unit.name}: a whole gradient")
        try:
            if before is not None:
                values = total_of(before.values, grad if room is not None else grad.contiguous())
            else:
                values = grad.clone() if room is not None and is_part(grad) else grad.contiguous()
        except BaseException:
            if room is not None:
                room.give_back(taken)
            raise
        if room is None:
            self._charge_host(gradient, values.nbytes)
            of_unit[gradient.index] = _Local(gradient, values, keep)
        elif before is None or widens:
            of_unit[gradient.index] = _Local(gradient, values, keep, taken)
            self._give_back([before] if before is not None else [])

    def _charge_host(self, gradient: Gradient, nbytes: int) -> None:
        """Charge a gradient that stays whole in host memory.

        Raises: HostMemoryError where that has no room.
        """
        if self._deferred and gradient.form is Form.LOCAL and not gradient.charge(nbytes):
            raise HostMemoryError(
                f"{gradient.unit.name}: {format_size(nbytes)} of whole gradients do not fit "
                "host_memory, where stage=1 and no_sync() keep those of all parameters until the step. Use "
                "stage=2 or 3 without no_sync(), or give more host_memory."
            )

    def _give_back(self, local: Iterable[_Local]) -> None:
        """Count the memory of gradients that are used up no more."""
        room = self._device.room
        if room is not None:
            room.give_back(sum(one.taken_nbytes for one in local))

    def complete(self, unit: Unit, into: MeanSink) -> list[Unit]:
        """Take a unit all of whose gradients have come into the open bucket; begin to reduce it when it is
        full. Return the units that are being reduced. Every rank does so at the same point of its step.
        """
        if not self._local.get(unit):
            return []
        nbytes = self._local_nbytes(unit)
        if not unit.record.holders.are_all or nbytes >= self._bucket_nbytes:
            self.reduce([unit], into)
            return [unit]
        closed = list[Unit]()
        if self._open_nbytes() + nbytes > self._bucket_nbytes:
            closed = self.close_bucket(into)
        self._complete[unit] = self._outgoing_share.lease_anyway(nbytes)
        if self._device.room is not None and not self._device.room.fits(self._most_of_unit_nbytes):
            closed += self.close_bucket(into)  # the next unit's gradients would have no room beside it
        return closed

    def has_complete(self, unit: Unit) -> bool:
        """Whether a unit is in the open bucket."""
        return unit in self._complete

    def close_bucket(self, into: MeanSink) -> list[Unit]:
        """Begin to reduce the open bucket; return the units that are in it."""
        units = list(self._complete)
        self.reduce(units, into)
        return units

    def _open_nbytes(self) -> int:
        return sum(map(self._local_nbytes, self._complete))

    def _local_nbytes(self, unit: Unit) -> int:
        wide = any(one.values.dtype == torch.float32 for one in self._local.get(unit, {}).values())
        return unit.layout.numel * (4 if wide else unit.flat.itemsize)

    def reduce(self, units: Iterable[Unit], into: MeanSink) -> None:
        """Begin to reduce local gradients of units, those of the same type in one collective. Every rank does
        so at the same point of its step.
        """
        together: dict[tuple[CollectiveLane, torch.dtype, Momenta | None], dict[Unit, dict[int, _Local]]] = {}
        locals_ = {unit: self._local.pop(unit, {}) for unit in units}
        for unit, local in locals_.items():
            taken = {index: one for index, one in sorted(local.items()) if one.gradient.is_current}
            if taken:
                wide = any(one.values.dtype == torch.float32 for one in taken.values())
                dtype = torch.float32 if wide else unit.flat.dtype
                key = self._reducers.reduces(unit), dtype, self._momenta_of(unit, taken)
                together.setdefault(key, {})[unit] = taken
        for (lane, dtype, momenta), bucket in together.items():
            self._reduce_bucket(bucket, dtype, lane, into, momenta)
        for unit, local in locals_.items():
            self._give_back(local.values())
            if (lease := self._complete.pop(unit, None)) is not None:
                lease.end()
        self._add_means(into)

    def _reduce_bucket(
        self,
        bucket: dict[Unit, dict[int, _Local]],
        dtype: torch.dtype,
        lane: CollectiveLane,
        into: MeanSink,
        momenta: Momenta | None,
    ) -> None:
        begin = self._begin if momenta is None else partial(self._begin_momenta, momenta)
        there: dict[Unit, tuple[torch.Tensor, list[Lease]]] = {}
        for unit, taken in bucket.items():
            if (found := self._mean_on_device(unit, dtype, len(taken))) is not None:
                there[unit] = found
        job, means = begin(bucket, dtype, lane, {unit: mean for unit, (mean, _) in there.items()})
        for (unit, taken), mean in zip(bucket.items(), means, strict=True):
            leases: Sequence[Lease | None] = there[unit][1] if unit in there else [None] * len(taken)
            for (index, one), lease in zip(taken.items(), leases, strict=True):
                segment = unit.record.shard.segments[index]
                self._deliver(one, mean[segment.start : segment.stop], job, lease, into)

    def _mean_on_device(
        self, unit: Unit, dtype: torch.dtype, gradients: int
    ) -> tuple[torch.Tensor, list[Lease]] | None:
        """Return memory on the device for this rank's part of a mean, where the unit's record lives there and
        there is room, alike on all ranks; and a lease of it for each of its gradients.
        """
        room, numel = self._device.room, unit.record.shard.numel
        if room is None or not unit.record.on_device or not room.fits(numel * dtype.itemsize):
            return None
        taken = room.take(numel * dtype.itemsize, f"{unit.name}: a mean of gradients that stays")
        leases = leases_of(room.ledger, taken, gradients)
        mean = torch.empty(numel, dtype=dtype, device=self._device.torch_device)
        self._device.allocated(mean)
        return mean, leases

    def _deliver(
        self, one: _Local, mean: torch.Tensor, job: Collective, lease: Lease | None, into: MeanSink
    ) -> None:
        if one.gradient.form is Form.LOCAL:
            one.gradient.charge(0)
            into.reduced(one.gradient, mean, job, lease, keep=one.keep)
        else:
            self._further_means.append((one.gradient, mean, job, lease))

    def _begin(
        self,
        bucket: dict[Unit, dict[int, _Local]],
        dtype: torch.dtype,
        lane: CollectiveLane,
        there: dict[Unit, torch.Tensor],
    ) -> tuple[Collective, list[torch.Tensor]]:
        """Queue the reduction of some units; return it, and where each unit's mean will be: on the device
        that of those `there`.
        """
        shares = [unit.record.shard.numel for unit in bucket]
        numel = sum(unit.layout.numel for unit in bucket)
        names, room = (
            "; ".join(_said(unit, taken, dtype) for unit, taken in bucket.items()),
            self._device.room,
        )
        size = len(next(iter(bucket)).record.holders.members)
        coding = self._reducers.coding if size > 1 else None
        of_host = sum(share for unit, share in zip(bucket, shares, strict=True) if unit not in there)
        places = self._places if coding is None and next(iter(bucket)).record.holders.are_all else None
        copies = 1 if places is not None else 2  # what comes from others lies in places
        nbytes = (copies * numel if room is None else of_host) * dtype.itemsize
        of_sent = dtype if coding is None or not coding.feeds_back else torch.float32
        if coding is not None:
            nbytes = numel * of_sent.itemsize + 2 * size * coding.row_nbytes(shares)
        hops = _hops_of_sums(lane, coding)
        if coding is not None and hops is not None:
            nbytes = numel * of_sent.itemsize + beside_nbytes(coding, hops, shares)
        lease = self._lease(nbytes)
        # What is sent and received, of this rank's share the sum, the mean, and its copy, and a number.
        whole = numel * dtype.itemsize
        parts = (whole, whole, *[4 * sum(shares)] * 3, 4) if room is not None else ()
        taken_nbytes = room.take_all(parts, f"{names}: a reduction") if room is not None else 0
        on_host = self._device.is_host
        place = self._device.torch_device
        sent = (
            self._buffers.take(numel, of_sent) if on_host else torch.zeros(numel, dtype=dtype, device=place)
        )
        if not on_host:
            self._device.allocated(sent)
        rows, start = sent.view(size, sum(shares)), 0
        for (unit, taken), share in zip(bucket.items(), shares, strict=True):
            pack = _pack if on_host else _pack_on_device
            pack(unit, {index: one.values for index, one in taken.items()}, rows[:, start : start + share])
            if coding is not None and coding.feeds_back:
                self._reducers.feed_back(unit, taken, rows[:, start : start + share])
            start += share
        if not on_host:
            self._device.assembled(sent)
        take_mean = self._buffers.take if on_host else self._device.take_host_buffer
        pairs = zip(bucket, shares, strict=True)
        means = [there[unit] if unit in there else take_mean(share, dtype) for unit, share in pairs]
        allocate = self._buffers.take if on_host else partial(_on_device, place)
        if coding is not None and hops is not None:
            feed = partial(self._feed_sums, bucket)
            of_lanes = allocate, lease, self._lane, lane
            hop = reduce_in_hops(names, sent, means, *of_lanes, coding, hops, feed)
            self._under_way.append((hop, nbytes))
            return hop, means
        given = means, allocate, lease, self._lane, self._device, self._reducers.ranks.size
        job = _reducing(names, sent, given, coding, places)
        lane.submit(job)
        if room is not None:
            room.leaves(taken_nbytes, job)
        self._under_way.append((job, nbytes))
        return job, means

    def _feed_sums(self, bucket: dict[Unit, dict[int, _Local]], sums: torch.Tensor) -> None:
        """Add to the sums of a machine what the second hop left out of those before."""
        start = 0
        for unit, taken in bucket.items():
            share = unit.record.shard.numel
            self._reducers.feed_back_sums(unit, taken, sums[:, start : start + share])
            start += share

    def _begin_momenta(
        self,
        optimizer: Momenta,
        bucket: dict[Unit, dict[int, _Local]],
        dtype: torch.dtype,
        lane: CollectiveLane,
        _there: dict[Unit, torch.Tensor],
    ) -> tuple[Collective, list[torch.Tensor]]:
        """Like `_begin`, of the momenta that an optimizer makes of the gradients, which are on no device."""
        shares = [unit.record.shard.numel for unit in bucket]
        numel = sum(unit.layout.numel for unit in bucket)
        names = "; ".join(_said(unit, taken, dtype) for unit, taken in bucket.items())
        nbytes = numel * (2 * dtype.itemsize + 1)
        lease = self._lease(nbytes)
        sent, start = self._buffers.take(numel, dtype), 0
        rows = sent.view(self._reducers.ranks.size, sum(shares))
        for (unit, taken), share in zip(bucket.items(), shares, strict=True):
            optimizer.check(unit, [one.gradient for one in taken.values()])
            values = {index: one.values for index, one in taken.items()}
            _pack(unit, values, rows[:, start : start + share])
            start += share
        means = [self._buffers.take(share, torch.float32) for share in shares]
        betas = {unit: optimizer.betas(unit, taken) for unit, taken in bucket.items()}
        job = reduce_momenta(names, betas, sent, means, self._buffers.take, lease, self._lane, lane)
        self._under_way.append((job, nbytes))
        return job, means

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
            gradient, mean, job, lease = self._further_means.popleft()
            self._outgoing_share.stall(job)
            into.add_mean(gradient, mean, lease)

    def settle(self, units: Iterable[Unit], into: MeanSink) -> None:
        """Reduce what is local of `units`, and return when every mean has come and been added."""
        bucket: list[Unit] = []
        nbytes = 0
        for unit in units:
            if not self._local.get(unit):
                continue
            more = self._local_nbytes(unit)
            if bucket and nbytes + more > self._bucket_nbytes:
                self.reduce(bucket, into)
                bucket, nbytes = [], 0
            bucket.append(unit)
            nbytes += more
        self.reduce(bucket, into)
        self._add_means(into, wait=True)


def _reducing(
    names: str,
    sent: torch.Tensor,
    given: tuple[Sequence[torch.Tensor], Allocate, Lease, StreamLane, Device, int],
    coding: Coding | None,
    places: GradientPlaces | None,
) -> Reducing:
    if coding is not None:
        return CodedReducing(names, sent, *given, coding)
    if places is not None:
        return MachineReducing(names, sent, *given, places)
    return Reducing(names, sent, *given)


def _hops_of_sums(lane: CollectiveLane, coding: Coding | None) -> RankGrid | None:
    """Return how ranks lie on several machines, where what these code of their sums is fed back."""
    feeds = coding is not None and coding.feeds_back and lane.crossed_nbytes is not None
    return lane.ranks.grid if feeds else None


def _zeros(device: torch.device, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def _on_device(device: torch.device, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _said(unit: Unit, grads: Iterable[int], dtype: torch.dtype) -> str:
    return f"{unit.name} ({', '.join(map(str, grads))} of {len(unit.parameters)}, {str(dtype)[6:]})"


def _spans(first: int, end: int, share: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield where elements of a unit from `first` to `end` lie: the rank, the elements of its share, and
    which of the unit's these are.
    """
    while first < end:
        rank, offset = divmod(first, share)
        numel = min(share - offset, end - first)
        yield rank, slice(offset, offset + numel), slice(first, first + numel)
        first += numel


def _pack(unit: Unit, grads: dict[int, torch.Tensor], rows: torch.Tensor) -> None:
    """Lay gradients out as the unit is, each rank's share in its row of `rows`, zeros where there is none."""
    share, end = rows.shape[1], 0
    for index, segment in enumerate(unit.layout.segments):
        grad = grads.get(index)
        if grad is None:
            continue
        _zero(rows, end, segment.start)
        flat = grad.view(-1)
        for rank, of_row, of_unit in _spans(segment.start, segment.stop, share):
            numel, to = of_row.stop - of_row.start, rows[rank, of_row].data_ptr()
            given = flat[of_unit.start - segment.start :].data_ptr()
            if grad.dtype == rows.dtype:
                kernels.copy(numel * rows.element_size(), to, given)
            else:
                WIDEN[grad.dtype](numel, given, to)
        end = segment.stop
    _zero(rows, end, unit.layout.numel)


def _zero(rows: torch.Tensor, first: int, end: int) -> None:
    for rank, of_row, _ in _spans(first, end, rows.shape[1]):
        rows[rank, of_row].zero_()


def _pack_on_device(unit: Unit, grads: dict[int, torch.Tensor], rows: torch.Tensor) -> None:
    """Like `_pack`, into zeros."""
    for index, grad in grads.items():
        segment = unit.layout.segments[index]
        flat = grad.view(-1)
        for rank, of_row, of_unit in _spans(segment.start, segment.stop, rows.shape[1]):
            begin = of_unit.start - segment.start
            rows[rank, of_row].copy_(flat[begin : begin + of_unit.stop - of_unit.start])

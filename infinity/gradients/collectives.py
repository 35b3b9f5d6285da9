"""The lanes on which ranks exchange what they hold: units are assembled, gradients summed.

A collective is queued by the thread that computes, in the order that all ranks share, and runs on a thread
of its own as soon as its inputs are there: so units of later uses are assembled, and gradients summed,
while computing goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from infinity import kernels
from infinity.device.device import Device
from infinity.lane.fetch import FetchTarget
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import Lease, OutgoingShare
from infinity.planning.queue import Job
from infinity.ranks.agreed import AgreedOrder, Agreement
from infinity.ranks.group import Channel, Ranks
from infinity.ranks.waiting import brief
from infinity.records.weights import ACCUMULATE, NARROW, WIDEN
from infinity.timeline import Timeline
from infinity.units.unit import Unit

logger = logging.getLogger("infinity")

_CLOSE_S = 30.0

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""Gives memory for so many elements of a type."""


class Collective(Job, ABC):
    """One collective, queued."""

    kind = ""
    """What its bytes count as: "gather", "reduce" or "read"."""

    def __init__(self, what: str, lane: StreamLane) -> None:
        """Name what every rank does at once. `lane`: its lock guards this, and its failure ends the wait."""
        super().__init__(lane)
        self.what = what
        self.nbytes = 0
        """Bytes of what is exchanged, whole."""
        self.count = 1
        """As how many collectives it counts."""

    def end(self) -> None:
        """It is over."""
        self.done = True

    def ready(self) -> None:
        """Return when what this rank gives is there. Called on the lane's thread."""

    @abstractmethod
    def run(self, channel: Channel) -> None:
        """Move the bytes. Called on the lane's thread."""


@dataclass(frozen=True)
class _Beginning:
    """Stands in the queue where a step begins. plan: see AgreedOrder.begin."""

    plan: int | None


class CollectiveLane:
    """Runs collectives in the order in which they come, on a thread of its own."""

    def __init__(
        self, name: str, channel: Channel, lane: StreamLane, device: Device, timeline: Timeline
    ) -> None:
        """Start the thread; `lane` is told of failures, and its failure is this one's."""
        self.nbytes: Counter[str] = Counter()
        """Bytes exchanged, or about to be, by kind of collective."""
        self.counts: Counter[str] = Counter()
        """Collectives, by kind; and agreements before them, as "agree"."""
        self.chain = 0
        """A hash of all that was queued, in its order."""
        self._order = AgreedOrder()
        self._name = name
        self._device = device
        self._channel = channel
        self._lane = lane
        self._timeline = timeline
        self._queue: deque[Collective | _Beginning] = deque()
        self._coming = threading.Condition(lane.lock)
        """Notified when something is queued, and when the lane fails: not by passes, as the lane's own."""
        lane.tell_failure(self._coming)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"infinity-{name}", daemon=True)
        self._thread.start()

    @property
    def ranks(self) -> Ranks:
        """Those that it connects."""
        return self._channel.ranks

    @property
    def crossed_nbytes(self) -> int | None:
        """Bytes that this rank has sent to other machines; None where nothing goes in two hops."""
        return None if self._channel.hops is None else self._channel.crossed_nbytes

    def submit(self, job: Collective) -> None:
        """Queue a collective. Every rank does so, in the same order."""
        with self._lane.lock:
            self._queue.append(job)
            self.nbytes[job.kind] += job.nbytes
            self.counts[job.kind] += job.count
            self.chain = xxhash.xxh3_64_intdigest(job.what.encode(), self.chain)
            self._coming.notify_all()

    def begin_step(self, plan: int | None) -> None:
        """Note that a step begins behind what was queued; see AgreedOrder.begin."""
        with self._lane.lock:
            self._queue.append(_Beginning(plan))
            self._coming.notify_all()

    def _run(self) -> None:
        try:
            self._device.enter_thread()
            while self._turn():
                pass  # with nothing in this frame: see ending's note
            if self._lane.failure is not None:
                self._channel.ranks.post_failure(_reason(self._lane.failure))
        except BaseException as error:
            self._channel.ranks.post_failure(_reason(error))
            logger.debug("%s stops", self._name, exc_info=error)
            self._lane.fail(error, raised=False)

    def _next(self) -> Collective | None:
        """Return the next collective; None when it is time to stop."""
        with self._lane.lock:
            while self._lane.failure is None:
                while self._queue:
                    first = self._queue.popleft()
                    if isinstance(first, Collective):
                        return first
                    if self._channel.foresees:
                        self._order.begin(first.plan)
                if self._stopping:
                    return None
                self._coming.wait(0.5)
            return None

    def _turn(self) -> bool:
        """Run the next collective; False when it is time to stop."""
        job = self._next()
        if job is None:
            return False
        job.ready()
        began_s = time.perf_counter()
        self._exchange(job)
        self._timeline.span(self._name, brief(job.what), began_s, time.perf_counter(), job.nbytes)
        with self._lane.lock:
            job.end()
            self._lane.changed.notify_all()
        return True

    def _exchange(self, job: Collective) -> None:
        agreement, place = self._order.come(job.what), self._order.place
        if agreement is Agreement.FORESEEN:
            with self._channel.foreseen(job.what, place, self._order.begun_at):
                job.run(self._channel)
            return
        self.counts["agree"] += 1
        if agreement is Agreement.ASK_ALOUD:
            self._channel.agree_aloud(job.what, place)
        else:
            self._channel.agree(job.what)
        job.run(self._channel)

    def close(self) -> None:
        """Stop after the collectives that are queued: other ranks may wait for them. They end soon, as those
        come to them too, or their ends of the connections close. A thread left in one would take the
        interpreter down with it at its exit.
        """
        with self._lane.lock:
            self._stopping = True
            self._coming.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class Assembly(Job):
    """One unit of a `Gathering`, which is queued when it is full, or when a unit of it is called for."""

    def __init__(
        self,
        unit: Unit,
        local: Job,
        lane: StreamLane,
        called_for: Callable[[Assembly], None],
        aside: FetchTarget | None = None,
    ) -> None:
        """Assemble `unit` in the memory it has now, into which `local` brings this rank's share, unless it
        brings it `aside`. called_for: called when somebody waits for it.
        """
        super().__init__(lane)
        self.name, self.index, self.local = unit.name, unit.index, local
        self._flat: torch.Tensor | None = unit.flat
        self._part = unit.part_of_rank if aside is None else aside.flat
        self.aside = aside
        """Where the share is brought, if not to the unit's memory; None once it is over."""
        self.layout = unit.record.shard
        """How parameters lie in the share."""
        self._called_for: Callable[[Assembly], None] | None = called_for
        self.nbytes = unit.flat.nbytes

    @property
    def finished(self) -> bool:
        """Whether it is over, and the fetch's writes as well."""
        return self.done and self.local.finished

    @property
    def slot_wait_s(self) -> float:
        """See Job."""
        return self.local.slot_wait_s

    def called_for(self) -> None:
        """See Job."""
        if (call := self._called_for) is not None:
            call(self)

    def queued(self) -> None:
        """The collective is queued, which need not be asked for."""
        self._called_for = None

    def coded_nbytes(self, share_nbytes: Callable[[int], int]) -> int:
        """Return the bytes of all ranks' shares; a share of so many elements takes `share_nbytes`."""
        numel = self._part.numel()
        return 0 if self._flat is None or not numel else self._flat.numel() // numel * share_nbytes(numel)

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the unit's memory, and this rank's share of it, once; None for a unit without elements."""
        flat, part = self._flat, self._part
        self._flat, self._part = None, torch.empty(0, device="cpu")
        return None if flat is None or not flat.numel() else (flat, part)

    def end(self) -> None:
        """The values are there."""
        self.done, self.aside = True, None


class Gathering(Collective):
    """Units are assembled from every rank's share, as soon as this rank's have been fetched.

    Where the CPU computes, the shares of several units are put one behind the other first, and the units are
    copied from what comes: one collective. On an accelerator each unit is gathered where it lies, one after
    the other, and the ranks agree on all of them at once.
    """

    kind = "gather"

    def __init__(
        self,
        assemblies: Sequence[Assembly],
        lane: StreamLane,
        device: Device,
        beside: OutgoingShare | None,
    ) -> None:
        """Assemble units. beside: has the memory that this takes beside theirs, while it runs; None: they are
        gathered where they lie.
        """
        super().__init__(f"assemble {'; '.join(one.name for one in assemblies)}", lane)
        self._assemblies, self._device, self._beside = assemblies, device, beside
        self.nbytes = sum(one.nbytes for one in assemblies)
        self.count = 1 if beside is not None else len(assemblies)

    def ready(self) -> None:
        """Wait for the fetches."""
        for one in self._assemblies:
            one.local.wait()

    def run(self, channel: Channel) -> None:
        """All-gather."""
        taken = [pair for one in self._assemblies if (pair := one.take()) is not None]
        for flat, _ in taken:
            self._device.arrived(flat)
        if self._beside is None:
            for flat, part in taken:
                channel.gather(flat, part, self.what)
                self._device.assembled(flat)
            return
        beside, self._beside = self._beside, None
        lease = beside.lease_anyway(
            sum(
                flat.nbytes + part.nbytes + part.itemsize * channel.gather_beside_numel(part.numel())
                for flat, part in taken
            )
        )
        for dtype in dict.fromkeys(flat.dtype for flat, _ in taken):
            of_type = [pair for pair in taken if pair[0].dtype == dtype]
            _gather_together(of_type, channel, self.what, beside.buffers.take)
        lease.end()

    def end(self) -> None:
        """The values of all are there."""
        super().end()
        for one in self._assemblies:
            one.end()


def _gather_together(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], channel: Channel, what: str, allocate: Allocate
) -> None:
    """Fill units in host memory, all of one type, from every rank's shares of them. The copies are not
    torch's: what torch changes counts as a change of the weights.
    """
    dtype, width = pairs[0][0].dtype, pairs[0][0].element_size()
    numels = [part.numel() for _, part in pairs]
    sent, rows = allocate(sum(numels), dtype), allocate(channel.ranks.size * sum(numels), dtype)
    starts = [sum(numels[:number]) for number in range(len(numels))]
    for (_, part), start in zip(pairs, starts, strict=True):
        kernels.copy(part.nbytes, sent.data_ptr() + width * start, part.data_ptr())
    numel = channel.gather_beside_numel(sent.numel())
    channel.gather(rows, sent, what, allocate(numel, dtype) if numel else None)
    for (flat, part), start in zip(pairs, starts, strict=True):
        for rank in range(channel.ranks.size):
            came = rows.data_ptr() + width * (rank * sum(numels) + start)
            kernels.copy(part.nbytes, flat.data_ptr() + rank * part.nbytes, came)


class Collecting(Collective):
    """The ranks' parts of one tensor in host memory are put together, on every rank."""

    kind = "read"

    def __init__(self, what: str, part: torch.Tensor, numels: Sequence[int], lane: StreamLane) -> None:
        """part: this rank's, one-dimensional; numels: elements of every rank's part."""
        super().__init__(f"read {what}", lane)
        self._part, self._numels = part, numels
        self.nbytes = len(numels) * max(numels) * part.element_size()
        self.whole = part
        """All of it, when it is over."""

    def run(self, channel: Channel) -> None:
        """All-gather, each part as long as the longest."""
        most = max(self._numels)
        padded = self._part.new_empty(most)
        padded[: len(self._part)] = self._part
        rows = padded.new_empty(len(self._numels) * most)
        if most:
            channel.gather(rows, padded, self.what)
        self.whole = torch.cat(
            [row[:numel] for row, numel in zip(rows.view(len(self._numels), -1), self._numels, strict=True)]
        )


class Spreading(Collective):
    """A unit of which some ranks alone have parts is given to all, by the first of these."""

    kind = "read"

    def __init__(self, unit: Unit, lane: StreamLane, device: Device) -> None:
        """Fill the memory that `unit` has now, on the ranks that have no part."""
        super().__init__(f"spread {unit.name}", lane)
        self._flat, self._root, self._device = unit.flat, unit.record.holders.first, device
        self.nbytes = unit.flat.nbytes

    def run(self, channel: Channel) -> None:
        """Broadcast."""
        flat, self._flat = self._flat, torch.empty(0, device="cpu")
        if flat.numel():
            self._device.arrived(flat)
            channel.spread(flat, self._root, self.what)
            self._device.assembled(flat)


class Reducing(Collective):
    """Gradients of some units: every rank gets the mean over all ranks of the elements that it holds.

    The ranks exchange what they have in its own type, and each sums what it gets in fp32, in the order of
    ranks, divides once, and rounds once: so the bits depend on the number of ranks alone, not on the library
    or the network. On several machines that happens within each first: see [Note: two hops] in group.py. The
    gradient of an expert that some ranks have is a sum over the tokens of all: these ranks add theirs up, and
    divide by the number of all ranks, as of everything else.
    """

    kind = "reduce"

    def __init__(
        self,
        what: str,
        sent: torch.Tensor,
        means: Sequence[torch.Tensor],
        allocate: Allocate,
        lease: Lease,
        lane: StreamLane,
        device: Device,
        count: int,
    ) -> None:
        """sent: this rank's gradients of the whole units, 16-bit or fp32: first, of each unit, the share of
        rank 0, then those of rank 1, and so on; means: for this rank's share of the mean of each unit, of the
        same type, in host memory, or on the device, where it is when this is done; allocate: gives memory
        beside `sent`, for what comes; lease: of the memory that it works in. count: ranks, by which the sum
        is divided. A gradient keeps this, and so what this keeps; see gradient's note.
        """
        super().__init__(f"reduce {what}", lane)
        self._sent: torch.Tensor | None = sent
        self._means, self._allocate = means, allocate
        self._device = device
        self._lease, self._count = lease, count
        self.nbytes = sent.nbytes

    def run(self, channel: Channel) -> None:
        """All-to-all, and the sum."""
        if self._sent is not None and self._sent.numel():
            self._device.arrived(self._sent)
            rows = self._exchanged(channel, self._sent)
            self._device.leaving(self._sent)
            self._sent = None  # no frame has it any more: sums take memory of their own
            self._add_up(rows)
        self._sent, self._means = None, ()
        self._lease.end()

    def _exchanged(self, channel: Channel, sent: torch.Tensor) -> torch.Tensor:
        """Return rows of this rank's share, to be added up: of each rank, or the sums of each machine."""
        if channel.hops is None:
            received = self._allocate(sent.numel(), sent.dtype)
            channel.exchange(received, sent, self.what)
            return received.view(channel.ranks.size, -1)
        grid = channel.hops.grid
        sums = sums_within(channel, sent, self._allocate, self.what)
        received = self._allocate(sums.numel(), sums.dtype)
        channel.exchange_in_hop(received, sums, self.what, between_machines=True)
        return received.view(grid.machines, -1)

    def _add_up(self, rows: torch.Tensor) -> None:
        """Fill the means from what has come."""
        start = 0
        there = [mean for mean in self._means if not self._device.is_host and mean.device.type != "cpu"]
        for mean in there:
            self._device.arrived(mean)
        for mean in self._means:
            _mean_of_ranks(rows[:, start : start + mean.numel()], mean, self._count)
            start += mean.numel()
        if there:
            self._device.finish_thread()


def sums_within(channel: Channel, sent: torch.Tensor, allocate: Allocate, what: str) -> torch.Tensor:
    """Return the sums over the ranks of this machine, for each machine, of the share of its rank of this
    one's number. sent: see Reducing. Both buffers of the second hop take no more than that of a single hop.
    """
    if channel.hops is None:
        raise AssertionError(f"{what}: expected ranks on several machines, got {channel.ranks.grid}")
    grid = channel.hops.grid
    numel = sent.numel() // grid.size
    sums, came = (allocate(count * numel, sent.dtype) for count in (grid.machines, grid.ranks))
    for total, part in zip(sums.view(grid.machines, -1), sent.view(grid.machines, -1), strict=True):
        channel.exchange_in_hop(came, part, what, between_machines=False)
        _mean_of_ranks(came.view(grid.ranks, -1), total, 1)
    return sums


def _mean_of_ranks(rows: torch.Tensor, mean: torch.Tensor, ranks: int) -> None:
    """Put the sum of `rows`, in fp32 from the first to the last, divided by `ranks`, into `mean`, of their
    type.
    """
    if rows.device.type != "cpu":
        sum_of_rows = rows[0].float()
        for row in rows[1:]:
            sum_of_rows += row
        count = torch.full((), float(ranks), device=rows.device)  # by a number, CUDA multiplies instead
        mean.copy_(sum_of_rows / count)  # waits for this thread's stream alone
        return
    mean_at([row.data_ptr() for row in rows], rows.dtype, mean, ranks)


def mean_at(rows: Sequence[int], dtype: torch.dtype, mean: torch.Tensor, ranks: int) -> None:
    """Likewise of rows of `dtype` at these addresses of host memory, as long as the mean, which is there."""
    numel = mean.numel()
    total = mean if mean.dtype == torch.float32 else torch.empty(numel, dtype=torch.float32, device="cpu")
    WIDEN[dtype](numel, rows[0], total.data_ptr())
    for row in rows[1:]:
        ACCUMULATE[dtype](numel, total.data_ptr(), row)
    values = total.numpy()
    np.divide(values, np.float32(ranks), out=values)
    if total is not mean:
        NARROW[mean.dtype](numel, total.data_ptr(), mean.data_ptr())

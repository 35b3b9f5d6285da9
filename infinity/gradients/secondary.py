"""Second copies of 16-bit weights, in parts over a few neighbours among the ranks: ZeRO++'s hpZ.

[Note: secondary shards]
A unit is assembled from the shares of all ranks, once for each of its versions. Each rank then keeps its part
of what has come, of as many parts as its group of neighbours has ranks: those of its machine. Where it keeps
it, second_parts says. Until the values change (`Unit.version` counts that, on all ranks at the same place of
the program), the unit is assembled from these parts, in the backward, by recomputation, in the next
micro-batch: nothing of it crosses between machines, and nothing of it is read from its record.

A part is filled by the collective that assembles the unit, and sent by a later one of the same lane: so it is
there, although the thread that computes has not waited for either. What one bucket holds is assembled from
all ranks, or from neighbours: the open one of the other kind is closed first, so the order is the program's.

Of weights that are sent coded the parts are what has been decoded: exactly what ranks compute with.
`gathered` has a unit as its record has it, and goes around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from infinity.device.device import Device
from infinity.errors import HostMemoryError
from infinity.gradients.coding import Coding
from infinity.gradients.collectives import Assembly, Collective, CollectiveLane, Gathering
from infinity.gradients.gather_buckets import GatherBuckets
from infinity.gradients.second_parts import HostPart, PartPlace, SecondPart, StoredParts
from infinity.lane.fetch import FetchTarget
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import OutgoingShare
from infinity.planning.queue import Job
from infinity.ranks.group import Channel, Ranks
from infinity.records.record import Record
from infinity.records.updates import PendingUpdates
from infinity.sizes import format_size, round_up
from infinity.storage.store import HostStore, Store
from infinity.units.unit import Unit

_ALIGN = 64
"""Bytes: a part begins on a line of the caches."""


class _Part:
    """Where this rank's part of a unit is that neighbours assemble. A lane.fetch.FetchTarget."""

    base, framed = 0, False

    def __init__(self, unit: Unit, place: PartPlace) -> None:
        self.record: Record = unit.record
        self.pending: PendingUpdates = unit.pending
        self.flat, self._place = place.flat, place


_Filled = tuple[PartPlace, torch.Tensor]
"""Where a part goes, and the memory of its unit."""


class Keeping(Collective):
    """Units are assembled from the shares of all ranks, and their secondary shards are filled."""

    kind = "gather"

    def __init__(self, inner: Collective, kept: list[_Filled], lane: StreamLane) -> None:
        """inner: assembles them; kept: for each, where its part goes, and the memory that it comes to."""
        super().__init__(inner.what, lane)
        self._inner, self._kept = inner, kept
        self.nbytes, self.count = inner.nbytes, inner.count

    def ready(self) -> None:
        """See Collective."""
        self._inner.ready()

    def run(self, channel: Channel) -> None:
        """Assemble, and copy."""
        kept, self._kept = self._kept, []
        self._inner.run(channel)
        for place, whole in kept:
            place.keep(whole)

    def end(self) -> None:
        """The values of all are there."""
        super().end()
        self._inner.end()


class _Neighbours:
    """The side of a channel that goes to the neighbours alone, as a Gathering uses one."""

    def __init__(self, channel: Channel, size: int) -> None:
        self._channel, self.size = channel, size
        self.ranks = self

    def gather(
        self, whole: torch.Tensor, part: torch.Tensor, what: str, _beside: torch.Tensor | None = None
    ) -> None:
        """Fill `whole` with the parts of the neighbours."""
        self._channel.gather_near(whole, part, what)

    def gather_beside_numel(self, _numel: int) -> int:
        """It goes in one hop."""
        return 0


class NearGathering(Gathering):
    """Units are assembled from the secondary shards of this rank's neighbours."""

    kind = "gather near"

    def __init__(
        self,
        assemblies: Sequence[Assembly],
        lane: StreamLane,
        device: Device,
        beside: OutgoingShare | None,
        near: int,
    ) -> None:
        """near: neighbours; all else as for Gathering."""
        super().__init__(assemblies, lane, device, beside)
        self.what = f"assemble again {self.what.removeprefix('assemble ')}"
        self._near = near

    def run(self, channel: Channel) -> None:
        """All-gather within the group."""
        neighbours: Any = _Neighbours(channel, self._near)
        super().run(neighbours)


class NearBuckets(GatherBuckets):
    """Buckets of units that are assembled from the neighbours' secondary shards."""

    def __init__(
        self, lane: StreamLane, device: Device, outgoing_share: OutgoingShare, bucket_nbytes: int, near: int
    ) -> None:
        """near: neighbours; all else as for GatherBuckets."""
        super().__init__(lane, device, outgoing_share, bucket_nbytes)
        self._near = near

    def again(self, unit: Unit, part: SecondPart, gathers: CollectiveLane) -> Job:
        """Put a unit that has memory into the open bucket."""
        job, place = part.read()
        return self.assemble(unit, job or Job(self._lane, done=True), gathers, _Part(unit, place))

    def _gathering(
        self, assemblies: list[Assembly], gathers: CollectiveLane, *, exact: bool = False
    ) -> Collective:
        for one in assemblies:
            one.queued()
        beside = self._outgoing_share if len(assemblies) > 1 else None
        return NearGathering(assemblies, self._lane, self._device, beside, self._near)


class SecondaryBuckets(GatherBuckets):
    """Buckets of units, and the secondary shards that they fill: see [Note: secondary shards]. Used by the
    thread that computes.
    """

    def __init__(
        self,
        lane: StreamLane,
        device: Device,
        outgoing_share: OutgoingShare,
        bucket_nbytes: int,
        coding: Coding | None,
        near: int,
    ) -> None:
        """near: how many neighbours assemble a unit again; all else as for GatherBuckets."""
        super().__init__(lane, device, outgoing_share, bucket_nbytes, coding)
        self.near = near
        self._again = NearBuckets(lane, device, outgoing_share, bucket_nbytes, near)
        self._parts: dict[int, SecondPart] = {}
        self._filling: dict[int, tuple[SecondPart, PartPlace, torch.Tensor]] = {}
        self._stored: StoredParts | None = None
        self.nbytes = 0
        """Bytes of host memory that the parts take."""
        self.stored_nbytes = 0
        """Bytes of the parts that lie on NVMe."""

    def open(
        self,
        units: Sequence[Unit],
        ranks: Ranks,
        store: HostStore,
        least_total: Callable[..., int],
        nvme: Store | None,
        record_of: Callable[..., Record],
    ) -> None:
        """Make room for the parts of the units of a finished model: in `store` as far as that has some, for
        the first units first, as each is read as often for its bytes; else on NVMe, where there is some, in
        records that `record_of` makes. least_total: gives the host_memory that has room for so many bytes
        more.

        Raises: HostMemoryError, with the numbers, where there is no NVMe; aio.StorageFullError where that is
        full.
        """
        units = [unit for unit in units if unit.resident_nbytes]
        sizes = [round_up(unit.resident_nbytes // self.near, _ALIGN) for unit in units]
        free = store.ledger.free_nbytes
        fit = sum(total <= free for total in accumulate(sizes))
        if fit < len(units) and nvme is None:
            works, ledger = least_total(more_nbytes=sum(sizes)), store.ledger
            raise HostMemoryError(
                f"secondary_shard: each rank keeps 1/{self.near} of the weights of {len(units)} modules "
                f"as they compute, {format_size(sum(sizes))}, and host_memory has "
                f"{format_size(max(ledger.free_nbytes, 0))} of {format_size(ledger.limit_nbytes)} "
                f"left for that. host_memory={format_size(works)} works; or a folder on NVMe (nvme=...); or "
                "leave secondary_shard out"
            )
        self.nbytes, self.stored_nbytes = sum(sizes[:fit]), sum(sizes[fit:])
        if nvme is not None:
            self._stored = StoredParts(self._lane, self._device, self._outgoing_share, nvme, record_of)
        extent = store.allocate(self.nbytes, "secondary_shard") if self.nbytes else None
        memory, start, number = (
            store.memory(extent) if extent is not None else None,
            0,
            ranks.rank % self.near,
        )
        for place, (unit, size) in enumerate(zip(units, sizes, strict=True)):
            numel = unit.layout.numel // self.near
            if place >= fit and self._stored is not None:
                self._parts[unit.index] = self._stored.new(unit, numel, number)
            elif memory is not None:
                flat = torch.frombuffer(memory, dtype=unit.flat.dtype, count=numel, offset=start)
                self._parts[unit.index] = HostPart(flat, number)
                start += size

    def again(self, unit: Unit, gathers: CollectiveLane) -> Job | None:
        """Begin to assemble a unit from the neighbours' parts; None where these are of other values."""
        part = self._parts.get(unit.index)
        if part is None or unit.pending or part.version != unit.version:
            return None
        super().close()
        self._settle()
        return self._again.again(unit, part, gathers)

    def _settle(self) -> None:
        if self._stored is not None:
            self._stored.settle()

    def size(self, window_nbytes: int) -> None:
        """See GatherBuckets."""
        super().size(window_nbytes)
        self._again.size(window_nbytes)

    def begin_step(self) -> None:
        """See GatherBuckets."""
        super().begin_step()
        self._again.begin_step()

    def assemble(
        self, unit: Unit, job: Job, gathers: CollectiveLane, aside: FetchTarget | None = None
    ) -> Job:
        """See GatherBuckets."""
        self._again.close()
        self._fill(unit)
        return super().assemble(unit, job, gathers, aside)

    def alone(
        self,
        unit: Unit,
        job: Job,
        gathers: CollectiveLane,
        aside: FetchTarget | None = None,
        *,
        exact: bool = False,
    ) -> Job:
        """See GatherBuckets."""
        self._again.close()
        if not (exact and self.codes(unit)):
            self._fill(unit)
        return super().alone(unit, job, gathers, aside, exact=exact)

    def close(self) -> None:
        """Have what is in either open bucket be assembled."""
        self._again.close()
        super().close()

    def _fill(self, unit: Unit) -> None:
        self._settle()
        part = self._parts.get(unit.index)
        if part is not None:
            self._filling[unit.index] = part, part.comes(unit.version), unit.flat

    def _gathering(
        self, assemblies: list[Assembly], gathers: CollectiveLane, *, exact: bool = False
    ) -> Collective:
        inner = super()._gathering(assemblies, gathers, exact=exact)
        filled = [self._filling.pop(one.index) for one in assemblies if one.index in self._filling]
        if not filled:
            return inner
        keeping = Keeping(inner, [(place, whole) for _, place, whole in filled], self._lane)
        for part, _, _ in filled:
            part.filled_by(keeping)
        return keeping

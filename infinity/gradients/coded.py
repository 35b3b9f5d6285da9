"""Collectives of weights and of gradients that are sent in few bits: see [Note: coded shares] in coding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from infinity.device.device import Device
from infinity.gradients.coding import Coding
from infinity.gradients.collectives import Allocate, Assembly, Gathering, Reducing
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import Lease, OutgoingShare
from infinity.ranks.group import Channel
from infinity.records.record import Record
from infinity.records.updates import PendingUpdates
from infinity.units.unit import Unit


class ShareAside:
    """Where a rank's share of a unit is fetched that ranks compute with as it is decoded: beside the unit's
    memory, which then holds no master's half. A lane.fetch.FetchTarget. The lease ends with the last
    reference: of the pass that fetches it, and may still write it, and of what sends it.
    """

    base, framed = 0, False

    def __init__(self, unit: Unit, beside: OutgoingShare) -> None:
        """Take memory for it from `beside`."""
        numel, dtype = unit.record.shard.numel, unit.flat.dtype
        self.record: Record = unit.record
        self.pending: PendingUpdates = unit.pending
        self._lease = beside.lease_anyway(numel * dtype.itemsize)
        self.flat = beside.buffers.take(numel, dtype)


class CodedGathering(Gathering):
    """Units are assembled from every rank's share, coded. All ranks compute with what comes of that, those
    whose shares they are as well.
    """

    def __init__(
        self,
        assemblies: Sequence[Assembly],
        lane: StreamLane,
        device: Device,
        beside: OutgoingShare,
        coding: Coding,
    ) -> None:
        """beside: has the memory for codes."""
        super().__init__(assemblies, lane, device, beside)
        self._outgoing, self._coding = beside, coding
        self.nbytes = sum(one.coded_nbytes(coding.share_nbytes) for one in assemblies)

    def run(self, channel: Channel) -> None:
        """Code, all-gather, decode."""
        taken = [(*pair, one.layout) for one in self._assemblies if (pair := one.take()) is not None]
        if not taken:
            return
        coding, beside, size = self._coding, self._outgoing, channel.ranks.size
        numels = [part.numel() for _, part, _ in taken]
        row, places = coding.row_nbytes(numels), coding.places(numels)
        between = channel.gather_beside_numel(row)
        lease = beside.lease_anyway((size + 1) * row + between)
        sent, rows = (beside.buffers.take(nbytes, torch.uint8) for nbytes in (row, size * row))
        sent.zero_()  # what pads the parameters was never written
        for (_, part, layout), place in zip(taken, places, strict=True):
            for one in layout.segments:
                values = part[one.start : one.stop]
                coding.encode(values, part.numel(), one.start, sent.data_ptr() + place)
        memory = beside.buffers.take(between, torch.uint8) if between else None
        channel.gather(rows, sent, self.what, memory)
        for number, place in enumerate(places):
            flat, numel = taken[number][0], numels[number]
            for rank in range(size):
                to = flat.data_ptr() + flat.itemsize * numel * rank
                coding.decode(rows.data_ptr() + row * rank + place, numel, flat.dtype, to)
        lease.end()


class CodedReducing(Reducing):
    """Gradients of some units: every rank gets the mean over all ranks of the elements that it holds, of
    gradients that are sent coded. Sums are in fp32, in the order of ranks. On several machines those of each
    are coded in turn, unrounded, for the second hop: see [Note: two hops] in group.py.
    """

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
        coding: Coding,
    ) -> None:
        """coding: of what is sent; all else as for `Reducing`."""
        super().__init__(what, sent, means, allocate, lease, lane, device, count)
        self._coding = coding
        self._numels = [mean.numel() for mean in means]
        self._row_nbytes = coding.row_nbytes(self._numels)
        self.nbytes = sent.numel() // max(sum(self._numels), 1) * self._row_nbytes

    def _exchanged(self, channel: Channel, sent: torch.Tensor) -> torch.Tensor:
        """Return rows of this rank's share, to be added up: of each rank, or the sums of each machine."""
        coded = self._coded(sent)
        if channel.hops is None:
            received = self._bytes(len(coded))
            channel.exchange(received.view(-1), coded.view(-1), self.what)
            return received
        grid = channel.hops.grid
        sums, came = self._bytes(grid.machines), self._bytes(grid.ranks)
        for total, part in zip(starts(sums), coded.view(grid.machines, -1), strict=True):
            channel.exchange_in_hop(came.view(-1), part, self.what, between_machines=False)
            for numel, place in zip(self._numels, self._coding.places(self._numels), strict=True):
                self._coding.code_sum([row + place for row in starts(came)], numel, total + place)
        del came
        received = self._bytes(grid.machines)
        channel.exchange_in_hop(received.view(-1), sums.view(-1), self.what, between_machines=True)
        return received

    def _add_up(self, rows: torch.Tensor) -> None:
        """Fill the means from what has come."""
        for mean, place in zip(self._means, self._coding.places(self._numels), strict=True):
            self._coding.mean([row + place for row in starts(rows)], mean, self._count)

    def _coded(self, sent: torch.Tensor) -> torch.Tensor:
        """Return what goes to each rank."""
        rows = sent.view(-1, sum(self._numels))
        coded = self._bytes(len(rows))
        encode_rows(self._coding, self._numels, rows, coded)
        return coded

    def _bytes(self, rows: int) -> torch.Tensor:
        """Return memory for so many rows."""
        return self._allocate(rows * self._row_nbytes, torch.uint8).view(rows, -1)


def encode_rows(coding: Coding, numels: Sequence[int], rows: torch.Tensor, coded: torch.Tensor) -> None:
    """Code rows of shares of so many elements, each in its row of `coded`."""
    for row, at in zip(rows, starts(coded), strict=True):
        start = 0
        for numel, place in zip(numels, coding.places(numels), strict=True):
            coding.encode(row[start : start + numel], numel, 0, at + place)
            start += numel


def starts(rows: torch.Tensor) -> list[Any]:
    """Return the address of each row."""
    return [row.data_ptr() for row in rows]

"""Coded gradients of several machines, in two hops, what either leaves out being fed back.

[Note: errors of sums]
Without errors the second hop codes the sums of a machine on the thread of the collectives (CodedReducing).
With them it needs fields of the record, and what is queued there may wait for no pass: so the thread that
computes waits for the sums within the machine, has passes add to them what the second hop left out of the
sums before, and queues the second hop, as for momenta: see [Note: workers] in one_bit. A machine's errors of
a share are on the rank that sends it: the one there that has the number of the rank that it goes to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from infinity.gradients.coded import encode_rows, starts
from infinity.gradients.coding import Coding
from infinity.gradients.collectives import Allocate, Collective, CollectiveLane
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import Lease
from infinity.ranks.group import Channel
from infinity.ranks.machines import RankGrid

FeedSums = Callable[[torch.Tensor], None]
"""Adds what was left out before to sums, a row for each machine, and notes what is left out now."""


class CodedSums(Collective):
    """Coded gradients are summed within each machine, in fp32, in the order of its ranks: for each machine,
    of the share of its rank of this one's number.
    """

    kind = "reduce"

    def __init__(
        self,
        what: str,
        sent: torch.Tensor,
        numels: Sequence[int],
        allocate: Allocate,
        coding: Coding,
        grid: RankGrid,
        lane: StreamLane,
    ) -> None:
        """sent: as for Reducing, with what was left out of it before; numels: elements of a share of each
        unit.
        """
        super().__init__(f"sum {what}", lane)
        self._sent, self._numels, self._allocate = sent, numels, allocate
        self._coding, self._grid = coding, grid
        self.nbytes = grid.size * coding.row_nbytes(numels)
        self.sums = torch.empty(0, device="cpu")
        """A row for each machine, when it is over."""

    def run(self, channel: Channel) -> None:
        """Code, all-to-all within the machine, and sums."""
        sent, self._sent = self._sent, torch.empty(0, device="cpu")
        grid, coding, row = self._grid, self._coding, self._coding.row_nbytes(self._numels)
        coded = self._allocate(grid.size * row, torch.uint8).view(grid.size, -1)
        encode_rows(coding, self._numels, sent.view(grid.size, -1), coded)
        sums = self._allocate(grid.machines * sum(self._numels), torch.float32).view(grid.machines, -1)
        came = self._allocate(grid.ranks * row, torch.uint8).view(grid.ranks, -1)
        for total, part in zip(sums, coded.view(grid.machines, -1), strict=True):
            channel.exchange_in_hop(came.view(-1), part, self.what, between_machines=False)
            start = 0
            for numel, place in zip(self._numels, coding.places(self._numels), strict=True):
                coding.mean([one + place for one in starts(came)], total[start : start + numel], 1)
                start += numel
        self.sums = sums


class CodedBetween(Collective):
    """Those sums are coded, and go between the machines; every rank gets the mean of what comes."""

    kind = "reduce"

    def __init__(
        self,
        what: str,
        sums: torch.Tensor,
        means: Sequence[torch.Tensor],
        allocate: Allocate,
        lease: Lease,
        coding: Coding,
        count: int,
        lane: StreamLane,
    ) -> None:
        """sums: a row for each machine; means, count: as for Reducing. Its bytes count with those sums."""
        super().__init__(f"reduce sums of {what}", lane)
        self._sums, self._means, self._allocate = sums, means, allocate
        self._lease, self._coding, self._count = lease, coding, count

    def run(self, channel: Channel) -> None:
        """Code, all-to-all between machines, and the mean, added in the order of machines."""
        sums, self._sums = self._sums, torch.empty(0, device="cpu")
        numels = [mean.numel() for mean in self._means]
        nbytes = len(sums) * self._coding.row_nbytes(numels)
        coded, came = (self._allocate(nbytes, torch.uint8).view(len(sums), -1) for _ in range(2))
        encode_rows(self._coding, numels, sums, coded)
        channel.exchange_in_hop(came.view(-1), coded.view(-1), self.what, between_machines=True)
        for mean, place in zip(self._means, self._coding.places(numels), strict=True):
            self._coding.mean([one + place for one in starts(came)], mean, self._count)
        self._means = ()
        self._lease.end()


def reduce_in_hops(
    what: str,
    sent: torch.Tensor,
    means: Sequence[torch.Tensor],
    allocate: Allocate,
    lease: Lease,
    lane: StreamLane,
    reduces: CollectiveLane,
    coding: Coding,
    grid: RankGrid,
    feed: FeedSums,
) -> Collective:
    """Sum coded gradients within each machine, and queue the exchange of the sums, with what `feed` adds."""
    numels = [mean.numel() for mean in means]
    summing = CodedSums(what, sent, numels, allocate, coding, grid, lane)
    reduces.submit(summing)
    lane.wait(summing)
    feed(summing.sums)
    exchange = CodedBetween(what, summing.sums, means, allocate, lease, coding, grid.size, lane)
    reduces.submit(exchange)
    return exchange


def beside_nbytes(coding: Coding, grid: RankGrid, numels: Collection[int]) -> int:
    """Return the bytes that this takes beside what is sent: sums, and codes on their way."""
    row = coding.row_nbytes(list(numels))
    return 4 * grid.machines * sum(numels) + (grid.size + grid.ranks + 2 * grid.machines) * row

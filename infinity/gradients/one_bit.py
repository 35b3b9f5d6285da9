"""What ranks exchange for 1-bit Adam once the variance is frozen: momenta, at one bit an element.

[Note: workers]
Where the ranks are on several machines, as [Note: two hops] in ranks/group.py has it, a machine is one
worker: its ranks sum their gradients in the gradients' own type first, each the shares of the ranks of its
number, and then each sends what comes of its sums between the machines at one bit. Else each rank is a
worker, and sends at one bit what comes of its gradients to the rank of each share.

A worker's momentum and error lie in its records. The thread that computes waits for the sums, and for the
passes over these fields, before the exchange is queued: what is queued waits for no pass, since passes with
slots wait for what is queued.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from infinity.gradients.collectives import Allocate, Collective, CollectiveLane, sums_within
from infinity.gradients.gradient import Gradient
from infinity.lane.lane import StreamLane
from infinity.lane.one_bit import WorkerPass
from infinity.lane.outgoing import Lease
from infinity.ranks.group import Channel
from infinity.ranks.machines import RankGrid
from infinity.records.one_bit import decode, row_nbytes
from infinity.units.unit import Unit

_PIECE = 1 << 16
"""Elements that are decoded at once."""


class Momenta(Protocol):
    """An optimizer that has momenta be exchanged."""

    def sends(self, unit: Unit, indices: Collection[int]) -> bool:
        """Whether the momenta of these parameters of a unit are exchanged now, not their gradients."""

    def betas(self, unit: Unit, indices: Collection[int]) -> Mapping[int, float]:
        """Return by how much the momenta decay, by the parameters' indices."""

    def check(self, unit: Unit, gradients: Sequence[Gradient]) -> None:
        """See that these gradients are all of this step. Raises: UnsupportedError."""


class SumWithin(Collective):
    """Gradients are summed within each machine: this rank gets the sums of the shares of its number."""

    kind = "reduce"

    def __init__(self, what: str, sent: torch.Tensor, allocate: Allocate, lane: StreamLane) -> None:
        """sent: as for Reducing."""
        super().__init__(f"sum {what}", lane)
        self._sent, self._allocate = sent, allocate
        self.nbytes = sent.nbytes
        self.sums = sent

    def run(self, channel: Channel) -> None:
        """All-to-all within the machine, and sums."""
        sent, self._sent = self._sent, torch.empty(0, device="cpu")
        self.sums = sums_within(channel, sent, self._allocate, self.what)


class OneBitReducing(Collective):
    """Workers exchange what they have coded; every rank gets the mean of what has come for its share."""

    kind = "reduce"

    def __init__(
        self, what: str, coded: torch.Tensor, means: Sequence[torch.Tensor], lease: Lease, lane: StreamLane
    ) -> None:
        """coded: a row for each worker; means: for this rank's share of each unit, in fp32."""
        super().__init__(f"exchange momenta of {what}", lane)
        self._coded, self._means, self._lease = coded, means, lease
        self.nbytes = coded.nbytes

    def run(self, channel: Channel) -> None:
        """All-to-all, and the mean, added in the order of workers."""
        coded, self._coded = self._coded, torch.empty(0, device="cpu")
        came = torch.empty_like(coded)
        if channel.hops is None:
            channel.exchange(came.view(-1), coded.view(-1), self.what)
        else:
            channel.exchange_in_hop(came.view(-1), coded.view(-1), self.what, between_machines=True)
        rows, place = came.numpy(), 0
        for mean in self._means:
            numel = mean.numel()
            stop = place + row_nbytes([numel])
            for start in range(0, numel, _PIECE):
                count = min(_PIECE, numel - start)
                total = decode(rows[0, place:stop], numel, start, count)
                for row in rows[1:]:
                    total += decode(row[place:stop], numel, start, count)
                mean.numpy()[start : start + count] = total.numpy() / np.float32(len(rows))
            place = stop
        self._means = ()
        self._lease.end()


def reduce_momenta(
    what: str,
    betas: Mapping[Unit, Mapping[int, float]],
    sent: torch.Tensor,
    means: Sequence[torch.Tensor],
    allocate: Allocate,
    lease: Lease,
    lane: StreamLane,
    reduces: CollectiveLane,
) -> Collective:
    """Update the momenta of this worker, and queue their exchange. betas: see Momenta; of the units, in the
    order in which `sent` has this rank's gradients of them, as for Reducing.
    """
    ranks = reduces.ranks
    grid = ranks.grid or RankGrid(ranks.size, 1)
    if grid.ranks > 1:
        summing = SumWithin(what, sent, allocate, lane)
        reduces.submit(summing)
        lane.wait(summing)
        sent = summing.sums
    rows = sent.view(grid.machines, -1)
    shares = [unit.record.shard.numel for unit in betas]
    coded = torch.zeros(grid.machines, row_nbytes(shares), dtype=torch.uint8, device="cpu")
    memory, start, place = coded.numpy(), 0, 0
    number = ranks.rank % grid.ranks
    for (unit, of_unit), share in zip(betas.items(), shares, strict=True):
        nbytes = row_nbytes([share])
        for worker in range(grid.machines):
            layout = unit.record.holders.shard_of(unit.layout, worker * grid.ranks + number)
            given = rows[worker, start : start + share], grid.ranks, of_unit
            job = WorkerPass(unit.record, worker, layout, *given, memory[worker, place : place + nbytes])
            lane.submit(job, urgent=True)
            lane.wait(job)
        start, place = start + share, place + nbytes
    exchange = OneBitReducing(what, coded, means, lease, lane)
    reduces.submit(exchange)
    return exchange

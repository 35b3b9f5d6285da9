"""Gradients that the ranks of one machine sum in memory that they have in common: none is sent.

[Note: gradients in common]
Each rank brings of its gradients what others sum to a *place* of its own, piece by piece, and meets them.
Then each sums its share of the piece, where it lies, in the order of ranks, as it would what had been sent:
the bits are the same. Each rank has two places, for one piece and for the next. It writes to one again when
all have met for the piece after: they have come there behind their sums of the piece that was in it.

The places take a part of the outgoing share of the budget for good. What is sent otherwise takes the room of
as many bytes as a rank receives; this needs none of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from infinity import kernels
from infinity.device.device import Device
from infinity.errors import RanksError
from infinity.gradients.collectives import Allocate, Reducing, mean_at
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import Lease
from infinity.ranks.group import Channel
from infinity.ranks.machine_meetings import MachineMeetings
from infinity.ranks.shared_memory import PAGE

MOST_NBYTES = 4 << 20
"""Bytes of a place, at most: a larger one would leave the caches before it is summed."""


def place_nbytes(share_nbytes: int) -> int:
    """Return the bytes of a place, whole pages, where so many of the budget are for what is on its way: two
    of them are an eighth of that.
    """
    return max(1, min(share_nbytes // 16, MOST_NBYTES) // PAGE) * PAGE


class GradientPlaces:
    """The places of all ranks of a machine; see [Note: gradients in common]. Used by one thread."""

    def __init__(self, meetings: MachineMeetings, offset: int, nbytes: int, own: int, ranks: int) -> None:
        """Have the places, each of `nbytes`, at `offset` of the memory in which `meetings` are. own: this
        rank's number.
        """
        self._meetings, self._nbytes, self._own = meetings, nbytes, own
        first = meetings.memory.address + offset
        self._places = [[first + (2 * rank + turn) * nbytes for turn in range(2)] for rank in range(ranks)]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's places."""
        return 2 * self._nbytes

    def pieces(self, rows: torch.Tensor) -> Iterator[range]:
        """Yield the columns of `rows`, of which each rank has as many as there are ranks, piece by piece."""
        most = max(1, self._nbytes // (rows.itemsize * len(rows)))
        for first in range(0, rows.shape[1], most):
            yield range(first, min(first + most, rows.shape[1]))

    def meet(self, rows: torch.Tensor, columns: range, channel: Channel, what: str) -> list[int]:
        """Bring of this rank's `rows` those of others, and meet them; return the addresses at which this
        one's row of each rank begins, in their order, until the next but one meeting.

        Raises: RanksError where ranks have come for something else.
        """
        turn, width = (self._meetings.number + 1) % 2, rows.itemsize * len(columns)
        for rank in range(len(rows)):
            if rank != self._own:
                place = self._places[self._own][turn] + rank * width
                kernels.copy(width, place, rows[rank, columns.start :].data_ptr())
        said = rows.nbytes << 16 | columns.start & 0xFFFF
        told = self._meetings.meet(channel, said, what)
        if any(one != said for one in told):
            of_each = [f"rank {rank} {one >> 16} bytes, at {one & 0xFFFF}" for rank, one in enumerate(told)]
            raise RanksError(
                f"{what}: the ranks bring gradients of different sizes, or other pieces of them, to memory "
                f"that they share: {'; '.join(of_each)}. Likely cause: an error that one of them caught, and "
                "went on. Start again from the last checkpoint; Config(shared_memory=False) shares none"
            )
        places = [one[turn] + self._own * width for one in self._places]
        places[self._own] = rows[self._own, columns.start :].data_ptr()
        return places


class MachineReducing(Reducing):
    """Gradients of some units are summed so."""

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
        places: GradientPlaces,
    ) -> None:
        """places: of the ranks of this machine, which are all. For the others see Reducing."""
        super().__init__(what, sent, means, allocate, lease, lane, device, count)
        self._places: GradientPlaces | None = places
        self.nbytes = 0

    def run(self, channel: Channel) -> None:
        """Meet, and sum, for each piece."""
        places, self._places = self._places, None
        if self._sent is not None and self._sent.numel() and places is not None:
            rows = self._sent.view(channel.ranks.size, -1)
            for columns in places.pieces(rows):
                self._add_up_piece(places.meet(rows, columns, channel, self.what), rows, columns)
        self._sent, self._means = None, ()
        self._lease.end()

    def _add_up_piece(self, places: Sequence[int], rows: torch.Tensor, columns: range) -> None:
        start = 0
        for mean in self._means:
            first, end = max(start, columns.start), min(start + mean.numel(), columns.stop)
            if first < end:
                at = rows.itemsize * (first - columns.start)
                part = mean[first - start : end - start]
                mean_at([place + at for place in places], rows.dtype, part, self._count)
            start += mean.numel()

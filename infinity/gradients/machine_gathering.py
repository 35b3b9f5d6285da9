"""Units that are put together in memory that the ranks of a machine share: no bytes move within it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from infinity import kernels
from infinity.device.device import Device
from infinity.errors import RanksError
from infinity.gradients.collectives import Assembly, Gathering
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import OutgoingShare
from infinity.ranks.group import Channel
from infinity.ranks.machine_meetings import MachineMeetings
from infinity.units.machine_units import MachineShare


class MachineGathering(Gathering):
    """Ranks that have brought their shares of some units to where all of their machine see them meet, and go
    on. Of several machines each rank first brings what those with its number on the others have.
    """

    def __init__(
        self,
        assemblies: Sequence[Assembly],
        lane: StreamLane,
        device: Device,
        beside: OutgoingShare,
        machines: int,
        meetings: MachineMeetings | None = None,
    ) -> None:
        """Assemble units of which the shares are MachineShares. beside: has the memory for what comes from
        other machines, of which there are `machines` with this one. meetings: in which ranks meet, if they do
        so in memory.
        """
        super().__init__(assemblies, lane, device, beside)
        self._shares = [one.aside for one in assemblies if isinstance(one.aside, MachineShare)]
        self._machines, self._between, self._meetings = machines, beside, meetings
        crosses = machines > 1
        self.nbytes = machines * sum(one.flat.nbytes for one in self._shares) if crosses else 0
        self.count = 1
        numbers = [one.generation for one in self._shares]
        self._fetches = xxhash.xxh3_64_intdigest(str(numbers).encode()) >> 1

    def run(self, channel: Channel) -> None:
        """Meet. Raises: RanksError where a rank has counted other fetches, and so used other places."""
        for one in self._assemblies:
            one.take()
        shares, self._shares = self._shares, []
        if self.nbytes:
            self._cross(shares, channel)
        if any(one != self._fetches for one in self._met(channel)):
            raise RanksError(
                f"{self.what}: the ranks have fetched these units another number of times, and would not "
                "compute with the same memory. Likely cause: a Ctrl-C, or an error, on one rank alone. Start "
                "again from the last checkpoint"
            )

    def _met(self, channel: Channel) -> list[int]:
        """Meet all ranks; return the number of each."""
        if self._meetings is not None:
            return self._meetings.meet(channel, self._fetches, self.what)
        mine = torch.tensor([self._fetches], dtype=torch.int64, device="cpu")
        rows = torch.empty(channel.ranks.size, dtype=torch.int64, device="cpu")
        channel.gather(rows, mine, self.what)
        return [int(one) for one in rows.tolist()]

    def _cross(self, shares: Sequence[MachineShare], channel: Channel) -> None:
        """Exchange the shares with the ranks of this one's number on the other machines, all at once, and
        bring theirs to where this machine sees them.
        """
        nbytes = [one.flat.nbytes for one in shares]
        lease = self._between.lease_anyway((self._machines + 1) * sum(nbytes))
        sent = self._between.buffers.take(sum(nbytes), torch.uint8)
        rows = self._between.buffers.take(self._machines * sum(nbytes), torch.uint8)
        starts = [sum(nbytes[:number]) for number in range(len(nbytes))]
        for one, start in zip(shares, starts, strict=True):
            kernels.copy(one.flat.nbytes, sent.data_ptr() + start, one.flat.data_ptr())
        channel.gather_between(rows, sent, self.what)
        for one, start in zip(shares, starts, strict=True):
            for machine, place in enumerate(one.brought):
                if place != one.flat.data_ptr():
                    came = rows.data_ptr() + machine * sum(nbytes) + start
                    kernels.copy(one.flat.nbytes, place, came)
        lease.end()

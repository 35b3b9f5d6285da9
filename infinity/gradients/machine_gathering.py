"""Units that are put together in memory that the ranks of a machine share: no bytes move between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from infinity.device.device import Device
from infinity.errors import RanksError
from infinity.gradients.collectives import Assembly, Gathering
from infinity.lane.lane import StreamLane
from infinity.ranks.group import Channel
from infinity.units.machine_units import MachineShare


class MachineGathering(Gathering):
    """Ranks that have brought their shares of some units to where all see them meet, and go on."""

    def __init__(self, assemblies: Sequence[Assembly], lane: StreamLane, device: Device) -> None:
        """Assemble units of which the shares are MachineShares."""
        super().__init__(assemblies, lane, device, None)
        self.nbytes, self.count = 0, 1
        shares = (one.aside for one in assemblies)
        numbers = [one.generation for one in shares if isinstance(one, MachineShare)]
        self._fetches = xxhash.xxh3_64_intdigest(str(numbers).encode()) >> 1

    def run(self, channel: Channel) -> None:
        """Meet. Raises: RanksError where a rank has counted other fetches, and so used other places."""
        for one in self._assemblies:
            one.take()
        mine = torch.tensor([self._fetches], dtype=torch.int64, device="cpu")
        rows = torch.empty(channel.ranks.size, dtype=torch.int64, device="cpu")
        channel.gather(rows, mine, self.what)
        if any(one != self._fetches for one in rows.tolist()):
            raise RanksError(
                f"{self.what}: the ranks have fetched these units another number of times, and would not "
                "compute with the same memory. Likely cause: a Ctrl-C, or an error, on one rank alone. Start "
                "again from the last checkpoint"
            )

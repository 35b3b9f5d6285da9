"""Units that are fetched one after the other, and assembled from the ranks' shares in one collective.

[Note: buckets of units]
The fetch of this rank's share of a unit begins at once; that it is assembled waits until as many bytes of
such units have come together as fill a *bucket*, or until the thread that computes waits for one of them. A
unit that waits in a bucket is never done, so whether that thread waits does not depend on timing: every rank
fills the same buckets, which the order of the program decides, and the plan.

A bucket is a quarter of the window of units that wait at most, so that others are there, or on their way,
meanwhile. The first one of a step is an eighth of the others: computing waits for it. Each is twice the last.
"""

from __future__ import annotations

import torch

from infinity.device.device import Device
from infinity.gradients.coded import CodedGathering, ShareAside
from infinity.gradients.coding import Coding
from infinity.gradients.collectives import Assembly, Collective, CollectiveLane, Gathering
from infinity.gradients.machine_gathering import MachineGathering
from infinity.lane.fetch import FetchTarget
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import OutgoingShare
from infinity.planning.queue import Job
from infinity.ranks.machine_meetings import MachineMeetings
from infinity.units.unit import Unit

_FIRST = 8
"""The first bucket of a step is that part of a full one."""


class GatherBuckets:
    """Owns the open bucket; see [Note: buckets of units]. Used by the thread that computes."""

    def __init__(
        self,
        lane: StreamLane,
        device: Device,
        outgoing_share: OutgoingShare,
        bucket_nbytes: int,
        coding: Coding | None = None,
        *,
        in_common: bool = False,
    ) -> None:
        """Begin without one. bucket_nbytes: the most bytes of several units; outgoing_share: has the memory
        in which they are put together, where the CPU computes. coding: by which their shares are sent; None:
        as they are. in_common: whether all ranks of a machine see where each brings its share, so that none
        is sent within it.
        """
        self._lane, self._device, self._outgoing_share = lane, device, outgoing_share
        self.coding, self.in_common = coding, in_common
        self._setting_nbytes = bucket_nbytes
        self._window_nbytes = 0
        self._grown = 1
        self._open: list[Assembly] = []
        self._gathers: CollectiveLane | None = None
        self._meetings: MachineMeetings | None = None

    def share_nothing(self) -> None:
        """Have shares be sent within each machine, too: its ranks have no memory in common after all."""
        self.in_common = False

    def meet_by(self, meetings: MachineMeetings | None) -> None:
        """Meet in memory from now on, where all ranks see what each brings."""
        self._meetings = meetings

    def size(self, window_nbytes: int) -> None:
        """Set the bytes of units that may wait for their use."""
        self._window_nbytes = window_nbytes

    def begin_step(self) -> None:
        """A step begins, or a forward without gradients."""
        self._grown = 1

    def codes(self, unit: Unit) -> bool:
        """Whether shares of a unit are sent coded: those that compute in fp32 are their own masters."""
        return self.coding is not None and unit.flat.dtype != torch.float32

    def aside(self, unit: Unit) -> ShareAside:
        """Return where this rank's share of a unit is fetched that is sent coded."""
        return ShareAside(unit, self._outgoing_share)

    def assemble(
        self, unit: Unit, job: Job, gathers: CollectiveLane, aside: FetchTarget | None = None
    ) -> Job:
        """Put a unit, of which `job` fetches this rank's share, into the open bucket of `gathers`; return
        what is done when all of it is there. aside: where it is fetched, if not to the unit's memory.
        """
        most = self._most_nbytes()
        one = Assembly(unit, job, self._lane, self._called_for, aside)
        self._gathers = gathers
        if self._open and self._open_nbytes() + one.nbytes > most:
            self.close()
        self._open.append(one)
        if self._open_nbytes() >= most:
            self.close()
        return one

    def alone(
        self,
        unit: Unit,
        job: Job,
        gathers: CollectiveLane,
        aside: FetchTarget | None = None,
        *,
        exact: bool = False,
    ) -> Job:
        """Assemble a unit by itself. aside: see `assemble`; exact: of shares that are sent as they are."""
        one = Assembly(unit, job, self._lane, self._called_for, aside)
        gathers.submit(self._gathering([one], gathers, exact=exact))
        return one

    def _most_nbytes(self) -> int:
        of_share = self._outgoing_share.ledger.limit_nbytes // 4
        full = min(self._setting_nbytes, self._window_nbytes // 4, of_share)
        return min(full, full // _FIRST * self._grown)

    def _open_nbytes(self) -> int:
        return sum(one.nbytes for one in self._open)

    def _called_for(self, one: Assembly) -> None:
        if one in self._open:
            self.close()

    def close(self) -> None:
        """Have what is in the open bucket be assembled. All ranks do so before what may fail on some of them:
        those that replace units meanwhile would wait for the bucket of those that have stopped.
        """
        if not self._open:
            return
        assemblies, self._open = self._open, []
        self._grown = min(2 * self._grown, _FIRST)
        if self._gathers is not None:
            self._gathers.submit(self._gathering(assemblies, self._gathers))

    def _gathering(
        self, assemblies: list[Assembly], gathers: CollectiveLane, *, exact: bool = False
    ) -> Collective:
        for one in assemblies:
            one.queued()
        if self.in_common:
            grid = gathers.ranks.grid
            machines = grid.machines if grid is not None else 1
            of_lanes = self._lane, self._device, self._outgoing_share
            return MachineGathering(assemblies, *of_lanes, machines, self._meetings)
        if self.coding is not None and not exact:
            return CodedGathering(assemblies, self._lane, self._device, self._outgoing_share, self.coding)
        takes_memory = self._device.is_host and (len(assemblies) > 1 or gathers.crossed_nbytes is not None)
        beside = self._outgoing_share if takes_memory else None
        return Gathering(assemblies, self._lane, self._device, beside)

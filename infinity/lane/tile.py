"""One tile under way through the lane, and which of several the thread that computes is to work on next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from infinity.lane.base import Pass
from infinity.storage.memory import Slot
from infinity.storage.store import Transfer


@dataclass(slots=True, eq=False)
class LaneTile:
    """The memory that a tile is in, and the transfers that fill or empty it."""

    owner: Pass
    start: int
    stop: int
    slot: Slot | None
    addresses: dict[str, int]
    reads: Sequence[str]
    """Fields read from NVMe."""
    writes: Sequence[str]
    """Fields to write to NVMe."""
    changes: Sequence[str]
    """Fields that change where they lie."""
    transfers: list[Transfer] = field(default_factory=list)
    more: Sequence[Transfer] = ()
    """Those among them that the pass itself has begun."""
    worked_s: tuple[float, float] = (0.0, 0.0)
    """When its work began and ended."""

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start

    @property
    def is_over(self) -> bool:
        """Whether all its transfers are."""
        for transfer in self.transfers:  # noqa: SIM110 - all() takes twice as long, and each turn asks
            if not transfer.done:
                return False
        return True

    def begin_reads(self, window: tuple[int, int]) -> None:
        """Begin to read from NVMe; `transfers` are those that have begun, whatever fails. window: see
        Request.
        """
        job = self.owner
        owner, last = (self.slot, job.own_memory), self.reads[-1] if self.reads else None
        for name in self.reads:
            more, address = name is not last, self.addresses[name]
            self.transfers.append(
                job.read(name, self.start, self.stop, address, owner, more=more, window=window)
            )

    def compute(self) -> None:
        """Do its work, when its reads are over."""
        began = time.perf_counter()
        more = self.owner.work(self.start, self.stop, self.addresses, self.reads, self.writes)
        self.more, self.worked_s = more or (), (began, time.perf_counter())

    def begin_writes(self) -> None:
        """Begin to write what was worked on; `transfers` are those that have begun, whatever fails."""
        job, transfers = self.owner, list[Transfer]()
        self.transfers = transfers
        owner, last = (self.slot, job.own_memory), self.writes[-1] if self.writes else None
        for name in self.writes:
            more, address = name is not last, self.addresses[name]
            transfers.append(job.write(name, self.start, self.stop, address, owner, more=more))
        transfers += self.more
        for name in self.changes:
            job.note_written(name, self.start, self.stop)
        if job.progress.at_last_tile:
            transfers += job.settle()

"""Passes, and the queue in which they wait for the lane."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from infinity import kernels
from infinity.records.packing import PackedSpans
from infinity.records.record import Record
from infinity.storage.store import Transfer


class Awaited(Protocol):
    """What brings a unit, or anything else that may be waited for: a pass, or a collective behind it."""

    @property
    def processed(self) -> bool:
        """Whether what it brings is there."""

    @property
    def finished(self) -> bool:
        """Whether nothing of it is under way any more."""

    @property
    def starved_s(self) -> float:
        """Seconds in which somebody waited for it because no slot was free."""


class PassProgress:
    """How far the lane has come with a pass. Written under the lane's lock alone."""

    __slots__ = ("_ahead", "_asked_s", "_ranges", "_unprocessed", "open_tiles", "starved_s")

    def __init__(self) -> None:
        """Begin before the first tile."""
        self.open_tiles = 0
        """Tiles admitted and not yet over."""
        self.starved_s = 0.0
        """Seconds in which somebody waited for the pass, none of its tiles was under way, and no slot was
        free.
        """
        self._ranges: Iterator[tuple[int, int]] | None = None
        self._ahead: tuple[int, int] | None = None
        self._unprocessed = 0
        self._asked_s = 0.0

    def asked(self) -> None:
        """Somebody waits for the pass from now on, if nobody did before."""
        self._asked_s = self._asked_s or time.perf_counter()

    def next_tile(self, job: Pass) -> tuple[tuple[int, int] | None, bool]:
        """Return the next tile of `job`, None if it has none, and whether it is the last."""
        if self._ranges is None:
            self._ranges = job.tiles()
            self._ahead = next(self._ranges, None)
        tile, self._ahead = self._ahead, next(self._ranges, None)
        return tile, self._ahead is None

    def admit(self, lacked_s: Callable[[float], float] | None) -> None:
        """Count a tile whose reads begin. lacked_s: says for how long slots have lacked since a time, where
        somebody waits for the pass.
        """
        if lacked_s is not None and not self._unprocessed:
            self.starved_s += lacked_s(self._asked_s)
        self.open_tiles += 1
        self._unprocessed += 1

    @property
    def at_last_tile(self) -> bool:
        """Whether the tile that is worked on is the last one."""
        return self._unprocessed == 1 and self._ahead is None

    def worked_on(self, ended_s: float) -> bool:
        """Count a tile that was worked on until `ended_s`; return whether it was the last one."""
        self._unprocessed -= 1
        if self._unprocessed:
            return False
        self._asked_s = ended_s  # somebody waits, and none of its tiles is under way any more
        return self._ahead is None

    def tile_over(self) -> None:
        """Count a tile whose writes are over."""
        self.open_tiles -= 1


class Pass(ABC):
    """One walk over a record. Subclasses say which fields each tile reads and writes, and what happens in
    between.
    """

    def __init__(self, record: Record) -> None:
        """Prepare a walk over `record`."""
        self.record = record
        self.urgent = False
        """Somebody waits for it."""
        self.adopts: frozenset[str] = frozenset()
        """Fields that this pass leaves in their target; see Record.targets. Known from the first tile on."""
        self.processed = False
        """Every tile was worked on (writes may still be under way)."""
        self.finished = False
        """Every write is over."""
        self.sums: kernels.Checksums | None = None
        """Of the tile that is worked on, where `sums_up` says that its kernel takes them."""
        self.on_finished: list[Callable[[], None]] = []
        """Called once it is finished, with the lane's lock held."""
        self._packed = PackedSpans(record)
        self.progress = PassProgress()

    @property
    def starved_s(self) -> float:
        """See PassProgress."""
        return self.progress.starved_s

    def take_over(self) -> None:  # noqa: B027 - most passes bring all they need
        """Called when it is queued, or run: what it was made for becomes its own. A second time too."""

    def hand_back(self) -> None:  # noqa: B027 - the same
        """Called where queueing it was interrupted: undo `take_over`."""

    @abstractmethod
    def tiles(self) -> Iterator[tuple[int, int]]:
        """Return element ranges, whole tiles of the record, in the order to walk them."""

    @abstractmethod
    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Return the fields to read and to write of the tile at elements [start, stop). Called when it is
        admitted.
        """

    @property
    def in_memory(self) -> bool:
        """Whether all that it may touch lies in host memory."""
        return all(self.record.in_host(name) for name in self.touched() if name in self.record)

    def touched(self) -> Iterable[str]:
        """Return the fields that it may touch."""
        return [name for name, _ in self.record.tiers()]

    def place(self, field: str, start: int) -> int | None:
        """Return the address, on a whole block, of memory of the pass's own for a field on NVMe from element
        `start` on; None to use a slot.
        """
        return None

    @property
    def keeps(self) -> object:
        """What keeps the memory of `place` alive."""
        return None

    def sums_up(self, start: int, stop: int) -> bool:
        """Whether `process` takes `sums` of a tile, all of them, as it works on it. Else they are taken
        before and after.
        """
        return False

    @abstractmethod
    def process(self, start: int, stop: int, at: dict[str, int]) -> Sequence[Transfer] | None:
        """Work on one tile; `at` is the address of each field. Return transfers that still use them."""

    def run_in_memory(self) -> None:
        """Do all of it now, where all that it touches lies in host memory."""
        transfers: list[Transfer] = []
        for start, stop in self.tiles():
            reads, writes = self.fields(start, stop)
            at = {name: self.record.host_address(name, start) for name in dict.fromkeys((*reads, *writes))}
            transfers += self.process(start, stop, at) or ()
            for name in writes:
                self.note_written(name, start, stop)
        for transfer in (*transfers, *self.settle()):
            transfer.wait()

    def work(
        self, start: int, stop: int, at: dict[str, int], reads: Sequence[str], writes: Sequence[str]
    ) -> Sequence[Transfer] | None:
        """Process one tile; compare the checksums of what was read, and keep those of what is to be written.

        Raises: CorruptionError. What the tile holds then is used no more: its pass is never over.
        """
        packed = self.record.packed
        if packed:  # these are summed up when their span comes and goes
            reads, writes = ([name for name in names if name not in packed] for names in (reads, writes))
        sums, on_the_way = self.record.sums(start, stop, at, reads, writes), self.sums_up(start, stop)
        if not on_the_way:
            sums.compare()
        self.sums = sums.fields if on_the_way else None
        more = self.process(start, stop, at)
        if on_the_way:
            sums.compare(taken=True)
        sums.keep(taken=on_the_way)
        return more

    def read(
        self, name: str, start: int, stop: int, address: int, owner: object, *, more: bool = False
    ) -> Transfer:
        """Begin to read a tile of a field on NVMe to `address`. more: see Request."""
        if name in self.record.packed:
            return self._packed.read(name, start, stop, address, urgent=self.urgent)
        return self.record.read(name, start, stop, address, owner, urgent=self.urgent, more=more)

    def write(
        self, name: str, start: int, stop: int, address: int, owner: object, *, more: bool = False
    ) -> Transfer:
        """Begin to write a tile of a field on NVMe, or put it to others that are written with it, the last of
        them in `settle`. more: see Request.
        """
        if name in self.record.packed:
            return self._packed.write(name, start, stop, address)
        return self.record.write(name, start, stop, address, owner, more=more)

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Put fields in the order in which to read or write them: the last one is a transfer in any case."""
        packed = self.record.packed
        return sorted(names, key=packed.__contains__, reverse=True) if packed else list(names)

    def note_written(self, name: str, start: int, stop: int) -> None:
        """Remember that a tile of a field was written where it lies: see Record, and packing."""
        (self._packed if name in self.record.packed else self.record).note_written(name, start, stop)

    def settle(self) -> Sequence[Transfer]:
        """The last tile was worked on: begin to write what is left."""
        return self._packed.settle()

    def end_processing(self) -> None:
        """The last tile was worked on."""
        self.done_processing()
        self.processed = True  # last: others look at it without the lock, and count on the rest

    def finish(self) -> None:
        """Call back who waits for the end, once; what they hold goes with them."""
        self.finished = True
        calls, self.on_finished = self.on_finished, []
        for call in calls:
            call()

    def done_processing(self) -> None:  # noqa: B027 - most passes have nothing to do there
        """Called on the lane's thread, with its lock held, when the last tile was worked on."""


class _There(Pass):
    """The pass of what needs none."""

    def __init__(self) -> None:
        self.processed = self.finished = True
        self.progress = PassProgress()

    def tiles(self) -> Iterator[tuple[int, int]]:
        return iter(())

    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        return (), ()

    def process(self, start: int, stop: int, at: dict[str, int]) -> None:
        return None


THERE = _There()
"""Stands for the pass of a unit whose values need no fetching."""


@dataclass(slots=True)
class Queue:
    """Passes waiting for slots, in order, and the unfinished passes of each record, oldest first."""

    waiting: deque[Pass] = field(default_factory=deque)
    of_record: dict[Record, deque[Pass]] = field(default_factory=dict)
    here: list[Pass] = field(default_factory=list)
    """Those that are run by who submitted them, and wait for nobody."""

    def add(self, job: Pass, *, urgent: bool = False) -> None:
        """Queue a pass behind the others; an urgent one, and older ones over its record, in front."""
        job.urgent = urgent
        self.of_record.setdefault(job.record, deque()).append(job)
        self.waiting.append(job)
        if urgent:
            self.promote(job.record)

    def promote(self, record: Record) -> None:
        """Move the passes of `record` to the front, keeping their order."""
        first = [job for job in self.of_record.get(record, ()) if job in self.waiting]
        for job in first:
            job.urgent = True
            job.progress.asked()
            self.waiting.remove(job)
        self.waiting.extendleft(reversed(first))

    def unfinished(self, record: Record) -> list[Pass]:
        """Return the passes over a record that are not over."""
        here = (job for job in self.here if job.record is record)
        return [job for job in (*self.of_record.get(record, ()), *here) if not job.finished]

    def admissible(self) -> Pass | None:
        """Return the first waiting pass, unless an older pass over its record is unfinished."""
        if not self.waiting:
            return None
        job = self.waiting[0]
        return job if self.of_record[job.record][0] is job else None

    def retire(self, job: Pass) -> None:
        """Forget a finished pass."""
        jobs = self.of_record[job.record]
        jobs.remove(job)
        if not jobs:
            del self.of_record[job.record]

    def forget(self, job: Pass) -> None:
        """Undo `add`, however far it came."""
        if job in self.waiting:
            self.waiting.remove(job)
        if job in self.of_record.get(job.record, ()):
            self.retire(job)
        elif not self.of_record.get(job.record, True):
            del self.of_record[job.record]

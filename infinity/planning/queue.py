"""Jobs, and the queue in which passes wait for the lane: of a running engine, and of a forecast. Pure."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar


class JobLane(Protocol):
    """The lane under whose lock a job changes, and whose failure ends a wait for it."""

    def wait(self, job: Job) -> object:
        """Return when `job` is done."""


class PassLane(JobLane, Protocol):
    """The lane that runs passes."""

    def submit(self, job: Any, *, urgent: bool = False) -> None:
        """Queue a pass, an urgent one in front, or run it."""

    def promote(self, record: Any) -> None:
        """Put the queued passes over `record` in front."""

    def settled(self, record: Any) -> bool:
        """Whether every pass over `record` has been worked on, writes apart."""


class Job:
    """What a lane does for other threads: a pass, a collective. A storage.store.Future. Changed under the
    lane's lock.
    """

    def __init__(self, lane: JobLane | None = None, *, done: bool = False) -> None:
        """Begin, done or not; a pass is told its lane when it is submitted."""
        self.done = done
        """Whether what it brings is there; writes may still be under way. Looked at without the lock."""
        self._lane = lane

    @property
    def is_queued(self) -> bool:
        """Whether a lane has it, or had it, so that it can be waited for."""
        return self.done or self._lane is not None

    @property
    def finished(self) -> bool:
        """Whether nothing of it is under way any more."""
        return self.done

    @property
    def slot_wait_s(self) -> float:
        """Seconds in which another thread waited for it because no slot was free."""
        return 0.0

    def called_for(self) -> None:
        """Another thread is about to wait for it, which is not done."""

    def wait(self) -> None:
        """Return when it is done. Raises: what made the lane fail; EngineFailedError if it was closed."""
        if self._lane is None:
            raise AssertionError(f"expected a job that was submitted before it is waited for, got {self!r}")
        self._lane.wait(self)


NO_FETCH = Job(done=True)
"""Stands for the fetch of a unit whose values need no fetching."""


class PassProgress:
    """How far the lane has come with a pass. Written under the lane's lock alone."""

    __slots__ = ("_ahead", "_asked_s", "_ranges", "_unprocessed", "open_tiles", "slot_wait_s")

    def __init__(self) -> None:
        """Begin before the first tile."""
        self.open_tiles = 0
        """Tiles admitted and not yet over."""
        self.slot_wait_s = 0.0
        """Seconds in which another thread waited for the pass, none of its tiles was under way, and no slot
        was free.
        """
        self._ranges: Iterator[tuple[int, int]] | None = None
        self._ahead: tuple[int, int] | None = None
        self._unprocessed = 0
        self._asked_s = 0.0

    def asked(self) -> None:
        """Another thread waits for the pass from now on, if none did before."""
        self._asked_s = self._asked_s or time.perf_counter()

    def next_tile(self, tiles: Callable[[], Iterator[tuple[int, int]]]) -> tuple[int, int] | None:
        """Return the next of the pass's `tiles`; None if there are none at all."""
        if self._ranges is None:
            self._ranges = tiles()
            self._ahead = next(self._ranges, None)
        tile, self._ahead = self._ahead, next(self._ranges, None)
        return tile

    @property
    def is_last(self) -> bool:
        """Whether there is no tile behind the one that `next_tile` returned last."""
        return self._ahead is None

    def admit(self, lacked_s: Callable[[float], float] | None) -> None:
        """Count a tile whose reads begin. lacked_s: says for how long slots have lacked since a time, where
        another thread waits for the pass.
        """
        if lacked_s is not None and not self._unprocessed:
            self.slot_wait_s += lacked_s(self._asked_s)
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
        self._asked_s = ended_s  # another thread waits, and none of its tiles is under way any more
        return self._ahead is None

    def begin(self, tiles: int) -> None:
        """Count tiles of a pass that is run elsewhere than on the lane's thread, and not yet over."""
        self.open_tiles += tiles

    def tile_over(self) -> None:
        """Count a tile whose writes are over."""
        self.open_tiles -= 1


_RecordT = TypeVar("_RecordT", bound=Hashable)


class QueuedPass(Job, ABC, Generic[_RecordT]):
    """One walk over a record, as its lane sees it."""

    def __init__(self, record: _RecordT) -> None:
        """Prepare a walk over `record`."""
        super().__init__()
        self.record = record
        self.urgent = False
        """Whether another thread waits for it."""
        self.progress = PassProgress()
        self.on_done: Callable[[], None] | None = None
        """Called when the last tile was worked on, with the lane's lock held."""
        self.on_finished: list[Callable[[], None]] = []
        """Called once it is finished, with the lane's lock held."""
        self._finished = False

    @abstractmethod
    def tiles(self) -> Iterator[tuple[int, int]]:
        """Return element ranges, whole tiles of the record, in the order to walk them."""

    @property
    def finished(self) -> bool:
        """Whether every write is over, after every tile was worked on, which is when it is `done`."""
        return self._finished

    @property
    def slot_wait_s(self) -> float:
        """See PassProgress."""
        return self.progress.slot_wait_s

    @property
    def paused(self) -> bool:
        """Whether its next tile waits for its earlier ones, or for other ranks: others may go before it."""
        return False

    @property
    def computes(self) -> bool:
        """Whether its work takes so long, or waits for so much, that fetches are not to wait for it."""
        return False

    @property
    def stands_aside(self) -> bool:
        """Whether others need not wait behind it while another pass is busy with its record."""
        return False

    @property
    def moves_nothing(self) -> bool:
        """Whether it has no tiles, as is known once older passes over its record have been worked on: then
        it need not wait for their writes.
        """
        return False

    @property
    def goes_last(self) -> bool:
        """Whether it begins when no other pass can, unless one over its record waits behind it."""
        return False

    @property
    def deferrable(self) -> bool:
        """Whether it is needed the later, the older it is: see `is_sooner_than`."""
        return False

    def is_sooner_than(self, older: QueuedPass[Any]) -> bool:
        """Whether a thread that computes works on this pass before one that was queued earlier.

        First come passes that another thread waits for, then those that are not `deferrable`, in their order;
        of the deferrable ones, updates in the backward, the newest: the layer whose backward came last is the
        first that the next forward needs (earliest deadline first, Liu and Layland 1973).
        """
        if self.urgent != older.urgent:
            return self.urgent
        if self.deferrable != older.deferrable:
            return older.deferrable
        return self.deferrable and not self.urgent

    def take_over(self) -> None:
        """Take the pending work that the pass was made for, when it is queued or run. Idempotent."""

    def hand_back(self) -> None:
        """Undo `take_over`, where queueing the pass was interrupted."""

    def submitted(self, lane: JobLane) -> None:
        """Note the lane that does it."""
        self._lane = lane

    def set_urgent(self, *, urgent: bool) -> None:
        """Note whether another thread waits for it."""
        self.urgent = urgent

    def call_when_done(self, call: Callable[[], None]) -> None:
        """Set `on_done`, instead of what it was."""
        self.on_done = call

    def end_processing(self) -> None:
        """The last tile was worked on."""
        self.done_processing()
        self.done = True  # last: others look at it without the lock, and count on the rest

    def done_processing(self) -> None:
        """Called on the lane's thread, with its lock held, when the last tile was worked on."""
        call, self.on_done = self.on_done, None  # it may refer to this pass
        if call:
            call()

    def finish(self) -> None:
        """Make the calls that wait for the end, once; references that they hold are dropped."""
        self._finished = True
        calls, self.on_finished = self.on_finished, []
        for call in calls:
            call()


_PassT = TypeVar("_PassT", bound=QueuedPass[Any])


@dataclass(slots=True)
class Queue(Generic[_PassT]):
    """Passes waiting for slots, in order, and the unfinished passes of each record, oldest first."""

    waiting: deque[_PassT] = field(default_factory=deque)
    later: deque[_PassT] = field(default_factory=deque)
    """Passes that go last: they let all of `waiting` by."""
    of_record: dict[Hashable, deque[_PassT]] = field(default_factory=dict)
    here: list[_PassT] = field(default_factory=list)
    """Passes that the thread that submitted them runs itself."""
    fetches: int = 0
    """Waiting passes that do not compute; after an interrupt maybe more than there are, never fewer."""

    def add(self, job: _PassT, *, urgent: bool = False) -> None:
        """Queue a pass behind the others; an urgent one, and older ones over its record, in front."""
        job.set_urgent(urgent=urgent)
        older = self.of_record.setdefault(job.record, deque())
        for one in older if self.later else ():
            if one in self.later:
                self.waiting.append(one)  # first: a Ctrl-C may come
                self.later.remove(one)
        older.append(job)
        self.fetches += not job.computes
        (self.later if job.goes_last else self.waiting).append(job)
        if urgent:
            self.promote(job.record)

    def begin(self, job: _PassT) -> bool:
        """Take a pass that does not wait, as the only one over its record; return whether it is."""
        if job.record in self.of_record:
            return False
        self.of_record[job.record] = deque([job])
        return True

    def promote(self, record: Hashable) -> None:
        """Move the passes of `record` to the front, keeping their order; all of them are urgent now."""
        jobs = self.of_record.get(record, ())
        for job in jobs:
            job.set_urgent(urgent=True)
        first = [job for job in jobs if job in self.waiting or job in self.later]
        for job in first:
            job.progress.asked()
            self._remove(job)
        self.waiting.extendleft(reversed(first))

    def unfinished(self, record: Hashable) -> list[_PassT]:
        """Return the passes over a record that are not finished."""
        here = (job for job in self.here if job.record is record)
        return [job for job in (*self.of_record.get(record, ()), *here) if not job.finished]

    def settled(self, record: Hashable) -> bool:
        """Whether every queued pass over a record has been worked on, writes apart."""
        jobs = self.of_record.get(record)
        return jobs is None or all(job.done for job in jobs)

    def admissible(self, *, passing: bool = False, computing: bool = True) -> _PassT | None:
        """Return the first waiting pass, unless an older pass over its record is unfinished. Those that are
        paused, and those behind them over the same record, are passed over: a slot that one of them held
        might be what the ranks that it waits for need. Where there is none, return the first that may begin
        of those that go last.

        passing: so are those whose records are busy; without it, those alone that stand aside. computing:
        else so are those that compute.
        """
        if not computing and not self.fetches:  # a lane that looks again soon asks often
            return None
        for job in self.waiting:
            jobs = self.of_record[job.record]
            if jobs[0].paused or (job.computes and not computing):
                continue
            if jobs[0] is job or (job.moves_nothing and self._is_next(job)):
                return job
            if not (passing or job.stands_aside):
                break
        for job in self.later:
            if self.of_record[job.record][0] is job and (computing or not job.computes):
                return job
        return None

    def _is_next(self, job: _PassT) -> bool:
        """Whether every older pass over a pass's record has been worked on, writes apart."""
        older = itertools.takewhile(lambda one: one is not job, self.of_record[job.record])
        return all(one.done for one in older)

    def next_tile(self, job: _PassT) -> tuple[int, int] | None:
        """Return the next tile of an admissible pass; None for a pass without tiles. With its last tile a
        pass waits no more.
        """
        tile = job.progress.next_tile(job.tiles)
        if job.progress.is_last:
            self._waits_no_more(job)
        return tile

    def retire_if_over(self, job: _PassT) -> bool:
        """Forget a pass of which nothing is under way any more; return whether it was not forgotten yet."""
        if not job.done or job.progress.open_tiles or job.finished:
            return False
        self.retire(job)
        return True

    def retire(self, job: _PassT) -> None:
        """Forget a finished pass."""
        jobs = self.of_record[job.record]
        jobs.remove(job)
        if not jobs:
            del self.of_record[job.record]

    def forget(self, job: _PassT) -> None:
        """Undo `add`, however far it came."""
        if job in self.waiting or job in self.later:
            self._waits_no_more(job)
        if job in self.of_record.get(job.record, ()):
            self.retire(job)
        elif not self.of_record.get(job.record, True):
            del self.of_record[job.record]

    def _waits_no_more(self, job: _PassT) -> None:
        self._remove(job)
        self.fetches -= not job.computes

    def _remove(self, job: _PassT) -> None:
        """Take a pass from where it waits: from both, where a Ctrl-C has kept it from moving."""
        if job in self.waiting:
            self.waiting.remove(job)
        if job in self.later:
            self.later.remove(job)

"""The lane that moves records: one thread that keeps reads, work on what was read, and writes going at the
same time.

[Note: how the lane makes progress]
A *pass* walks over the tiles of one record: each tile is read into a slot, worked on, and (if the pass
changes it) written back. Tiles of the queued passes are admitted in order as long as slots are free, so the
reads of the next passes overlap the work on this one, and writes overlap both. A slot holds exactly one tile
from the beginning of its read to the end of its write, and every tile in a slot finishes by itself: nothing
it waits for needs another slot, a lock, or the thread that computes. So the lane cannot deadlock, with any
number of slots from one up.

Two passes over one record never overlap: a pass is admitted only when it is the oldest unfinished one of its
record.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from infinity.errors import EngineFailedError
from infinity.memory import Pool, Slot
from infinity.shard import FIELD_NBYTES
from infinity.store import Record, Transfer

logger = logging.getLogger("infinity")


class Pass(ABC):
    """One walk over a record. Subclasses say which fields each tile reads and writes, and what happens in
    between.
    """

    def __init__(self, record: Record) -> None:
        """Prepare a walk over `record`."""
        self.record = record
        self.processed = False
        """Every tile was worked on (writes may still be under way)."""
        self.finished = False
        """Every write is over."""
        self.open_tiles = 0
        """Tiles admitted and not yet over."""
        self.ranges: Iterator[tuple[int, int]] | None = None
        self.ahead: tuple[int, int] | None = None
        """The next tile to admit."""
        self.unprocessed = 0

    @abstractmethod
    def tiles(self) -> Iterator[tuple[int, int]]:
        """Return element ranges, whole tiles of the record, in the order to walk them."""

    @abstractmethod
    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Return the fields to read and to write of the tile at elements [start, stop). Called when it is
        admitted.
        """

    @abstractmethod
    def process(self, start: int, stop: int, at: dict[str, int]) -> None:
        """Work on one tile; `at` is the address of each of its fields."""

    def done_processing(self) -> None:  # noqa: B027 - most passes have nothing to do there
        """Called on the lane's thread, with its lock held, when the last tile was worked on."""


@dataclass(slots=True)
class _Tile:
    """One tile under way: its slot, and the transfers that fill or empty it."""

    owner: Pass
    start: int
    stop: int
    slot: Slot
    at: dict[str, int]
    reads: Sequence[str]
    writes: Sequence[str]
    transfers: list[Transfer]


@dataclass(slots=True)
class LaneTimes:
    """Seconds of the lane's thread: waiting for reads, at work, waiting for writes, with nothing to do."""

    read_wait_s: float = 0.0
    work_s: float = 0.0
    write_wait_s: float = 0.0
    idle_s: float = 0.0


@dataclass(slots=True)
class _Queue:
    """Passes waiting for slots, in order, and the unfinished passes of each record, oldest first."""

    waiting: deque[Pass] = field(default_factory=deque)
    of_record: dict[Record, deque[Pass]] = field(default_factory=dict)

    def add(self, job: Pass, *, urgent: bool) -> None:
        self.of_record.setdefault(job.record, deque()).append(job)
        self.waiting.append(job)
        if urgent:
            self.promote(job.record)

    def promote(self, record: Record) -> None:
        """Move the passes of `record` to the front, keeping their order."""
        first = [job for job in self.of_record.get(record, ()) if job in self.waiting]
        for job in first:
            self.waiting.remove(job)
        self.waiting.extendleft(reversed(first))

    def admissible(self) -> Pass | None:
        """Return the first waiting pass, unless an older pass over its record is unfinished."""
        if not self.waiting:
            return None
        job = self.waiting[0]
        return job if self.of_record[job.record][0] is job else None

    def retire(self, job: Pass) -> None:
        jobs = self.of_record[job.record]
        jobs.remove(job)
        if not jobs:
            del self.of_record[job.record]


class StreamLane:
    """Runs passes on a thread of its own; see [Note: how the lane makes progress]."""

    def __init__(self, pool: Pool) -> None:
        """Start the thread. `pool` belongs to it from now on."""
        self.changed = threading.Condition()
        """Notified when a pass is processed or finished, and when the lane fails. Its lock guards all units'
        state.
        """
        self.times = LaneTimes()
        self.passes: Counter[str] = Counter()
        self._pool = pool
        self._queue = _Queue()
        self._reading: deque[_Tile] = deque()
        self._writing: deque[_Tile] = deque()
        self._stopping = False
        self._failure: BaseException | None = None
        self._reported = False
        self._thread = threading.Thread(target=self._run, name="infinity-lane", daemon=True)
        self._thread.start()

    # What other threads call

    def submit(self, job: Pass, *, urgent: bool = False) -> None:
        """Queue a pass; `urgent` puts it, and older passes over the same record, in front."""
        with self.changed:
            self._raise_failure()
            if self._stopping:
                raise EngineFailedError("the engine was closed; its parameters are gone")
            self._queue.add(job, urgent=urgent)
            self.passes[type(job).__name__] += 1
            self.changed.notify_all()

    def promote(self, record: Record) -> None:
        """Put the queued passes over `record` in front."""
        with self.changed:
            self._queue.promote(record)

    def wait(self, job: Pass, *, finished: bool = False) -> float:
        """Return when `job` is processed (or finished); the seconds that took. Raises what made the lane
        fail.
        """
        started = time.perf_counter()
        with self.changed:
            while not (job.finished if finished else job.processed):
                self._raise_failure()
                self.changed.wait(0.5)
            self._raise_failure()
        return time.perf_counter() - started

    def drain(self) -> None:
        """Return when every queued pass is finished."""
        with self.changed:
            while self._queue.of_record:
                self._raise_failure()
                self.changed.wait(0.5)
            self._raise_failure()

    def close(self) -> None:
        """Stop after the transfers in flight; queued passes are dropped. Never raises."""
        with self.changed:
            self._stopping = True
            self.changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def failed(self) -> bool:
        """Whether an error has stopped the lane."""
        return self._failure is not None

    def _raise_failure(self) -> None:
        if self._failure is None:
            return
        if not self._reported:
            self._reported = True
            raise self._failure
        raise EngineFailedError(f"the engine stopped at an earlier error: {self._failure}") from self._failure

    # The lane's own thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            logger.debug("the lane stops", exc_info=error)
            with self.changed:
                self._failure = error
        self._drain_transfers()
        with self.changed:
            self.changed.notify_all()

    def _turn(self) -> bool:
        """Make the next bit of progress; False when it is time to stop."""
        if self._stopping:
            return False
        self._reap(block=False)
        self._admit()
        if self._reading:
            self._work(self._reading.popleft())
        elif self._writing:
            self._reap(block=True)
        else:
            started = time.perf_counter()
            with self.changed:
                if not self._stopping and self._queue.admissible() is None:
                    self.changed.wait(1.0)
            self.times.idle_s += time.perf_counter() - started
        return True

    def _admit(self) -> None:
        """Begin the reads of the next tiles, as far as slots go."""
        while self._pool.free:
            with self.changed:
                job = self._queue.admissible()
                if job is None:
                    return
                tile, last = self._next_range(job)
                if last:
                    self._queue.waiting.popleft()
                if tile is None:
                    self._processed(job)
                    continue
                job.open_tiles += 1
                job.unprocessed += 1
            self._reading.append(self._begin(job, *tile))

    @staticmethod
    def _next_range(job: Pass) -> tuple[tuple[int, int] | None, bool]:
        """Return the pass's next tile, None if it has none, and whether it is the last."""
        if job.ranges is None:
            job.ranges = job.tiles()
            job.ahead = next(job.ranges, None)
        tile, job.ahead = job.ahead, next(job.ranges, None)
        return tile, job.ahead is None

    def _begin(self, job: Pass, start: int, stop: int) -> _Tile:
        reads, writes = job.fields(start, stop)
        slot = self._pool.lease()
        at: dict[str, int] = {}
        address = slot.address
        for name in dict.fromkeys((*reads, *writes)):
            at[name] = address
            address += (stop - start) * FIELD_NBYTES[name]
        transfers = [job.record.read(name, start, stop, at[name], slot) for name in reads]
        return _Tile(job, start, stop, slot, at, reads, writes, transfers)

    def _work(self, tile: _Tile) -> None:
        """Wait for a tile's reads, check them, do its work, and begin its writes."""
        record = tile.owner.record
        started = time.perf_counter()
        for transfer in tile.transfers:
            transfer.wait()
        read = time.perf_counter()
        for name in tile.reads:
            record.check(name, tile.start, tile.stop, tile.at[name])
        tile.owner.process(tile.start, tile.stop, tile.at)
        tile.transfers = [
            record.write(name, tile.start, tile.stop, tile.at[name], tile.slot) for name in tile.writes
        ]
        self.times.read_wait_s += read - started
        self.times.work_s += time.perf_counter() - read
        with self.changed:
            tile.owner.unprocessed -= 1
            if not tile.owner.unprocessed and tile.owner.ahead is None:
                self._processed(tile.owner)
        self._writing.append(tile)

    def _reap(self, *, block: bool) -> None:
        """Give back the slots of tiles whose writes are over; with `block`, wait for the oldest."""
        while self._writing and (block or all(transfer.done for transfer in self._writing[0].transfers)):
            tile = self._writing.popleft()
            started = time.perf_counter()
            for transfer in tile.transfers:
                transfer.wait()
            if block:
                self.times.write_wait_s += time.perf_counter() - started
            block = False
            self._pool.give_back(tile.slot)
            with self.changed:
                tile.owner.open_tiles -= 1
                self._finish_if_over(tile.owner)

    def _processed(self, job: Pass) -> None:
        job.processed = True
        job.done_processing()
        self._finish_if_over(job)
        self.changed.notify_all()

    def _finish_if_over(self, job: Pass) -> None:
        if job.processed and not job.open_tiles and not job.finished:
            job.finished = True
            self._queue.retire(job)
            self.changed.notify_all()

    def _drain_transfers(self) -> None:
        """Wait for whatever is in flight, so that slots may be freed; errors here come after the one that
        counts.
        """
        for tile in (*self._reading, *self._writing):
            for transfer in tile.transfers:
                try:
                    transfer.wait()
                except Exception as error:  # noqa: BLE001
                    logger.debug("after the lane stopped: %s", error)

"""The lane that moves records: a thread that overlaps reads, the work on what was read, and writes; and
beside an accelerator another that computes.

[Note: how the lane makes progress]
A *pass* walks over the tiles of one record: each tile is read, worked on, and (if the pass changes it)
written back. A field in host memory is worked on where it lies; a field on NVMe in memory that the pass has
for it, or else in a slot. Tiles of the queued passes are admitted in order as long as slots are free, so the
reads of the next passes overlap the work on this one, and writes overlap both: slots bound what is in flight.
A slot belongs to exactly one tile from the beginning of its read to the end of its write, and every tile with
a slot finishes by itself: nothing it waits for needs another slot, a lock, or the thread that computes. So
the lane cannot deadlock, with any number of slots from one up.

Two passes over one record never overlap: a pass is admitted only when it is the oldest unfinished one of its
record. A pass that another thread waits for is urgent: it goes first, in the queue and at the disk. A pass
whose gradients are still on their way from an accelerator lets others by: what is fetched does not wait for
what is updated, but for slots. One that stands aside lets them by while another is busy with its record, and
one that turns out to move nothing begins as soon as that one is worked on. Tiles are over in any order.

[Note: two lanes]
Beside an accelerator, passes that *compute* (updates, and what waits for gradients and activations that are
on their way to host memory) are worked on by a thread of their own, the worker: an update takes milliseconds,
and what is fetched is to be handled, widened and uploaded meanwhile. The lane's thread does all the rest: it
begins and ends every transfer, owns the slots, and gives the worker tiles whose reads are over, those of a
pass in their order, a few at a time, those that are needed soonest first (`is_sooner_than` in
planning/queue.py). Of the others it takes the oldest tile whose reads are over, and looks again soon where
none are. Those that compute leave some slots to the others, and no pass waits behind one whose record another
is busy with.
Where the CPU computes, one thread does both: what is read lies where it is used, the cores are the same, and
on two of them steps took 2 to 11 % longer with a second thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from infinity.errors import EngineFailedError
from infinity.lane.base import Pass
from infinity.lane.counts import LaneTimes
from infinity.lane.tile import LaneTile
from infinity.lane.worker import LaneWorker
from infinity.planning.queue import Job, Queue
from infinity.records.record import Record
from infinity.storage.failure import Failure
from infinity.storage.memory import Pool
from infinity.storage.store import Transfer
from infinity.timeline import Timeline

logger = logging.getLogger("infinity")


_PATIENCE_S = 0.05
"""Seconds after which the lane waits for the oldest tile, if all wait for gradients or reads, or for the
oldest copy, if all that is left are copies of an accelerator: an error of their transfer, or a drive that
hangs, shows there.
"""
_LOOKS_S = 0.0005
"""Seconds between looks at what comes from an accelerator, which tells nobody."""
_READS_S = 0.001
"""Seconds for which the lane waits for one read while others may be over, or an update."""
_GIVEN_TILES, _GIVEN_NUMEL = 2, 1 << 24
"""The worker has so many tiles, or more up to so many elements; what waits behind them is put in order."""
_LEFT_TO_FETCHES = 4
"""One slot in so many is left to passes that do not compute, where there are several."""
_CLOSE_S = 30.0


class _Changed(threading.Condition):
    """A condition that knows how many threads wait for it. Under its lock."""

    waiting = 0

    def wait(self, timeout: float | None = None) -> bool:
        """As ever, counted."""
        self.waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self.waiting -= 1

    def notify_all(self) -> None:
        """As ever; quick where no thread waits."""
        if self.waiting:
            super().notify_all()


class StreamLane:
    """Runs passes on a thread of its own; see [Note: how the lane makes progress]."""

    def __init__(
        self,
        pool: Pool,
        *,
        inline: bool = False,
        apart: bool = False,
        timeline: Timeline | None = None,
        cpus: Sequence[int] = (),
    ) -> None:
        """Start it, on `cpus` if any; it owns `pool`. inline: a pass that moves nothing is run by the thread
        that submits it. apart: see [Note: two lanes].
        """
        self.lock = threading.RLock()  # entered as a lock, in C; a Ctrl-C in Condition's own methods keeps it
        """Guards all units' state."""
        self.changed = _Changed(self.lock)
        """Notified when a pass is done or finished, and when the lane fails."""
        self._also: list[threading.Condition] = []
        """Of the same lock, notified when the lane fails."""
        self.times = LaneTimes()
        self.passes: Counter[str] = Counter()
        self._pool = pool
        self._inline, self._cpus = inline, cpus
        self._timeline = timeline or Timeline()
        self._queue: Queue[Pass] = Queue()
        self._reading: deque[LaneTile] = deque()
        self._writing: deque[LaneTile] = deque()
        self._begun: list[LaneTile] = []
        """Tiles that other threads have begun, to be over some time. Under the lock."""
        self._stopping = self._rests = False
        self._waits_since_s = 0.0
        self._failure = Failure()
        self._worker: LaneWorker[LaneTile] | None = LaneWorker(LaneTile.compute, cpus) if apart else None
        self._given = self._given_numel = self._held = 0
        """Tiles, and their elements, that the worker has; slots of tiles of passes that compute."""
        self._thread = threading.Thread(target=self._run, name="infinity-lane", daemon=True)
        self._thread.start()

    # What other threads call

    def submit(self, job: Pass, *, urgent: bool = False) -> None:
        """Queue a pass; `urgent` puts it, and older passes over the same record, in front. A pass that moves
        nothing is run here and now, where the lane was made so (inline).
        """
        if (job.only_uploads and self._uploaded_here(job)) or self._queued(job, urgent=urgent):
            return
        try:
            self._queue.here.append(job)
            job.take_over()
            self._run_here(job)
        except BaseException as error:  # a record half changed is not to be trained on
            self.fail(error)
            raise
        finally:
            self._queue.here.remove(job)

    def _queued(self, job: Pass, *, urgent: bool) -> bool:
        """Queue a pass and return True, or return False for one to be run inline. A Ctrl-C leaves it queued
        or not, and nothing in between.
        """
        job.submitted(self)
        with self.lock:
            self.check_open()
            self.passes[type(job).__name__] += 1
            if job.in_memory and self.runs_here(job.record):
                return False
            try:
                self._queue.add(job, urgent=urgent)
                job.take_over()
            except BaseException:
                self._queue.forget(job)
                job.hand_back()
                raise
            self.changed.notify_all()
            return True

    def _uploaded_here(self, job: Pass) -> bool:
        """Begin the copies of a pass, unless another over its record is not finished; return whether that was
        done. An interrupt leaves nothing behind: copies are over then, and the pass is forgotten.
        """
        with self.lock:
            self.check_open()
        tiles: list[LaneTile] = []
        began = time.perf_counter()
        try:
            with self.lock:  # a field moves with it held, when the last pass over its record is over
                if not (job.only_uploads and self._queue.begin(job)):
                    return False
            job.submitted(self)
            for start, stop in job.tiles():
                reads, _ = job.reads_and_writes(start, stop)
                addresses = {name: job.record.host_address(name, start) for name in reads}
                copies = list(job.process(start, stop, addresses) or ())
                tiles.append(LaneTile(job, start, stop, None, addresses, (), (), (), copies, copies))
            with self.lock:
                self.passes[type(job).__name__] += 1
                job.progress.begin(len(tiles))
                self._begun += tiles
                self._processed(job)
        except BaseException:
            if not job.done:
                self._give_up(job)
            raise
        ended = time.perf_counter()
        self.times.worked_inline(ended - began)
        self._timeline.span("work", f"{type(job).__name__} {job.record.name}", began, ended)
        return True

    def _give_up(self, job: Pass) -> None:
        """Forget a pass whose copies were begun in part. Who waits for it until it is finished goes on."""
        try:
            job.let_copies_end()
        finally:
            with self.lock:
                self._queue.forget(job)
                job.finish()
                self.changed.notify_all()

    def runs_here(self, record: Record) -> bool:
        """Whether `submit` runs a pass over `record` that needs no transfers inline."""
        return self._inline and record not in self._queue.of_record

    def fail(self, error: BaseException, *, raised: bool = True) -> None:
        """Stop the lane because of `error`, and refuse further passes. raised: the caller raises it; else it
        is raised in the next thread that waits.
        """
        with self.lock:
            self._failure.note(error, raised=raised)
            self._stopping = True
            self._say_failed()

    def tell_failure(self, condition: threading.Condition) -> None:
        """Notify a condition of this lane's lock, too, when the lane fails: a thread that waits for nothing
        else of the lane waits for its own, and is not woken by every pass.
        """
        with self.lock:
            self._also.append(condition)

    def _say_failed(self) -> None:
        for one in (self.changed, *self._also):
            one.notify_all()

    def _run_here(self, job: Pass) -> None:
        """Do a pass over fields in host memory."""
        began = time.perf_counter()
        job.run_in_memory()
        ended = time.perf_counter()
        self.times.worked_inline(ended - began)
        if self._timeline.recording:
            self._timeline.span("work", f"{type(job).__name__} {job.record.name}", began, ended)
        with self.lock:
            job.end_processing()
            job.finish()
            if self.changed.waiting > self._rests:  # the lane's thread has nothing to do with it
                self.changed.notify_all()

    def unfinished(self, record: Record) -> list[Pass]:
        """Return the passes over a record that are not finished. Called under the lock."""
        return self._queue.unfinished(record)

    def settled(self, record: Record) -> bool:
        """Whether every pass over a record has been worked on, writes apart."""
        if self._stopping or self._failure.cause is not None or record in self._queue.of_record:
            with self.lock:
                self.check_open()
                return self._queue.settled(record)
        return True  # the thread that computes, which asks, queues all passes over it: there are none

    def settle(self, record: Record) -> None:
        """Return when every pass over a record has been worked on, writes apart. Raises as `wait` does."""
        if not self.settled(record):
            with self.lock:
                jobs = self.unfinished(record)
            for job in jobs[-1:]:
                self.wait(job)

    def promote(self, record: Record) -> None:
        """Put the queued passes over `record` in front."""
        with self.lock:
            self._queue.promote(record)

    def wait(self, job: Job, *, finished: bool = False) -> float:
        """Return when `job` is done (or finished); the seconds that took.

        Raises: what made the lane fail; EngineFailedError where the lane was closed before.
        """
        started = time.perf_counter()
        if not job.done:
            job.called_for()
        with self.lock:
            if self._worker is not None and isinstance(job, Pass):
                self._queue.promote(job.record)
            while not (job.finished if finished else job.done):
                self.check_open()
                self.changed.wait(0.5)
            self._failure.check()
        return time.perf_counter() - started

    def drain(self) -> None:
        """Return when every queued pass is finished. Raises as `wait` does."""
        with self.lock:
            while self._queue.of_record:
                self.check_open()
                self.changed.wait(0.5)
            self._failure.check()

    def close(self) -> None:
        """Stop after the transfers in flight; passes that are queued are not run any more. Never raises."""
        with self.lock:
            self._stopping = True
            self.changed.notify_all()
        if self._worker is not None and self._worker.is_this_thread:
            self._worker.leave()
            self._thread.join(_CLOSE_S)  # not for ever: this thread may hold the lock
        elif self._thread is not threading.current_thread():
            self._thread.join()
        elif self._worker is not None:
            self._worker.end(_CLOSE_S)  # nor here: what it works on may wait for the lock

    @property
    def failure(self) -> BaseException | None:
        """The error that has stopped the lane, or one that stands for it; None while it runs."""
        return self._failure.cause

    def check_open(self) -> None:
        """Raise what made the lane fail; EngineFailedError where it was closed."""
        if self._stopping or self._failure.cause is not None:
            self._failure.check()
            raise EngineFailedError("the engine was closed; its parameters are gone")

    # The lane's own thread

    def _run(self) -> None:
        try:
            if self._cpus:
                os.sched_setaffinity(0, self._cpus)  # of this thread alone
            while self._turn():
                pass
        except BaseException as error:
            logger.debug("the lane stops", exc_info=error)
            with self.lock:
                self._failure.note(error, raised=False)
        if self._worker is not None:
            self._worker.end()
        self._drain_transfers()
        with self.lock:
            self._say_failed()

    def _turn(self) -> bool:
        """Make the next bit of progress; False when it is time to stop."""
        if self._stopping:
            return False
        if self._begun:  # what comes a moment later, the next turn sees
            with self.lock:
                self._writing.extend(self._begun)
                self._begun.clear()
                self._waits_since_s = 0.0
        if self._worker is not None:
            self._take_worked(self._worker)
        self._reap(block=False)
        self._admit()
        if self._reading:
            tile = self._next()
            if tile is not None:
                self._work_on(tile)
        elif self._writing and not self._given and (self._ends_by_itself() or self._has_waited()):
            self._reap(block=True)
        else:  # what an accelerator copies may be behind all that computes: other work is not to wait for it
            self._rest(_LOOKS_S if self._writing or self._given else 1.0)
        return True

    def _take_worked(self, worker: LaneWorker[LaneTile]) -> None:
        """Begin the writes of what the worker is done with."""
        while (tile := worker.take()) is not None:
            self._given -= 1
            self._given_numel -= tile.numel
            self._begin_writes(tile)

    def _ends_by_itself(self) -> bool:
        """Whether the oldest tile waits for the drive alone, and there is nothing else to look at."""
        return self._worker is None and not self._writing[0].more

    def _has_waited(self) -> bool:
        """Whether the lane has found nothing to do for _PATIENCE_S, which then begin anew."""
        now = time.perf_counter()
        self._waits_since_s = self._waits_since_s or now
        if now - self._waits_since_s <= _PATIENCE_S:
            return False
        self._waits_since_s = 0.0
        return True

    def _rest(self, seconds: float) -> None:
        """Wait for a pass that can be admitted, for so long at most."""
        started = time.perf_counter()
        with self.lock:
            if not (self._stopping or self._begun or (self._pool.free and self._admissible())):
                self._rests = True
                try:
                    self.changed.wait(seconds)
                finally:
                    self._rests = False
        self.times.idled(time.perf_counter() - started)

    def _admissible(self) -> Pass | None:
        """Return the pass whose tile is next: see Queue.admissible, and [Note: two lanes]."""
        if self._worker is None:
            return self._queue.admissible()
        most = self._pool.count - self._pool.count // _LEFT_TO_FETCHES
        return self._queue.admissible(passing=True, computing=self._held < most)

    def _admit(self) -> None:
        """Begin the reads of the next tiles, as far as slots go."""
        while self._pool.free:
            with self.lock:
                job = self._admissible()
                if job is None:
                    return
                tile = self._queue.next_tile(job)
                if tile is None:
                    self._processed(job)
                    continue
                job.progress.admit(self._pool.lacked_s if job.urgent else None)
            self._begin(job, *tile)

    def _next(self) -> LaneTile | None:
        """Take the oldest tile whose gradients have come, and no older one of whose pass waits for some;
        beside a worker, whose reads are over as well, or what the worker is to do next if it has little to
        do. Where there is none, wait a little and return None; or the oldest, after _PATIENCE_S.
        """
        seen: set[Pass] = set()
        late, chosen, reading = None, None, None
        for index, tile in enumerate(self._reading):
            if tile.owner in seen:
                continue
            under_way = self._under_way(tile)
            if under_way is None and tile.owner.ready:
                if self._worker is None or not tile.owner.computes:
                    return self._take_from(index)
                if chosen is None or tile.owner.is_sooner_than(self._reading[chosen].owner):
                    chosen = index
            else:
                reading = reading or under_way
                if late is None and (under_way is None or not self._given):
                    late = index
            seen.add(tile.owner)
        if chosen is not None and (self._given < _GIVEN_TILES or self._given_numel < _GIVEN_NUMEL):
            return self._take_from(chosen)
        if chosen is None and late is not None and self._has_waited():
            return self._take_from(late)
        now = time.perf_counter()
        if reading is not None:
            with contextlib.suppress(TimeoutError):  # what has failed says so again when it is waited for
                reading.wait(_READS_S)
            self.times.waited_for_read(time.perf_counter() - now)
            return None
        with self.lock:
            self.changed.wait(_LOOKS_S)
        self.times.idled(time.perf_counter() - now)
        return None

    def _take_from(self, index: int) -> LaneTile:
        tile = self._reading[index]
        del self._reading[index]
        self._waits_since_s = 0.0
        return tile

    def _under_way(self, tile: LaneTile) -> Transfer | None:
        """Return a read of a tile that the lane's thread need not wait for, since there is a worker."""
        if self._worker is None:
            return None
        return next((one for one in tile.transfers if not one.done), None)

    def _begin(self, job: Pass, start: int, stop: int) -> None:
        """Find memory for the fields of a tile, and begin to read those on NVMe."""
        record = job.record
        reads, writes = job.reads_and_writes(start, stop)
        addresses: dict[str, int] = {}
        slotted: list[str] = []
        for name in dict.fromkeys((*reads, *writes)):
            address = job.address(name, start)
            if address is None:
                slotted.append(name)
            else:
                addresses[name] = address
        reads = job.ordered([name for name in reads if not record.in_host(name)])
        stored = job.ordered([name for name in writes if job.is_stored(name)])
        slot = self._pool.lease() if slotted or reads or stored else None
        self._held += slot is not None and job.computes
        window = (0, 0)
        if slot is not None:
            free = slot.address
            for name in slotted:
                addresses[name] = free
                free += record.tile_nbytes(name, stop - start)
            window = free, slot.address + slot.nbytes - free
        changes = [name for name in writes if name not in stored]
        tile = LaneTile(job, start, stop, slot, addresses, reads, stored, changes)
        self._reading.append(tile)  # first: what has begun is waited for, even if the next cannot begin
        tile.begin_reads(window)

    def _work_on(self, tile: LaneTile) -> None:
        try:
            self._work(tile)
        except BaseException:
            self._reading.append(tile)  # its other transfers are waited for, before its memory is given back
            raise

    def _work(self, tile: LaneTile) -> None:
        """Wait for a tile's reads, and have its work done."""
        began = time.perf_counter()
        for transfer in tile.transfers:
            transfer.wait()
        self.times.waited_for_read(time.perf_counter() - began)
        self._note(tile, "read", tile.reads)
        if self._worker is not None and tile.owner.computes:
            self._given += 1
            self._given_numel += tile.numel
            self._worker.give(tile)
            return
        tile.compute()
        self._begin_writes(tile)

    def _begin_writes(self, tile: LaneTile) -> None:
        """Begin the writes of a tile that was worked on."""
        job = tile.owner
        self._writing.append(tile)  # first: what has begun is waited for, even if the next cannot begin
        tile.begin_writes()
        began, ended = tile.worked_s
        self.times.worked(ended - began)
        if self._timeline.recording:
            self._timeline.span("work", f"{type(job).__name__} {job.record.name}", began, ended)
        with self.lock:
            if job.progress.worked_on(ended):
                self._processed(job)

    def _note(self, tile: LaneTile, lane: str, names: Sequence[str]) -> None:
        """Put a tile's transfers, now over, into the timeline."""
        if not self._timeline.recording:
            return
        record = tile.owner.record
        for name, transfer in zip(names, tile.transfers, strict=False):
            nbytes = record.tile_nbytes(name, tile.stop - tile.start)
            ended_s = transfer.ended_s
            if ended_s is not None:
                self._timeline.span(lane, f"{record.name}.{name}", transfer.began_s, ended_s, nbytes)

    def _note_more(self, tile: LaneTile) -> None:
        """Put what the pass itself has moved into the timeline."""
        job = tile.owner
        for transfer in tile.more if self._timeline.recording else ():
            if transfer.ended_s is not None:
                nbytes = job.record.schema.width * (tile.stop - tile.start)
                self._timeline.span(job.moves, job.record.name, transfer.began_s, transfer.ended_s, nbytes)

    def _reap(self, *, block: bool) -> None:
        """Give back the slots of tiles whose writes are over; with `block`, wait for the oldest."""
        if block:
            started = time.perf_counter()
            self._end(self._writing[0])
            self.times.waited_for_write(time.perf_counter() - started)
        for tile in [one for one in self._writing if one.is_over]:
            self._end(tile)

    def _end(self, tile: LaneTile) -> None:
        for transfer in tile.transfers:
            transfer.wait()
        self._note(tile, "write", tile.writes)
        self._note_more(tile)
        if tile.slot is not None:
            self._pool.give_back(tile.slot)
            self._held -= tile.owner.computes
        with self.lock:
            tile.owner.progress.tile_over()
            self._finish_if_over(tile.owner)
        self._writing.remove(tile)

    def _processed(self, job: Pass) -> None:
        for name in job.adopts:
            job.record.adopt(name)
        job.end_processing()
        self._finish_if_over(job)
        self.changed.notify_all()

    def _finish_if_over(self, job: Pass) -> None:
        if self._queue.retire_if_over(job):
            job.finish()
            self.changed.notify_all()

    def _drain_transfers(self) -> None:
        """Wait for transfers in flight, so that slots may be freed. Their errors are only logged: the lane
        has stopped because of an earlier one.
        """
        worked = () if self._worker is None else self._worker.left()
        for tile in (*self._reading, *worked, *self._writing, *self._begun):
            for transfer in (*tile.transfers, *tile.more):
                try:
                    transfer.wait()
                except Exception as error:  # noqa: BLE001
                    logger.debug("after the lane stopped: %s", error)

"""A machine that only keeps time: a disk, a link, cores, and the lane that moves records. Pure: no torch, no
I/O.

[Note: servers]
Reads, writes, the lane's work, collectives and computing are *servers*, each serving one demand after the
other at a speed that depends on who else is busy: a disk that reads and writes at once does the mix, half
each, and is slower while the cores compute, for which the thread that asks it waits. That thread takes a core
for some time for every byte, and as each core has its share of an operation, all of them wait until it is
free again. Cores that compute and update at once do either at some share of its speed. What the lane does for
each request of a tile ("asking": Python, and waking the disk's thread) is a server of its own: it disturbs
computing otherwise than updates do. Where an accelerator computes, its link is two servers, "up" and "down",
and the thread that launches its work one more, "launch" (see simulated_device); "work" is then the thread
that computes updates, and "handling" the lane's. Updates are as fast as host memory moves their records, so
they lose what the link's copies take of that. Time jumps to whatever ends next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from infinity.planning.bottleneck import Speed
from infinity.planning.moments import NOW, Moment
from infinity.planning.queue import Job, Queue, QueuedPass

_LEAST_OF_CORES = 0.1
"""That computing has of its cores, whatever the disk takes: with nothing, a forecast would never end."""
GIVEN_TILES = 2
"""That a thread which computes has at once; what waits behind them is put in order."""
LEFT_TO_FETCHES = 4
"""One slot in so many is left to passes that do not compute, where there are several; see lane/lane.py."""
_LEAST_OF_MEMORY = 0.25
"""That updates have of host memory, whatever is copied: rates of several machines may not go together."""
SERVERS = ("read", "write", "asking", "handling", "work", "link", "compute", "launch", "up", "down")


@dataclass(frozen=True, slots=True)
class Disk:
    """What a disk does, in bytes per second: a bound.Speed."""

    read: float
    write: float
    mixed: float
    """Both at once, together."""
    beside: float = 1.0
    """How fast it is, of that, while every core computes."""
    taken: float = 0.0
    """Seconds of a core that a byte takes."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does per second, for one rank; infinity where something costs nothing."""

    disk: Speed
    update: float = math.inf
    """Elements that the update's kernel steps."""
    checked: float = math.inf
    """Bytes that are hashed, after a read and before a write."""
    copied: float = math.inf
    """Bytes that are copied from one place in memory, or on the device, to another."""
    link: float = math.inf
    """Bytes of collectives that a rank receives."""
    shared: bool = True
    """Whether the lane's work takes the cores that compute."""
    computing: float = 0.5
    """How fast these then compute, of what they do undisturbed: less than half where threads spin while they
    wait for each other, as torch's do."""
    working: float = 0.5
    """How fast the lane then works."""
    request_s: float = 0.0
    """Seconds of the lane for each request of a tile, whatever its bytes."""
    asking: float = 0.5
    """How fast that goes while others compute."""
    computing_asked: float = 0.5
    """How fast these then compute."""
    moving: float = 1.0
    """How fast the disk is while these compute."""
    moved_s: float = 0.0
    """Seconds of a core that the disk's thread takes for each byte."""
    use_s: float = 0.0
    """Seconds of the thread that computes for each use of a unit that is moved: hooks and gradients."""
    launch_s: float = 0.0
    """Seconds of that thread in which it launches what an accelerator computes in a use of a unit."""
    up: float = math.inf
    """Bytes from host memory to an accelerator."""
    down: float = math.inf
    """Bytes from an accelerator to host memory."""
    device_update: float = math.inf
    """Elements of records that live on an accelerator that it steps."""
    memory: float = math.inf
    """Bytes that host memory moves: what copies to and from an accelerator take of it, updates there lack."""


class Clock:
    """The time, and what the servers have to do; see [Note: servers]."""

    def __init__(self, rates: Rates) -> None:
        """At 0 s, with nothing to do."""
        self.now = 0.0
        self.busy_s: dict[str, float] = dict.fromkeys(SERVERS, 0.0)
        """Seconds in which each server was busy."""
        self._rates, self._disk = rates, rates.disk
        self._links = {"link": rates.link, "up": rates.up, "down": rates.down}
        self._queues: dict[str, deque[tuple[float, Callable[[], None]]]] = {name: deque() for name in SERVERS}
        self._left = dict.fromkeys(SERVERS, 0.0)
        """Of the demand that is served."""
        self._speeds: tuple[tuple[str, float], ...] | None = ()
        """Of the servers that are busy; None where others are than when that was found."""

    def serve(self, server: str, amount: float, then: Callable[[], None], *, urgent: bool = False) -> None:
        """Ask a server for `amount` (bytes, or seconds of "work" and "compute"), and call `then` when that is
        done; urgent: right behind what is being served.
        """
        queue = self._queues[server]
        if not queue:
            self._left[server], self._speeds = amount, None
        queue.insert(1 if urgent else len(queue), (amount, then))

    def advance(self) -> bool:
        """Go to the next moment at which something ends; False if nothing is under way."""
        if self._speeds is None:
            self._speeds = tuple(self._of_busy().items())
        if not self._speeds:
            return False
        left = self._left
        passed, first = math.inf, ""
        for name, speed in self._speeds:
            ends = left[name] / speed
            if ends < passed or not first:
                passed, first = ends, name
        if passed:  # else what costs nothing is over: an infinite speed times no time is no number
            self.now += passed
            for name, speed in self._speeds:
                left[name] -= speed * passed
                self.busy_s[name] += passed
        queue = self._queues[first]
        _, then = queue.popleft()
        if queue:
            left[first] = queue[0][0]
        else:
            self._speeds = None
        then()
        return True

    def run_until(self, over: Callable[[], bool]) -> None:
        """Let the time pass until something is over.

        Raises: AssertionError where nothing is under way that could end it.
        """
        while not over():
            if not self.advance():
                raise AssertionError(f"expected an end of a wait, got a clock at rest at {self.now} s")

    def _of_busy(self) -> dict[str, float]:
        """Return the speed of each server that is busy."""
        busy = {name: 1.0 for name, queue in self._queues.items() if queue}
        busy |= self._of_disk(busy)
        for name, speed in self._links.items():
            if name in busy:
                busy[name] = speed
        if self._rates.shared and "work" in busy and "compute" in busy:
            busy["work"], busy["compute"] = self._rates.working, self._rates.computing
        elif self._rates.shared and "asking" in busy and "compute" in busy:
            busy["asking"], busy["compute"] = self._rates.asking, self._rates.computing_asked
        moved = sum(speed for name, speed in busy.items() if name in ("read", "write"))
        if self._rates.shared and "compute" in busy and moved:
            busy["compute"] *= max(_LEAST_OF_CORES, 1 - moved * self._rates.moved_s)
        copied = sum(speed for name, speed in busy.items() if name in ("up", "down"))
        if "work" in busy and copied and self._rates.memory < math.inf:
            busy["work"] *= max(_LEAST_OF_MEMORY, 1 - copied / self._rates.memory)
        return busy

    def _of_disk(self, busy: Collection[str]) -> dict[str, float]:
        """Return the speed of reads and of writes, where these are among what is busy."""
        disk, both = self._disk, "read" in busy and "write" in busy
        alone = {"read": disk.read, "write": disk.write}
        waits = self._rates.shared and "compute" in busy
        share = self._rates.moving if waits else 1.0
        return {name: share * (disk.mixed / 2 if both else alone[name]) for name in alone if name in busy}


class SimulatedPass(QueuedPass[int]):
    """One walk over a unit's record, tile by tile; `record` is the unit's index."""

    def __init__(
        self,
        unit: int,
        tiles: int,
        read_nbytes: float,
        work_s: float,
        written_nbytes: float,
        asked_s: float = 0.0,
        arriving: Moment = NOW,
        upload: Callable[[], Moment] | None = None,
        *,
        computes: bool = False,
        deferrable: bool = False,
    ) -> None:
        """tiles: how many. The rest is of each tile; asked_s: the lane's time for its requests. arriving:
        what the lane's thread waits for before it works on one. upload: begins to bring one to a device.
        computes, deferrable: see QueuedPass.
        """
        super().__init__(unit)
        self.read_nbytes, self.work_s, self.written_nbytes = read_nbytes, work_s, written_nbytes
        self.asked_s, self.arriving, self.upload = asked_s, arriving, upload
        self.tile_count = tiles
        self._computes, self._deferrable = computes, deferrable

    @property
    def computes(self) -> bool:
        """See QueuedPass."""
        return self._computes

    @property
    def deferrable(self) -> bool:
        """See QueuedPass."""
        return self._deferrable

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Number them: what they hold is all the same."""
        return ((tile, tile + 1) for tile in range(self.tile_count))


@dataclass(slots=True, eq=False)
class _SimulatedTile:
    owner: SimulatedPass
    slot: bool
    read: bool = False
    written: bool = False
    uploaded: Moment = NOW

    @property
    def ready(self) -> bool:
        """Whether the gradients that it needs have come."""
        return self.owner.arriving.over

    @property
    def over(self) -> bool:
        """Whether nothing of it is under way any more."""
        return self.written and self.uploaded.over


class SimulatedLane:
    """The turns of lane/lane.py's thread, with the same queue, on a simulated clock."""

    def __init__(self, clock: Clock, slots: int, *, inline: bool = False, apart: bool = False) -> None:
        """Idle, with all its slots free. inline: a pass that moves nothing is run by the thread that submits
        it. apart: what computes has a thread of its own, see [Note: two lanes] in lane/lane.py.
        """
        self._clock = clock
        self._count = self._free = slots
        self._held = 0
        """Slots of tiles of passes that compute."""
        self._given = 0
        """Tiles that the thread that computes has."""
        self._inline, self._apart = inline, apart
        self._inline_s = 0.0
        self._queue: Queue[SimulatedPass] = Queue()
        self._reading: deque[_SimulatedTile] = deque()
        self._writing: deque[_SimulatedTile] = deque()
        self._awaited: _SimulatedTile | None = None
        """What the lane's thread waits for, or works on; None while it is idle."""

    def submit(self, job: SimulatedPass, *, urgent: bool = False) -> None:
        """Queue a pass, an urgent one in front; or run it inline."""
        job.submitted(self)
        moved = job.read_nbytes or job.written_nbytes
        if self._inline and not moved and job.record not in self._queue.of_record:
            self._inline_s += job.work_s * job.tile_count
            job.end_processing()
            job.finish()
            return
        if self._uploaded_here(job):
            return
        self._queue.add(job, urgent=urgent)
        self._turn()
        if not job.arriving.over:
            job.arriving.call(self._turn)

    def _uploaded_here(self, job: SimulatedPass) -> bool:
        """Begin a pass that only uploads, unless one over its unit is unfinished; return whether it is."""
        if job.upload is None or job.read_nbytes or job.written_nbytes or job.work_s:
            return False
        if not self._queue.begin(job):
            return False
        job.progress.begin(job.tile_count)
        tiles = [_SimulatedTile(job, slot=False, read=True, written=True) for _ in range(job.tile_count)]
        for tile in tiles:
            tile.uploaded = job.upload()
        self._writing.extend(tiles)
        job.end_processing()
        for tile in tiles:
            tile.uploaded.call(partial(self._may_be_over, tile))
        return True

    def take_inline_s(self) -> float:
        """Return the seconds of passes run inline since this was asked, which the thread has to compute."""
        seconds, self._inline_s = self._inline_s, 0.0
        return seconds

    def wait(self, job: Job) -> None:
        """Let the time pass until `job` is done."""
        if self._apart and isinstance(job, SimulatedPass):
            self._queue.promote(job.record)
        self._clock.run_until(lambda: job.done)

    def promote(self, record: int) -> None:
        """Put the queued passes over a unit in front."""
        self._queue.promote(record)

    def settled(self, record: int) -> bool:
        """Whether every pass over a unit was worked on."""
        return self._queue.settled(record)

    def busy(self, record: int) -> bool:
        """Whether a pass over a unit is unfinished."""
        return record in self._queue.of_record

    def _turn(self) -> None:
        """Do what the lane's thread does until it has to wait: reap, admit, and work on the oldest tile."""
        while self._awaited is None:
            for ended in [one for one in self._writing if one.over]:
                self._writing.remove(ended)
                self._over(ended)
            self._admit()
            tile = self._next()
            if tile is not None:
                self._take(tile)
            elif not self._reading and self._writing and not self._apart:
                if self._writing[0].owner.upload is not None:
                    return
                self._awaited = self._writing[0]
            else:
                return

    def _next(self) -> _SimulatedTile | None:
        """Take the oldest tile whose pass need not wait for gradients, if there is one; beside a thread that
        computes, one whose reads are over, or what that is to do next if it has little to do.
        """
        seen: set[SimulatedPass] = set()
        chosen: _SimulatedTile | None = None
        for tile in self._reading:
            if tile.owner not in seen and tile.ready and (tile.read or not self._apart):
                if not (self._apart and tile.owner.computes):
                    chosen = tile
                    break
                if self._given < GIVEN_TILES and (chosen is None or tile.owner.is_sooner_than(chosen.owner)):
                    chosen = tile
            seen.add(tile.owner)
        if chosen is not None:
            self._reading.remove(chosen)
        return chosen

    def _take(self, tile: _SimulatedTile) -> None:
        """Have a tile worked on, now or as soon as it is read."""
        self._awaited = tile
        if tile.read:
            self._ask(tile)

    def _admissible(self) -> SimulatedPass | None:
        if not self._apart:
            return self._queue.admissible()
        most = self._count - self._count // LEFT_TO_FETCHES
        return self._queue.admissible(passing=True, computing=self._held < most)

    def _admit(self) -> None:
        while self._free and (job := self._admissible()) is not None:
            self._queue.next_tile(job)
            job.progress.admit(None)
            tile = _SimulatedTile(job, slot=bool(job.read_nbytes or job.written_nbytes))
            self._free -= tile.slot
            self._held += tile.slot and job.computes
            self._reading.append(tile)
            if job.read_nbytes:
                self._clock.serve("read", job.read_nbytes, partial(self._was_read, tile), urgent=job.urgent)
            else:
                tile.read = True

    def _was_read(self, tile: _SimulatedTile) -> None:
        tile.read = True
        if tile is self._awaited:
            self._ask(tile)
        if self._apart:
            self._turn()

    def _ask(self, tile: _SimulatedTile) -> None:
        """Let the lane's thread begin a tile's requests, and have the tile worked on."""
        if tile.owner.asked_s:
            self._clock.serve("asking", tile.owner.asked_s, partial(self._asked, tile))
        else:
            self._work(tile)

    def _asked(self, tile: _SimulatedTile) -> None:
        self._work(tile)
        self._turn()

    def _work(self, tile: _SimulatedTile) -> None:
        worked = partial(self._worked, tile)
        if not self._apart:
            self._clock.serve("work", tile.owner.work_s, worked)
        elif not tile.owner.computes:
            self._clock.serve("handling", tile.owner.work_s, worked)
        else:
            self._awaited = None  # the lane's thread goes on
            self._given += 1
            self._clock.serve("work", tile.owner.work_s, worked)

    def _worked(self, tile: _SimulatedTile) -> None:
        job = tile.owner
        self._given -= self._apart and job.computes
        self._writing.append(tile)
        if job.upload is not None:
            tile.uploaded = job.upload()
            tile.uploaded.call(partial(self._may_be_over, tile))
        if job.written_nbytes:
            self._clock.serve("write", job.written_nbytes, partial(self._was_written, tile))
        else:
            tile.written = True
        if job.progress.worked_on(self._clock.now):
            job.end_processing()
        if self._awaited is tile:
            self._awaited = None
        self._turn()

    def _was_written(self, tile: _SimulatedTile) -> None:
        tile.written = True
        self._may_be_over(tile)

    def _may_be_over(self, tile: _SimulatedTile) -> None:
        if not tile.over or self._awaited not in (tile, None):
            return
        self._awaited = None
        self._turn()

    def _over(self, tile: _SimulatedTile) -> None:
        self._free += tile.slot
        self._held -= tile.slot and tile.owner.computes
        tile.owner.progress.tile_over()
        if self._queue.retire_if_over(tile.owner):
            tile.owner.finish()

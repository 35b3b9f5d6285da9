"""How long a step will take: its script walked as the engine would, on a simulated machine. Pure: no torch,
no I/O.

[Note: what is simulated]
One thread computes and follows the plan. As in a running engine, residence.py decides which units are
fetched, wait or are evicted, and queue.py which pass is next; passes take their time on a simulated machine
(see simulator), through as many slots as the budget has. Several steps run one after the other, and the last
counts: what is still being written when it begins is part of it.

[Note: coarse tiles]
A model of 10^12 parameters has 10^6 tiles, and its forecast should take seconds. Beyond `TILES_MOST` a pass
is divided into fewer, larger tiles; the slots stay as many, so more is in flight than would be. That matters
little where a unit has hundreds of tiles.

[Note: an accelerator's step]
There the thread that follows the plan only launches: it goes on as soon as a unit's uploads have begun, and
the streams keep the order (see simulated_device). A slot is free when its upload is over. Updates wait
in the lane for their gradients to come down, as passes do, and are computed by a thread of its own beside the
lane's (see Note: two lanes, in lane/lane.py). A step ends when its computing is over, as where a
program reads the loss of each. Waiting is all the time in which the accelerator does not compute.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from infinity.planning.bottleneck import Bound, Load, bound
from infinity.planning.moments import NOW, Moment, all_of
from infinity.planning.outline import Act
from infinity.planning.plan import Plan
from infinity.planning.queue import NO_FETCH, Job
from infinity.planning.residence import Residence, Residency
from infinity.planning.simulated_device import SimulatedDevice
from infinity.planning.simulator import SERVERS, Clock, Rates, SimulatedLane, SimulatedPass
from infinity.planning.use_counts import Counts

TILES_MOST = 10_000
"""Tiles of a simulated step, about; see [Note: coarse tiles]."""

_STEPS = 3
_WIDE_NBYTES = 16
"""Of an element of each of the tiles that a pass which moves `hi` alone takes at once; see fetch."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What one rank moves of one unit, in bytes of NVMe: none of what is pinned in host memory."""

    numel: int
    """Elements of this rank's share."""
    hi_nbytes: int
    state_nbytes: int
    """All other fields, which an update reads and writes."""
    waiting_nbytes: int = 0
    """What it takes of the window while it waits for its use."""
    gathered_nbytes: int = 0
    """What other ranks send when it is gathered."""
    again_nbytes: int | None = None
    """What neighbours send when it is assembled once more with the same values, of whose record nothing is
    read; None where that goes as the first time.
    """
    second_nbytes: int = 0
    """Of its second part, if that is on NVMe: written when it is assembled first, read when it is again."""
    reduced_nbytes: int = 0
    """What they send when its gradient is reduced."""
    coded: bool = False
    """Whether ranks compute with what comes of its coded weights, from which no update can start."""
    in_place: bool = False
    """Whether it computes where it is pinned, or lives."""
    trainable: bool = True
    """Whether its updates take the CPU's time: those of records that live on an accelerator take next to none
    of that's.
    """
    width: int = 2
    """Bytes of an element that computes, and of its gradient."""
    derived: bool = False
    """Whether an update writes `hi` without reading it."""
    spills: tuple[tuple[int, int], ...] = ()
    """Bytes read and written when the gradient of each micro-batch is spilled; () where it is kept."""
    spilled_nbytes: int = 0
    """Of its gradient, that the update reads back."""
    state_fields: int = 3
    """How many fields there are besides `hi`: each of a tile is a request of its own."""
    lodged: bool = False
    """Whether all of it lives on the accelerator, and a use moves nothing."""
    part_there: bool = False
    """Whether this rank's part of its record lives on the accelerator and is updated there, and a use puts
    the unit together.
    """

    @property
    def computing_nbytes(self) -> int:
        """Of `hi`, wherever it lies."""
        return self.width * self.numel


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the budget allows, and how the engine goes about it."""

    tile_numel: int
    slots: int
    window_nbytes: int
    """Of units that wait for their use."""
    outgoing_nbytes: int
    """Of gradients on their way out."""
    on_host: bool = True
    """Whether the CPU computes."""
    update: str = "forward"
    device_nbytes: int | None = None
    """Of an accelerator, for all that is ours there; None for no limit."""
    early: frozenset[int] = frozenset()
    """Units whose updates the backward makes, by index, where `update` is "forward": see split."""

    def updates_early(self, unit: int) -> bool:
        """Whether the backward makes a unit's update."""
        return self.update == "backward" or unit in self.early


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step in its steady state."""

    seconds: float
    compute_s: float
    """Of the script alone, undisturbed."""
    stall_s: float
    """In which computing waited: for a unit, or for gradients to go; of an accelerator, all idle time."""
    read_nbytes: float
    written_nbytes: float
    misses: int
    """Uses whose unit had to be asked for."""
    busy_s: dict[str, float]
    """In which each server (see simulator) was busy."""
    bound: Bound
    """What the step is up against: the disk, or computing."""


def forecast(
    script: Sequence[Act], plan: Plan, units: Sequence[Moves], limits: EngineLimits, rates: Rates
) -> Forecast:
    """Walk a script, its amounts in seconds, by a plan for its uses; see [Note: what is simulated].

    units: by index. Raises: ValueError where script and plan differ in the number of uses.
    """
    uses = sum(act.verb == "use" for act in script)
    if uses != len(plan.steps):
        raise ValueError(f"a script of {uses} uses and a plan of {len(plan.steps)} are not of one step")
    walk = (_Walk if limits.on_host else _DeviceWalk)(script, plan, units, limits, rates)
    for _ in range(_STEPS):
        walk.start_counting()
        walk.step()
    return walk.result()


def predict_step(
    plan: Plan, seconds: Sequence[float], units: Sequence[Moves], limits: EngineLimits, rates: Rates
) -> Forecast:
    """Return what a step takes whose uses compute for `seconds` each: for a running engine, which knows its
    plan and has timed its uses.

    A unit's gradient comes with the last of its uses in the backward. Raises: ValueError where the uses and
    their seconds are not equally many.
    """
    if len(seconds) != len(plan.steps):
        raise ValueError(f"{len(seconds)} times for the {len(plan.steps)} uses of the plan: one for each use")
    last = {step.use.unit: position for position, step in enumerate(plan.steps)}
    script = []
    for position, (step, amount) in enumerate(zip(plan.steps, seconds, strict=True)):
        unit, phase = step.use.unit, step.use.phase
        ends = position == last[unit] and units[unit].trainable
        script += [Act("use", unit, phase), Act("compute", unit, phase, amount)]
        script.append(Act("gradient" if ends else "release", unit, phase))
    return forecast(script, plan, units, limits, rates)


class _Unit:
    """A unit of the simulated engine."""

    def __init__(self, index: int, moves: Moves) -> None:
        self.index = self.record = index
        self.moves = moves
        self.window_nbytes, self.in_place = moves.waiting_nbytes, moves.in_place
        self.residence: Residence[SimulatedPass] = Residence()
        self.pending = False
        self.assembled = False
        """Whether neighbours have second parts of the values that it has now."""
        self.allocated = self.arrived = self.left = NOW
        """When its memory on an accelerator may be written, when it may be used there, and when its last
        gradient is in host memory.
        """

    def allocate(self) -> None:
        """Memory takes no time; nor below."""

    def deallocate(self) -> None:
        pass

    def comes(self, moment: Moment) -> None:
        """Note when it may be used on an accelerator."""
        self.arrived = moment

    def leaves(self, moment: Moment) -> None:
        """Note when its gradient is in host memory."""
        self.left = moment

    def lend_to(self, job: SimulatedPass) -> None:
        pass

    @property
    def moved(self) -> bool:
        """Whether any of it lies on NVMe."""
        return bool(self.moves.hi_nbytes or self.moves.state_nbytes)


class _Window:
    """Bytes of the units that wait."""

    def __init__(self, limit_nbytes: int) -> None:
        self._free_nbytes = limit_nbytes

    def try_reserve(self, nbytes: int) -> bool:
        if nbytes > self._free_nbytes:
            return False
        self._free_nbytes -= nbytes
        return True

    def release(self, nbytes: int) -> None:
        self._free_nbytes += nbytes


class _Walk(Residency[_Unit, SimulatedPass]):
    """The thread that computes, and its residency, on a simulated clock."""

    def __init__(
        self, script: Sequence[Act], plan: Plan, units: Sequence[Moves], limits: EngineLimits, rates: Rates
    ) -> None:
        gathered = any(moves.gathered_nbytes for moves in units)
        self._clock = Clock(rates)
        lane = SimulatedLane(self._clock, limits.slots, inline=limits.on_host, apart=not limits.on_host)
        super().__init__(_Window(limits.window_nbytes), lane, on_host=limits.on_host, in_order=gathered)
        self._lane: SimulatedLane = lane
        self.units = [_Unit(index, moves) for index, moves in enumerate(units)]
        self._script, self._plan, self._limits, self._rates = script, plan, limits, rates
        moved = sum(unit.numel * (1 + 2 * unit.width / _WIDE_NBYTES) for unit in units)
        self._tile_numel = max(limits.tile_numel, math.ceil(moved / TILES_MOST))
        self._position = 0
        self._applying: deque[tuple[SimulatedPass, int]] = deque()
        self._outgoing_nbytes = 0
        self._decide_updates()
        self.start_counting()

    def _decide_updates(self) -> None:
        """The optimizer's step: where updates wait for the next fetch, they are pending from now on."""
        for act in self._script:
            if act.verb == "gradient" and not self._limits.updates_early(act.unit):
                moves = self.units[act.unit].moves
                self.units[act.unit].pending = moves.trainable or moves.part_there

    def start_counting(self) -> None:
        """Forget what was counted before."""
        self._began_s, self._stall_s, self._moved = self._clock.now, 0.0, Counter[str]()
        self.counts = Counts()
        self._clock.busy_s = dict.fromkeys(SERVERS, 0.0)

    def result(self) -> Forecast:
        """Return what was counted."""
        seconds = self._clock.now - self._began_s
        read, written = self._moved["read"], self._moved["written"]
        return Forecast(
            seconds=seconds,
            compute_s=sum(act.amount for act in self._script if act.verb == "compute"),
            stall_s=self._stalled_s(seconds),
            read_nbytes=read,
            written_nbytes=written,
            misses=self.counts.misses,
            busy_s=dict(self._clock.busy_s),
            bound=bound(Load(max(seconds, 1e-12), self._stalled_s(seconds), read, written), self._rates.disk),
        )

    def _stalled_s(self, _seconds: float) -> float:
        return self._stall_s

    def step(self) -> None:
        """Walk the script once, from the fetches that open it to the last gradient."""
        gradients: Counter[int] = Counter()
        self._position = 0
        self.begin(self._plan.opening)
        for act in self._script:
            unit = self.units[act.unit]
            if act.verb == "use":
                step = self._plan.steps[self._position]
                self._position += 1
                self._begin_use(unit)
                self.use(unit, step.fetch, keep=step.keep)
                unit.residence.use()
            elif act.verb == "compute":
                self._compute_unit(unit, act.amount)
            else:
                if act.verb == "gradient":
                    gradients[act.unit] += 1
                    self._gradient(unit, gradients[act.unit])
                if unit.residence.users and unit.residence.drop():
                    self.release(unit)
            self._compute(self._lane.take_inline_s())
        self.end()
        self._decide_updates()

    def _begin_use(self, unit: _Unit) -> None:
        if unit.moved:
            self._compute(self._rates.use_s)

    def _compute_unit(self, _unit: _Unit, seconds: float) -> None:
        self._compute(seconds)

    def _compute(self, seconds: float, server: str = "compute") -> None:
        if seconds > 0:
            over: list[bool] = []
            self._clock.serve(server, seconds, lambda: over.append(True))
            self._clock.run_until(lambda: bool(over))

    def _bring_gradient(self, unit: _Unit) -> None:
        """Bring a unit's gradient to where it is kept."""
        moves = unit.moves
        if moves.reduced_nbytes:  # and scattered; later transfers on the link wait behind it
            self._clock.serve("link", moves.reduced_nbytes, lambda: None)
        if unit.moved or not self._limits.updates_early(unit.index):  # else it stays
            self._compute(moves.width * moves.numel / self._rates.copied)

    def _gradient(self, unit: _Unit, number: int) -> None:
        """Let a unit's gradient come, the `number`th of this step."""
        moves = unit.moves
        nbytes = moves.width * moves.numel
        self._bring_gradient(unit)
        backward = self._limits.updates_early(unit.index)
        if not backward and not moves.spills:
            return
        while self._applying and self._outgoing_nbytes + nbytes > self._limits.outgoing_nbytes:
            job, held = self._applying.popleft()
            self._wait(job, "gradients")
            self._outgoing_nbytes -= held
        self._outgoing_nbytes += nbytes
        if backward:
            job = self.apply(unit, lambda: None)
        else:
            read, written = moves.spills[number - 1]
            job = self._pass(unit, read, written, 0, arriving=unit.left)
            self._lane.submit(job)
        self._applying.append((job, nbytes))

    # What Residency decides

    def _begin_fetch(self, unit: _Unit, *, urgent: bool) -> Job:
        """Bring a unit, with its pending update; the other ranks' shares of it are gathered afterwards."""
        moves = unit.moves
        sent: int | None = moves.gathered_nbytes
        if unit.pending:
            unit.pending = False
            rest = moves.state_nbytes
            read = rest + moves.spilled_nbytes + (0 if moves.derived else moves.hi_nbytes)
            written = moves.hi_nbytes + rest + moves.second_nbytes
            job = self._pass(unit, read, written, moves.numel, unit.left, uploads=True)
        else:
            again = unit.assembled and moves.again_nbytes is not None
            read, written = (moves.second_nbytes, 0) if again else (moves.hi_nbytes, moves.second_nbytes)
            job = self._pass(unit, read, written, 0, uploads=True)
            sent = moves.again_nbytes if again else sent
        unit.assembled = True
        fetch = self._gathered(job, sent) if sent else job
        self._lane.submit(job, urgent=urgent)
        return fetch

    def _has_masters(self, unit: _Unit) -> bool:
        return super()._has_masters(unit) and not unit.moves.coded

    def _gathered(self, job: SimulatedPass, nbytes: int) -> Job:
        """Return a job that is done once the other ranks' shares have come, too."""
        whole = _Gathering(self._lane)
        job.call_when_done(lambda: self._clock.serve("link", nbytes, whole.end))
        return whole

    def _make_update(self, unit: _Unit, *, resident: bool) -> SimulatedPass:
        moves, unit.assembled = unit.moves, False
        read = moves.state_nbytes + (0 if resident else moves.hi_nbytes)
        return self._pass(unit, read, moves.hi_nbytes + moves.state_nbytes, moves.numel)

    def _wait(self, job: Job, cause: str) -> None:
        before_s = self._clock.now
        job.wait()
        self._stall_s += self._clock.now - before_s

    # Passes

    def _pass(
        self,
        unit: _Unit,
        read: int,
        written: int,
        updated: int,
        arriving: Moment = NOW,
        *,
        uploads: bool = False,
    ) -> SimulatedPass:
        """Divide a walk over a unit's record into tiles; `updated`: elements that the kernel steps. arriving:
        what each waits for. uploads: whether the unit comes to where it computes.
        """
        moves, rates = unit.moves, self._rates
        wide = 1 if written else _WIDE_NBYTES // moves.width
        tiles = max(1, math.ceil(moves.numel / (self._tile_numel * wide)))
        computes = updated > 0 or (written > 0 and not uploads)  # updates, and gradients that are spilled
        if computes and not (read or written):
            tiles = 1  # what lies in memory is updated in one call
        work_s = updated / rates.update + (read + written) / rates.checked
        self._moved["read"] += read
        self._moved["written"] += written
        asked_s = rates.request_s * self._requests(moves, read, written, updated)
        upload = self._uploading(unit, tiles) if uploads else None
        of_tile = read / tiles, work_s / tiles, written / tiles
        kind = {"computes": computes, "deferrable": updated > 0 and not uploads}
        return SimulatedPass(unit.index, tiles, *of_tile, asked_s, arriving, upload, **kind)

    def _uploading(self, _unit: _Unit, _tiles: int) -> Callable[[], Moment] | None:
        """Return what begins to bring one of a unit's tiles to an accelerator."""
        return None

    @staticmethod
    def _requests(moves: Moves, read: int, written: int, updated: int) -> int:
        """Count what a tile asks the disk for: each field that lies there, read and written."""
        if not updated:
            return bool(read) + bool(written)
        of_state = moves.state_fields if moves.state_nbytes else 0
        of_hi = bool(moves.hi_nbytes) + (read >= moves.hi_nbytes + moves.state_nbytes > moves.state_nbytes)
        return 2 * of_state + of_hi + bool(moves.spilled_nbytes)


class _DeviceUnit(_Unit):
    """A unit that is used on an accelerator, whose memory it takes."""

    def __init__(
        self, index: int, moves: Moves, device: SimulatedDevice, give_way: Callable[[], bool]
    ) -> None:
        super().__init__(index, moves)
        self._device, self._give_way = device, give_way
        self.residence.lodge(stays=moves.lodged)

    def allocate(self) -> None:
        """Take memory; uploads to it wait for the computing that was queued before."""
        self._device.take(self.moves.waiting_nbytes, self._give_way)
        self.allocated = self._device.computing.queued

    def deallocate(self) -> None:
        """Give the memory back."""
        self._device.give_back(self.moves.waiting_nbytes)


class _DeviceWalk(_Walk):
    """The thread that launches, and the accelerator: see [Note: an accelerator's step]."""

    def __init__(
        self, script: Sequence[Act], plan: Plan, units: Sequence[Moves], limits: EngineLimits, rates: Rates
    ) -> None:
        super().__init__(script, plan, units, limits, rates)
        self._device = device = SimulatedDevice(self._clock, limits.device_nbytes)
        self.units = [
            _DeviceUnit(index, moves, device, self._one_gives_way) for index, moves in enumerate(units)
        ]
        self._decide_updates()

    def _one_gives_way(self) -> bool:
        return self.give_way(self.units[one.use.unit] for one in self._plan.steps[self._position :])

    def begin(self, opening: Iterable[int]) -> None:
        """Begin a step, when the computing of the one before is over."""
        super().begin(opening)
        self._device.wait(self._device.computing.queued)

    def _begin_use(self, unit: _Unit) -> None:
        self._compute(self._rates.use_s, "launch")

    def _compute_unit(self, unit: _Unit, seconds: float) -> None:
        self._compute(self._rates.launch_s, "launch")
        self._device.computing.put(seconds, unit.arrived)

    def _stalled_s(self, seconds: float) -> float:
        return max(0.0, seconds - self._clock.busy_s["compute"])

    def _has_room(self, unit: _Unit) -> bool:
        return self._device.fits(unit.moves.waiting_nbytes)

    def _gradient(self, unit: _Unit, number: int) -> None:
        """Let a unit's gradient come. That of a record that lives there is applied there, and stays; of a
        part the ranks' mean does, whose update waits for the next use.
        """
        moves, computed = unit.moves, self._device.computing.queued
        if moves.trainable:
            super()._gradient(unit, number)
        elif moves.part_there:
            self._device.take(moves.waiting_nbytes, self._one_gives_way)
            unit.leaves(self._through_link(moves.reduced_nbytes, computed))
            self._device.leaves(moves.waiting_nbytes, unit.left)
            if self._limits.updates_early(unit.index):
                unit.pending = True
                self._goes_stale(unit)
        else:
            self._device.computing.put(moves.numel / self._rates.device_update, unit.arrived)

    def _begin_fetch(self, unit: _Unit, *, urgent: bool) -> Job:
        """Bring a unit. One whose part lives there is updated, and put together from all ranks' parts, which
        the host does not wait for.
        """
        if not unit.moves.part_there:
            return super()._begin_fetch(unit, urgent=urgent)
        device = self._device
        if unit.pending:
            unit.pending = False
            device.computing.put(unit.moves.numel / self._rates.device_update, unit.left)
        unit.comes(self._through_link(unit.moves.gathered_nbytes, device.computing.queued))
        return NO_FETCH

    def _bring_gradient(self, unit: _Unit) -> None:
        """Send a unit's gradient, which the ranks sum before, to host memory when it has been computed."""
        moves, computed = unit.moves, self._device.computing.queued
        self._device.take(moves.waiting_nbytes, self._one_gives_way)
        summed = self._through_link(moves.reduced_nbytes, computed)
        unit.leaves(self._device.down.put(moves.width * moves.numel, summed))
        self._device.leaves(moves.waiting_nbytes, unit.left)

    def _through_link(self, nbytes: int, after: Moment) -> Moment:
        """Have the ranks exchange a unit's values, or its gradient, `after` something; return the end."""
        exchanged = Moment()
        if not nbytes:
            return after
        after.call(lambda: self._clock.serve("link", nbytes, exchanged.end))
        return exchanged

    def _uploading(self, unit: _Unit, tiles: int) -> Callable[[], Moment]:
        nbytes = unit.moves.width * unit.moves.numel / tiles
        left = tiles

        def upload() -> Moment:
            nonlocal left
            left -= 1
            moment = self._device.up.put(nbytes, unit.allocated)
            if not left:
                unit.comes(self._through_link(unit.moves.gathered_nbytes, moment))
            return moment

        return upload

    def _gathered(self, job: SimulatedPass, _nbytes: int) -> Job:
        """Return the job itself: the accelerator waits for the other ranks' shares, and the host does not."""
        return job

    def _make_update(self, unit: _Unit, *, resident: bool) -> SimulatedPass:
        """Return a pass that waits for the gradient, and for the values from the device if they are there."""
        moves, arriving = unit.moves, unit.left
        copied = unit.residence.processed and not moves.derived and bool(moves.hi_nbytes)
        if copied:
            arriving = all_of((arriving, self._device.down.put(moves.width * moves.numel, unit.arrived)))
        read = moves.state_nbytes + (0 if copied else moves.hi_nbytes)
        return self._pass(unit, read, moves.hi_nbytes + moves.state_nbytes, moves.numel, arriving)


class _Gathering(Job):
    """A unit is assembled from every rank's share."""

    def end(self) -> None:
        """All shares have come."""
        self.done = True

"""How long a step will take: its script walked as the engine would, on a simulated machine. Pure: no torch,
no I/O.

[Note: what is simulated]
One thread computes, and follows the plan as executor.py does: units are fetched ahead as far as the window
has room, wait for their use, and go. One lane moves records (see simulated), through as many slots as the
budget has. Several steps run one after the other, and the last counts: what is still being written when it
begins is part of it.

[Note: coarse tiles]
A model of 10^12 parameters has 10^6 tiles, and its forecast should take seconds. Beyond `TILES_MOST` a pass
is divided into fewer, larger tiles; the slots stay as many, so more is in flight than would be. That matters
little where a unit has hundreds of tiles.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from infinity.planning.bottleneck import Bound, Load, bound
from infinity.planning.outline import Act
from infinity.planning.plan import Plan
from infinity.planning.simulator import SERVERS, Clock, Lane, Rates, SimulatedPass

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
    """What other ranks send when it is gathered, and its gradient is reduced."""
    in_place: bool = False
    """Whether the CPU computes with it where it is pinned."""
    trainable: bool = True
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


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step in its steady state."""

    seconds: float
    compute_s: float
    """Of the script alone, undisturbed."""
    stall_s: float
    """In which computing waited: for a unit, or for gradients to go."""
    read_nbytes: float
    written_nbytes: float
    misses: int
    """Uses whose unit had to be asked for."""
    busy_s: dict[str, float]
    """In which each server (see simulated) was busy."""
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
    walk = _Walk(script, plan, units, limits, rates)
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


class _Walk:
    """One engine's executor, lane and clock, reduced to what takes time."""

    def __init__(
        self, script: Sequence[Act], plan: Plan, units: Sequence[Moves], limits: EngineLimits, rates: Rates
    ) -> None:
        self._script, self._plan, self._units, self._limits, self._rates = script, plan, units, limits, rates
        self._clock = Clock(rates)
        self._lane = Lane(self._clock, limits.slots)
        moved = sum(unit.numel * (1 + 2 * unit.width / _WIDE_NBYTES) for unit in units)
        self._tile_numel = max(limits.tile_numel, math.ceil(moved / TILES_MOST))
        self._fetches: dict[int, SimulatedPass] = {}
        self._lent: dict[int, SimulatedPass] = {}
        self._waiting: dict[int, int] = {}
        self._staying: set[int] = set()
        self._owed: deque[int] = deque()
        self._applying: deque[tuple[SimulatedPass, int]] = deque()
        self._outgoing_nbytes = 0
        self._pending = self._trainable() if limits.update == "forward" else set()
        self._inline_s = 0.0
        self.start_counting()

    def _trainable(self) -> set[int]:
        return {act.unit for act in self._script if act.verb == "gradient"}

    def start_counting(self) -> None:
        """Forget what was counted before."""
        self._began_s, self._stall_s, self._counts = self._clock.now, 0.0, Counter[str]()
        self._clock.busy_s = dict.fromkeys(SERVERS, 0.0)

    def result(self) -> Forecast:
        """Say what was counted."""
        seconds = self._clock.now - self._began_s
        read, written = self._counts["read"], self._counts["written"]
        return Forecast(
            seconds=seconds,
            compute_s=sum(act.amount for act in self._script if act.verb == "compute"),
            stall_s=self._stall_s,
            read_nbytes=read,
            written_nbytes=written,
            misses=self._counts["misses"],
            busy_s=dict(self._clock.busy_s),
            bound=bound(Load(max(seconds, 1e-12), self._stall_s, read, written), self._rates.disk),
        )

    def step(self) -> None:
        """Walk the script once, from the fetches that open it to the last gradient."""
        thread = self._thread()
        computing = False

        def computed() -> None:
            nonlocal computing
            computing = False

        awaited: SimulatedPass | None = None
        while True:
            while not computing and (awaited is None or awaited.processed):
                asked = next(thread, None)
                if asked is None:
                    return
                awaited = asked if isinstance(asked, SimulatedPass) else None
                if not isinstance(asked, SimulatedPass) and asked > 0:
                    computing = True
                    self._clock.serve("compute", asked, computed)
            before = self._clock.now
            if not self._clock.advance():
                raise AssertionError(f"expected an end of the wait for unit {awaited}, got a clock at rest")
            if not computing and awaited is not None:
                self._stall_s += self._clock.now - before

    # The thread that computes: yields seconds to compute, or a pass to wait for

    def _thread(self) -> Iterator[float | SimulatedPass]:
        steps = iter(self._plan.steps)
        gradients: Counter[int] = Counter()
        self._owed.extend(self._plan.opening)
        self._fetch_owed()
        for act in self._script:
            if act.verb == "use":
                step = next(steps)
                moves = self._units[act.unit]
                if moves.hi_nbytes or moves.state_nbytes:  # what is used in place passes none of it by
                    yield self._rates.use_s
                yield from self._use(act.unit, keep=step.keep)
                self._owed.extend(step.fetch)
                self._fetch_owed()
            elif act.verb == "compute":
                yield act.amount
            elif act.verb == "release":
                self._release(act.unit)
            else:
                gradients[act.unit] += 1
                yield from self._gradient(act, gradients[act.unit])
            if self._inline_s:
                yield self._inline_s
                self._inline_s = 0.0
        for unit in list(self._waiting):
            self._evict(unit)
        self._owed.clear()
        self._staying.clear()
        if self._limits.update == "forward":
            self._pending = self._trainable()

    def _use(self, unit: int, *, keep: bool) -> Iterator[float | SimulatedPass]:
        (self._staying.add if keep else self._staying.discard)(unit)
        if unit in self._lent:
            yield self._lent[unit]
        self._waiting.pop(unit, None)
        if unit not in self._fetches:
            moves = self._units[unit]
            if moves.in_place and unit not in self._pending and self._lane.settled(unit):
                return
            self._counts["misses"] += 1
            self._fetch(unit, urgent=True)
        job = self._fetches.get(unit)
        if job is not None and not job.processed:
            self._lane.promote(unit)
            yield job

    def _gradient(self, act: Act, number: int) -> Iterator[float | SimulatedPass]:
        """Let a unit's gradient come, the `number`th of this step, and nobody use the unit any more."""
        unit, moves = act.unit, self._units[act.unit]
        nbytes = moves.width * moves.numel
        if moves.gathered_nbytes:  # reduced and scattered; whoever comes next on the link waits for it
            self._clock.serve("link", moves.gathered_nbytes, lambda: None)
        backward = self._limits.update == "backward"
        moved = moves.hi_nbytes or moves.state_nbytes
        if moved or not backward:  # else the kernel takes it from where autograd has put it
            yield nbytes / self._rates.copied
        if not backward and not moves.spills:
            self._release(unit)
            return
        while self._applying and self._outgoing_nbytes + nbytes > self._limits.outgoing_nbytes:
            job, held = self._applying.popleft()
            yield job
            self._outgoing_nbytes -= held
        self._outgoing_nbytes += nbytes
        if backward:
            job = self._apply(unit)
        else:
            read, written = moves.spills[number - 1]
            job = self._pass(unit, read, written, 0)
            self._send(job)
            self._release(unit)
        self._applying.append((job, nbytes))

    # Residence

    def _fetch_owed(self) -> None:
        while self._owed:
            unit = self._owed[0]
            if unit in self._lent:
                return
            if unit not in self._fetches:
                if not self._let_wait(unit):
                    return
                self._fetch(unit)
            self._owed.popleft()

    def _let_wait(self, unit: int) -> bool:
        nbytes = self._units[unit].waiting_nbytes
        if sum(self._waiting.values()) + nbytes > self._limits.window_nbytes:
            return False
        self._waiting[unit] = nbytes
        return True

    def _fetch(self, unit: int, *, urgent: bool = False) -> None:
        """Bring a unit, with the update that is pending; what others hold of it is gathered afterwards."""
        moves = self._units[unit]
        if unit in self._pending:
            self._pending.discard(unit)
            rest = moves.state_nbytes
            read = rest + moves.spilled_nbytes + (0 if moves.derived else moves.hi_nbytes)
            job = self._pass(unit, read, moves.hi_nbytes + rest, moves.numel)
        else:
            job = self._pass(unit, moves.hi_nbytes, 0, 0)
        gathered = self._gathered(job) if moves.gathered_nbytes else job
        self._fetches[unit] = gathered
        self._send(job, urgent=urgent)

    def _gathered(self, job: SimulatedPass) -> SimulatedPass:
        """Return what is processed once the other ranks' shares have come, too."""
        whole = SimulatedPass(job.unit, 0, 0.0, 0.0, 0.0)

        def came() -> None:
            whole.end()

        nbytes = self._units[job.unit].gathered_nbytes
        job.on_processed.append(lambda: self._clock.serve("link", nbytes, came))
        return whole

    def _apply(self, unit: int) -> SimulatedPass:
        """Update in the backward, from the values on the CPU if they are there, and give them up."""
        moves = self._units[unit]
        fetched = self._fetches.pop(unit, None)
        self._staying.discard(unit)
        resident = self._limits.on_host and (fetched is not None or moves.in_place)
        read = moves.state_nbytes + (0 if resident else moves.hi_nbytes)
        job = self._pass(unit, read, moves.hi_nbytes + moves.state_nbytes, moves.numel)
        if fetched is not None and self._limits.on_host:
            self._lent[unit] = job
            job.on_processed.append(partial(self._lent.pop, unit))
        self._send(job)
        return job

    def _release(self, unit: int) -> None:
        if unit in self._staying and unit not in self._pending and self._let_wait(unit):
            return
        self._evict(unit)
        self._fetch_owed()

    def _evict(self, unit: int) -> None:
        self._waiting.pop(unit, None)
        self._fetches.pop(unit, None)

    # Passes

    def _pass(self, unit: int, read: int, written: int, updated: int) -> SimulatedPass:
        """Divide a walk over a unit's record into tiles; `updated`: elements that the kernel steps."""
        moves, rates = self._units[unit], self._rates
        wide = 1 if written else _WIDE_NBYTES // moves.width
        tiles = max(1, math.ceil(moves.numel / (self._tile_numel * wide)))
        work_s = updated / rates.update + (read + written) / rates.checked
        if not self._limits.on_host:
            work_s += moves.width * moves.numel / rates.copied
        self._counts["read"] += read
        self._counts["written"] += written
        asked_s = rates.request_s * self._requests(moves, read, written, updated)
        return SimulatedPass(unit, tiles, read / tiles, work_s / tiles, written / tiles, asked_s)

    @staticmethod
    def _requests(moves: Moves, read: int, written: int, updated: int) -> int:
        """Count what a tile asks the disk for: each field that lies there, read and written."""
        if not updated:
            return bool(read) + bool(written)
        of_state = moves.state_fields if moves.state_nbytes else 0
        of_hi = bool(moves.hi_nbytes) + (read >= moves.hi_nbytes + moves.state_nbytes > moves.state_nbytes)
        return 2 * of_state + of_hi + bool(moves.spilled_nbytes)

    def _send(self, job: SimulatedPass, *, urgent: bool = False) -> None:
        """Let the lane do a pass, or, where nothing is moved, do it here."""
        moved = job.read_nbytes or job.written_nbytes
        if moved or not self._limits.on_host or self._lane.busy(job.unit):
            self._lane.submit(job, urgent=urgent)
            return
        self._inline_s += job.work_s * job.tiles
        job.end()
        for call in job.on_processed:
            call()

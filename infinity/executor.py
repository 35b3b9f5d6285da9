"""Residence: which units are on the device, from the moment they are fetched until the last user lets go.

Walks the plan as uses happen: each use of a unit starts the fetches that the plan put there. A use that the
plan did not
foresee is the same thing without foresight: it is fetched on demand and counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from infinity.device import Device
from infinity.errors import UnsupportedError
from infinity.lanes import StreamLane
from infinity.memory import Ledger
from infinity.passes import FetchPass
from infinity.plan import Plan, make_plan
from infinity.trace import Phase, Use
from infinity.unit import Unit

_REPLAN_SHARE = 0.1
"""A new plan is made when more than this share of a step's uses was not as planned."""

_NEAR = 64
"""Uses. A use this close ahead in the plan may come early."""

_TRACE_LIMIT = 1 << 20
"""Uses. Beyond that (a long generation without a step) a step is followed but not remembered."""


@dataclass(slots=True)
class Counts:
    """What happened since the start: uses, and how they were met."""

    uses: int = 0
    hits: int = 0
    """Uses that found the unit resident, or on its way."""
    misses: int = 0
    """Uses that had to ask for it."""
    divergences: int = 0
    """Uses that were not the next one of the plan."""
    stall_s: float = 0.0
    """Seconds that computing waited for a unit."""
    flush_s: float = 0.0
    """Seconds that computing waited for updates that had to be applied early."""
    steps: int = 0
    plans: int = 0


class Cursor:
    """Where in the plan the step is, and what was used so far.

    Uses close by may come in another order than planned (the first plan only guesses the order in a block):
    they are taken as they come. A use that is not close by is a divergence: the cursor jumps to where the
    plan has it next.
    """

    def __init__(self) -> None:
        """Without a plan."""
        self.plan: Plan | None = None
        self.position = 0
        """The first use of the plan that has not come."""
        self.trace: list[Use] = []
        self.reordered = 0
        """Uses of the step that were not the next of the plan."""
        self.divergences = 0
        self._early: set[int] = set()
        self._opened = False
        self._places: dict[Use, list[int]] = {}

    def follow(self, plan: Plan) -> None:
        """Take a plan; its opening has not been fetched."""
        self.plan = plan
        places = defaultdict(list)
        for position, step in enumerate(plan.steps):
            places[step.use].append(position)
        self._places = dict(places)
        self.restart()
        self._opened = False

    def restart(self) -> None:
        """Go back to the start of the plan, whose opening is fetched now; forget the uses of the step."""
        self._opened = True
        self._early.clear()
        self.position = 0
        self.trace = []
        self.reordered = 0

    def upcoming(self) -> Iterator[Use]:
        """Return the plan's uses from here to the end of the step."""
        if self.plan is not None:
            for position in range(self.position, len(self.plan.steps)):
                yield self.plan.steps[position].use

    def advance(self, use: Use) -> tuple[tuple[int, ...], bool, bool]:
        """Take note of a use; return the fetches that begin with it, whether its unit stays, and whether it
        was foreseen.
        """
        if len(self.trace) < _TRACE_LIMIT:
            self.trace.append(use)
        places = self._places.get(use, ())
        if self.plan is None or not places:
            return (), False, False
        place = next(
            (one for one in places[bisect_left(places, self.position) :] if one not in self._early), None
        )
        foreseen = self._opened and place is not None and place <= self.position + _NEAR
        if place is None:
            place = places[0]
        self.reordered += place != self.position
        if foreseen:
            self._early.add(place)
            while self.position in self._early:
                self._early.discard(self.position)
                self.position += 1
        else:
            self.divergences += self._opened
            self._opened = True
            self._early.clear()
            self.position = place + 1
        step = self.plan.steps[place]
        return step.fetch, step.keep, foreseen


class Executor:
    """Owns the units' residence. Called from the thread that computes; the lane calls back under its lock."""

    def __init__(self, lane: StreamLane, device: Device) -> None:
        """Start without units."""
        self.units: list[Unit] = []
        self.counts = Counts()
        self.cursor = Cursor()
        self._lane = lane
        self._device = device
        self._tile_numel = 0
        self._ahead = Ledger(0)
        self._owed: deque[int] = deque()
        self._staying: set[Unit] = set()

    def open(self, units: list[Unit], tile_numel: int, ahead_nbytes: int) -> None:
        """Take the units of a finished model, in the order of its modules; a first plan assumes they run in
        that order.
        """
        self.units = units
        self._tile_numel = tile_numel
        self._ahead = Ledger(ahead_nbytes)
        order = [unit.index for unit in units]
        guess = [
            *(Use(Phase.FORWARD, one) for one in order),
            *(Use(Phase.BACKWARD, one) for one in reversed(order)),
        ]
        self._follow(tuple(guess))

    @property
    def ahead_nbytes(self) -> int:
        """Bytes of units that wait for their use."""
        return self._ahead.held_nbytes

    def _follow(self, trace: tuple[Use, ...]) -> None:
        self.cursor.follow(
            make_plan(trace, [unit.resident_nbytes for unit in self.units], self._ahead.limit_nbytes)
        )
        self.counts.plans += 1

    # Uses

    def hold(self, unit: Unit, phase: Phase) -> None:
        """Make `unit` resident and its parameters real, until as many `drop`s."""
        if not unit.attached:
            self._use(unit, phase)
            unit.attach()
        unit.users += 1

    def hold_aside(self, unit: Unit) -> None:
        """Like `hold`, for a use that is no part of a step."""
        if not unit.attached:
            self._staying.discard(unit)
            self.make_resident(unit)
            unit.attach()
        unit.users += 1

    def _use(self, unit: Unit, phase: Phase) -> None:
        self.counts.uses += 1
        unit.uses += 1
        fetch, keep, foreseen = self.cursor.advance(Use(phase, unit.index))
        if not foreseen:
            self.counts.divergences = self.cursor.divergences
            self._look_again(but=unit)
        if keep:
            self._staying.add(unit)
        else:
            self._staying.discard(unit)
        self.make_resident(unit)
        if foreseen:
            self._owed.extend(fetch)
        self.fetch_owed()

    def _look_again(self, but: Unit) -> None:
        """After a use that was not the planned one: want what the plan has next from here, and give up what
        else waits.
        """
        wanted: dict[int, None] = {}
        room = self._ahead.limit_nbytes
        for use in self.cursor.upcoming():
            if use.unit in wanted or use.unit == but.index:
                continue
            room -= self.units[use.unit].resident_nbytes
            if room < 0:
                break
            wanted[use.unit] = None
        for unit in self.units:
            if unit.waiting and unit is not but and unit.index not in wanted:
                self._evict(unit)
        self._owed = deque(wanted)

    def make_resident(self, unit: Unit) -> None:
        """Return when `unit` holds its current values on the device. It stays until it is dropped."""
        if unit.lent is not None:
            self.counts.stall_s += self._lane.wait(unit.lent)
        if unit.waiting:
            unit.waiting = False
            self._ahead.release(unit.resident_nbytes)
        if unit.fetch is None:
            self.counts.misses += 1
            self._fetch(unit, urgent=True)
        else:
            self.counts.hits += 1
        job = unit.fetch
        if job is not None and not job.processed:
            self._lane.promote(unit.record)
            self.counts.stall_s += self._lane.wait(job)
        self._device.arrived()

    def _fetch(self, unit: Unit, *, urgent: bool) -> None:
        unit.allocate()
        job = FetchPass(unit, self._device, self._tile_numel)
        unit.fetch = job
        self._lane.submit(job, urgent=urgent)

    def fetch_owed(self) -> None:
        """Start the fetches that the plan asked for, as far as there is room for what waits."""
        while self._owed:
            unit = self.units[self._owed[0]]
            if unit.lent is not None:
                return
            if unit.fetch is None:
                if not self._ahead.try_reserve(unit.resident_nbytes):
                    return
                unit.waiting = True
                self._fetch(unit, urgent=False)
            self._owed.popleft()

    def drop(self, unit: Unit) -> None:
        """End one `hold`; the last one releases the unit, or keeps it waiting where the plan says so."""
        unit.users -= 1
        if unit.users:
            return
        unit.detach()
        if unit.successor is not None:
            job, unit.successor = unit.successor, None
            self._lend(unit, job)
            return
        if unit in self._staying and not unit.pending and self._ahead.try_reserve(unit.resident_nbytes):
            unit.waiting = True
            return
        self._evict(unit)
        self.fetch_owed()

    def _evict(self, unit: Unit) -> None:
        """Take a unit that nobody uses off the device."""
        if unit.lent is not None:  # the pass that works on the storage releases it
            self._lane.wait(unit.lent)
        job = unit.fetch
        if job is None:
            return
        if not job.processed:
            self._lane.wait(job)
        if unit.waiting:
            unit.waiting = False
            self._ahead.release(unit.resident_nbytes)
        unit.fetch = None
        unit.deallocate()

    def _evict_waiting(self, *, only_pending: bool = False) -> None:
        for unit in self.units:
            if unit.waiting and (unit.pending or not only_pending):
                self._evict(unit)

    def apply(self, unit: Unit, on_processed: Callable[[], None]) -> FetchPass:
        """Apply a unit's pending updates in the backward, from the values on the CPU if they are there; then
        release it.
        """
        if unit.fetch is not None and not unit.fetch_processed:
            self._lane.wait(unit.fetch)  # else it would go on standing for values of before the update
        on_cpu = self._device.torch_device.type == "cpu"
        resident = on_cpu and unit.fetch_processed and unit.lent is None
        job = FetchPass(unit, self._device, self._tile_numel, upload=False, resident=resident)
        job.on_processed = on_processed
        if not resident:
            self._lane.submit(job)
        elif unit.users:
            unit.successor = job
        else:
            self._lend(unit, job)
        return job

    def _lend(self, unit: Unit, job: FetchPass) -> None:
        """Leave the storage of a unit that nobody uses to a pass that starts from its values, and releases
        it.
        """
        unit.lent = job
        if unit.waiting:
            unit.waiting = False
            self._ahead.release(unit.resident_nbytes)
        before = job.on_processed

        def give_back() -> None:
            unit.lent = unit.fetch = None
            unit.deallocate()
            if before:
                before()

        job.on_processed = give_back
        self._lane.submit(job)

    # Steps

    def flush(self, unit: Unit) -> None:
        """Apply a unit's pending updates now, whether or not it is needed."""
        if not unit.pending:
            return
        if unit.fetch is not None and not unit.users and unit.lent is None:
            self._evict(unit)
        self._lane.submit(FetchPass(unit, self._device, self._tile_numel, upload=False))

    def changed(self, unit: Unit) -> None:
        """A unit's values are about to be replaced in its record: what is resident of it is stale."""
        if unit.users:
            raise UnsupportedError(
                f"{unit.name}: its parameters are in use and cannot be replaced. Do so outside forward and "
                "gathered()."
            )
        self._evict(unit)
        unit.version += 1

    def close_step(self) -> None:
        """The optimizer has decided its updates: forget what was fetched before, and begin the next step's
        opening.
        """
        cursor = self.cursor
        if not cursor.trace:  # a further optimizer's step: what it changed is stale, the rest is on its way
            self._evict_waiting(only_pending=True)
            return
        self.counts.steps += 1
        self._owed.clear()
        self._evict_waiting()
        if cursor.plan is None or cursor.reordered > _REPLAN_SHARE * max(1, len(cursor.trace)):
            self._follow(tuple(cursor.trace))
        cursor.restart()
        for unit in self.units:
            unit.forward_uses = 0
        if cursor.plan is not None:
            self._owed.extend(cursor.plan.opening)
        self.fetch_owed()

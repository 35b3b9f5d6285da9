"""Residence: which units are on the device, from the moment they are fetched until the last user lets go.

Walks the plan as uses happen: each use of a unit starts the fetches that the plan put there. A use that the
plan did not
foresee is the same thing without foresight: it is fetched on demand and counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from infinity.device.blocks import Blocks, DeviceBlocks, HostBlocks
from infinity.device.device import Device
from infinity.errors import UnsupportedError
from infinity.lane.counts import Counts
from infinity.lane.fetch import FetchPass
from infinity.lane.lane import StreamLane
from infinity.lane.queue import THERE, Awaited, Pass
from infinity.planning.cursor import Cursor
from infinity.planning.frequency import Frequencies
from infinity.planning.plan import Plan, make_plan
from infinity.planning.trace import Phase, Use
from infinity.storage.memory import Ledger
from infinity.timeline import Timeline
from infinity.units.changes import would_be_lost
from infinity.units.unit import Unit

_REPLAN_SHARE = 0.1
"""A new plan is made when more than this share of a step's uses was not as planned."""


class Assembler(Protocol):
    """What several ranks do together for a unit that is fetched."""

    def assemble(self, unit: Unit, job: Pass) -> Awaited:
        """Have the ranks put a unit together, of which `job` fetches this rank's share."""

    def check(self, plan: Plan) -> None:
        """See that the ranks have the same plan for the step that begins.

        Raises: RanksError naming what differs.
        """


class Executor:
    """Owns the units' residence. Called from the thread that computes; the lane calls back under its lock."""

    def __init__(
        self, lane: StreamLane, device: Device, timeline: Timeline, assembler: Assembler | None
    ) -> None:
        """Start without units. assembler: None with one rank."""
        self.units: list[Unit] = []
        self.counts = Counts()
        self.cursor = Cursor()
        self._lane = lane
        self._device = device
        self._timeline = timeline
        self._ahead = Ledger(0)
        self.blocks: Blocks = HostBlocks(self._ahead) if device.is_host else DeviceBlocks(device)
        self.updates_at_fetch = True
        """Whether updates are pending until the next fetch, and not applied in the backward."""
        self.frequencies = Frequencies(0)
        self._sizes: list[int] = []
        self._owed: deque[int] = deque()
        self._staying: set[Unit] = set()
        self._whole = False
        self._refused: UnsupportedError | None = None
        self._assembler = assembler

    def open(self, units: list[Unit], ahead_nbytes: int, *, whole: bool = False) -> None:
        """Take the units of a finished model, in the order of its modules; a first plan assumes they run in
        that order.

        whole: what is resident stays so until it is updated (ZeRO stages 1 and 2): `ahead_nbytes` has room.
        """
        self._whole = whole
        self.units = units
        self._ahead.resize(ahead_nbytes)
        self.frequencies = Frequencies(len(units))
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
        self._sizes = self._fetched_sizes()
        hides = [unit.resident_nbytes for unit in self.units]
        self.cursor.follow(make_plan(trace, self._sizes, self._ahead.limit_nbytes, hides=hides))
        self.counts.count_plan()

    def _fetched_sizes(self) -> list[int]:
        return [0 if self._never_fetched(unit) else unit.resident_nbytes for unit in self.units]

    def _never_fetched(self, unit: Unit) -> bool:
        """Whether a use of the unit moves nothing: it is in place, and so is all that updates it, or updates
        happen at another time.
        """
        return unit.in_place and (unit.record.all_in_host or not self.updates_at_fetch)

    # Uses

    def hold(self, unit: Unit, phase: Phase) -> None:
        """Make `unit` resident and its parameters real, until as many `drop`s."""
        if not unit.attached:
            self._use(unit, phase)
            unit.attach()
            if self._device.is_host:
                unit.changes.sample(unit.residence.uses)
            unit.residence.begin()
        unit.residence.use()

    def _refuse_change(self, unit: Unit, name: str) -> None:
        """A forward or backward has changed a parameter, which it must not; `raise_refused` tells. Nothing
        goes on where it lies in place, changed for good while its master is not, nor on several ranks: the
        others must hear of it.
        """
        self._refused = self._refused or UnsupportedError(would_be_lost(name))
        if unit.resident_in_place or self._assembler is not None:
            self._lane.fail(self._refused)

    def raise_refused(self) -> None:
        """Raise what was found of the units released since this was asked.

        Raises: UnsupportedError naming the parameter that was changed.
        """
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def hold_aside(self, unit: Unit) -> None:
        """Like `hold`, for a use that is no part of a step, and may be an edit: of a copy, never in place."""
        if not unit.attached:
            self._staying.discard(unit)
            self.make_resident(unit)
            if unit.residence.fetch is not None:
                self._lane.wait(
                    unit.residence.fetch, finished=True
                )  # the disk may still write what it updated
            unit.make_private()
            unit.attach(aside=True)
            unit.residence.begin()
        unit.residence.use()

    def _use(self, unit: Unit, phase: Phase) -> None:
        self.counts.count_use()
        unit.residence.count_use()
        self.frequencies.used(unit.index, kept=unit in self._staying)
        fetch, keep, foreseen = self.cursor.advance(Use(phase, unit.index))
        if not foreseen:
            self.counts.note_divergences(self.cursor.divergences)
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
            if use.unit in wanted or use.unit == but.index or self._never_fetched(self.units[use.unit]):
                continue
            room -= self.units[use.unit].window_nbytes
            if room < 0:
                break
            wanted[use.unit] = None
        for unit in self.units:
            if unit.residence.waits and unit is not but and unit.index not in wanted:
                self._evict(unit)
        self._owed = deque(wanted)

    def make_resident(self, unit: Unit) -> None:
        """Return when `unit` holds its current values on the device. It stays until it is dropped."""
        self._no_longer_waiting(unit)
        residence = unit.residence
        if residence.fetch is not None and (lent := residence.lent) is not None:
            self._wait(lent, "update")
        job = residence.fetch
        if job is None:
            if self._is_there(unit):
                unit.allocate()
                residence.come(THERE)
                self.counts.count_met()
                return
            job = self._fetch(unit, urgent=True)
            missed = not job.processed  # asked once: the lane works on
            self.counts.count_met(missed=missed)
        else:
            self.counts.count_met()
        if not job.processed:
            self._lane.promote(unit.record)
            self._wait(job, "read")
        self._device.arrived(unit.flat)

    def _is_there(self, unit: Unit) -> bool:
        """Whether the unit's present values lie in the memory that computes, without any fetch. The lane is
        asked first, under its lock: whatever had the unit's storage has given it back altogether.
        """
        return self._lane.settled(unit.record) and unit.in_place and not unit.pending

    def _wait(self, job: Awaited, cause: str) -> None:
        """Wait for a pass that computing cannot go on without, for `cause`, or because slots were lacking."""
        starved_s, began = job.starved_s, time.perf_counter()
        self._lane.wait(job)
        ended = time.perf_counter()
        fed = min(began + job.starved_s - starved_s, ended)
        for name, since, until in (("slot", began, fed), (cause, fed, ended)):
            if until > since:
                self.counts.stalled(name, until - since)
                self._timeline.span("stall", name, since, until)

    def _no_longer_waiting(self, unit: Unit) -> None:
        charged = unit.residence.uncharge()
        if charged is not None:
            self._ahead.release(charged)

    def _let_wait(self, unit: Unit) -> bool:
        """Charge a unit for waiting, resident, for its use; False where the share has no room."""
        nbytes = unit.window_nbytes
        if not self._ahead.try_reserve(nbytes):
            return False
        unit.residence.charge(nbytes)
        return True

    def _fetch(self, unit: Unit, *, urgent: bool) -> Awaited:
        unit.allocate()
        job = self._pass(unit)
        self._lane.submit(job, urgent=urgent)
        # Now, and not before: it may not stand for a pass that a Ctrl-C kept from the queue.
        fetch = job if self._assembler is None else self._assembler.assemble(unit, job)
        unit.residence.come(fetch)
        return fetch

    def _pass(self, unit: Unit, *, upload: bool = True, resident: bool = False) -> FetchPass:
        return FetchPass(unit, self._device, unit.record.tile_numel, upload=upload, resident=resident)

    def fetch_owed(self) -> None:
        """Start the fetches that the plan asked for, as far as there is room for what waits."""
        while self._owed:
            unit = self.units[self._owed[0]]
            if (lent := unit.residence.lent) is not None:
                if self._assembler is None:
                    return
                self._wait(lent, "update")  # what is fetched next may not hang on this rank's timing
            if unit.residence.fetch is None and not self._is_there(unit):
                if not self._let_wait(unit):
                    return
                self._fetch(unit, urgent=False)
            self._owed.popleft()

    def drop(self, unit: Unit) -> None:
        """End one `hold`; the last one releases the unit, or keeps it waiting where the plan says so."""
        if not unit.residence.drop():
            return
        if self._timeline.recording:
            self._timeline.span("compute", unit.name, unit.residence.began_s, time.perf_counter())
        if (name := unit.changed()) is not None:
            self._refuse_change(unit, name)
        unit.detach()
        if unit.residence.has_deferred:
            first, *others = unit.residence.take_deferred()
            self._lend(unit, first)
            for job in others:
                job.works_in(None)
                self._lane.submit(job)
            return
        stays = self._whole or unit in self._staying
        if stays and not unit.pending and self._let_wait(unit):
            return
        self._evict(unit)
        self.fetch_owed()

    def _evict(self, unit: Unit) -> None:
        """Take a unit that nobody uses off the device."""
        if (lent := unit.residence.lent) is not None:
            self._lane.wait(lent)
        job = unit.residence.fetch
        if job is None:
            return
        if not job.processed:
            self._lane.wait(job)
        self._no_longer_waiting(unit)
        unit.residence.go()
        unit.deallocate()

    def _evict_waiting(self, *, only_pending: bool = False) -> None:
        for unit in self.units:
            if unit.residence.waits and (unit.pending or not only_pending):
                self._evict(unit)

    def apply(self, unit: Unit, on_processed: Callable[[], None]) -> FetchPass:
        """Apply a unit's pending updates in the backward, from the values on the CPU if they are there; then
        release it.
        """
        residence = unit.residence
        lent, fetch = residence.lent, residence.fetch
        if fetch is not None and not fetch.processed:
            self._lane.wait(fetch)  # else it would go on standing for values of before the update
        self.frequencies.updated(unit.index)
        resident = self._device.is_host and lent is None and residence.processed
        job = self._pass(unit, upload=False, resident=resident)
        job.call_when_processed(on_processed)
        if not resident:
            self._staying.discard(unit)  # what is on the device is stale from now on
            if not residence.users:
                self._evict(unit)
            self._lane.submit(job)
        elif residence.users:
            job.take_over()
            residence.defer(job)
        else:
            self._lend(unit, job)
        return job

    def _lend(self, unit: Unit, job: FetchPass) -> None:
        """Leave the storage of a unit that nobody uses to a pass that starts from its values, and releases
        it.
        """
        unit.part()
        job.works_in(unit.flat)
        unit.residence.lend(job)
        self._no_longer_waiting(unit)

        def give_back(before: Callable[[], None] | None) -> None:
            unit.residence.go()
            unit.deallocate()
            if before:
                before()
            unit.residence.given_back()  # last, so that it says all of it is done

        job.call_when_processed(partial(give_back, job.on_processed))
        try:
            self._lane.submit(job)
        except BaseException as error:  # nobody would give the storage back
            self._lane.fail(error)
            raise

    # Steps

    def flush(self, unit: Unit) -> None:
        """Apply a unit's pending updates now, whether or not it is needed."""
        if not unit.pending:
            return
        residence = unit.residence
        if not residence.users and residence.lent is None and residence.fetch is not None:
            self._evict(unit)
        self._lane.submit(self._pass(unit, upload=False))

    def changed(self, unit: Unit) -> None:
        """A unit's values are about to be replaced in its record: what is resident of it is stale."""
        if unit.residence.users:
            raise UnsupportedError(
                f"{unit.name}: its parameters are in use and cannot be replaced. Do so outside forward and "
                "gathered()."
            )
        self._evict(unit)
        unit.values_changed()

    def close_step(self, *, updates_at_fetch: bool) -> bool:
        """The optimizer has decided its updates: forget what was fetched before. False for a further
        optimizer's step, which closes none.

        updates_at_fetch: whether updates are pending until the next fetch, and not applied in the backward.
        """
        self.updates_at_fetch = updates_at_fetch
        if not self.cursor.trace:  # what it changed is stale, the rest is on its way
            self._evict_waiting(only_pending=True)
            return False
        self.counts.count_step()
        self.frequencies.close_step()
        self._owed.clear()
        self._staying.clear()
        self._evict_waiting(only_pending=self._whole)
        return True

    def begin_step(self) -> None:
        """Plan anew if the last step was not as planned, or fetches take something else than they did; begin
        the opening.
        """
        cursor = self.cursor
        if not cursor.trace:
            return
        surprised = cursor.reordered > _REPLAN_SHARE * max(1, len(cursor.trace))
        if surprised or self._sizes != self._fetched_sizes():
            self._follow(tuple(cursor.trace))
        cursor.restart()
        if cursor.plan is not None:
            if self._assembler is not None:
                self._assembler.check(cursor.plan)
            self._owed.extend(cursor.plan.opening)
        self.fetch_owed()

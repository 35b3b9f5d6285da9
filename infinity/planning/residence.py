"""Which units are resident when, decided alike for a running engine and for a forecast of it. Pure: no torch,
no I/O.

[Note: residence]
A use of a unit makes it resident, and begins the fetches that the plan puts there: they are *owed* until the
window has room for them. When the last user of a unit is gone, the unit waits in the window for its next
use if the plan keeps it and nothing is pending for it; else it leaves the device. An update in the backward
that starts from a unit's values is *lent* their memory, and releases it. A use that the plan did not foresee
takes the same path without prefetch: its unit is fetched on demand, and counted as a miss.

[Note: routed units]
Which experts, or blocks of an embedding, a step uses is known only when it has come to them, so no plan has
them. The units that a layer is about to use are *announced*: their fetches begin, in that order, as far as
the window has room. After a use in a forward such a unit waits on, as long as nothing else needs its room;
the one used longest ago goes first. In a forward before a backward that is the one needed last; without a
backward it is the rule of the least recently used.

On an accelerator some units are *lodged*: such a unit stays on the device from its first use on, also across
steps, until an update changes its record. What it takes is no part of the window. Which units those are is
decided by the placement (see placement).

Residency decides all that. Subclasses carry it out: units/residency.py with passes of the lane, forecast.py
with passes on a simulated clock.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from infinity.planning.queue import NO_FETCH, Job, PassLane, QueuedPass
from infinity.planning.use_counts import Counts

_UpdateT = TypeVar("_UpdateT", bound=QueuedPass[Any])


class Residence(Generic[_UpdateT]):
    """Whether one unit is on the device: what brings it there, who uses it, which pass is lent its memory
    afterwards. Written by Residency; passes that end do so with the lane's lock held.
    """

    __slots__ = (
        "began_s",
        "charged_nbytes",
        "deferred",
        "fetch",
        "lent",
        "lodged",
        "outdated",
        "users",
        "uses",
    )

    def __init__(self) -> None:
        """Begin off the device."""
        self.fetch: Job | None = None
        """What makes, or made, the unit resident; None while it is not."""
        self.lent: _UpdateT | None = None
        """The pass that works on the memory of a unit without users, and releases it afterwards."""
        self.deferred: list[_UpdateT] = []
        """Passes that begin as soon as the last user is gone; the first is lent the memory."""
        self.charged_nbytes: int | None = None
        """What is charged while the unit is resident ahead of its use; None where it does not wait."""
        self.began_s = 0.0
        """When its first user came, by time.perf_counter."""
        self.users = 0
        """Frames and backward leases that need the unit attached."""
        self.uses = 0
        """Uses since the model was built."""
        self.lodged = False
        """Whether the unit stays on the device between its uses, and from step to step."""
        self.outdated = False
        """Whether its record has been updated since the unit came, so that it does not stay."""

    @property
    def processed(self) -> bool:
        """Whether the values have arrived."""
        fetch = self.fetch  # read once: the lane may take it away
        return fetch is not None and fetch.done

    def come(self, fetch: Job) -> None:
        """Be resident, or on the way, by `fetch`."""
        self.fetch = fetch

    def go(self) -> None:
        """Be off the device."""
        self.fetch = None
        self.outdated = False

    def outdate(self) -> None:
        """Note that the record is updated from now on, and what is on the device is not."""
        self.outdated = True

    def lodge(self, *, stays: bool) -> None:
        """Note whether the unit stays on the device."""
        self.lodged = stays

    # Uses

    def count_use(self) -> None:
        """Count a use."""
        self.uses += 1

    def use(self) -> None:
        """Count a user."""
        if not self.users:
            self.began_s = time.perf_counter()
        self.users += 1

    def drop(self) -> bool:
        """Count a user less; return whether it was the last one."""
        self.users -= 1
        return not self.users

    # Waiting for a use

    @property
    def waits(self) -> bool:
        """Whether the unit is resident ahead of its use, and charged for it."""
        return self.charged_nbytes is not None

    def charge(self, nbytes: int) -> None:
        """Note the bytes that are charged while it waits."""
        self.charged_nbytes = nbytes

    def uncharge(self) -> int | None:
        """Wait no more; return the bytes that were charged, None where there were none."""
        charged, self.charged_nbytes = self.charged_nbytes, None
        return charged

    # Its memory afterwards

    def lend(self, job: _UpdateT) -> None:
        """Leave the memory to a pass."""
        self.lent = job

    def given_back(self) -> None:
        """The pass to which the memory was lent is done with it."""
        self.lent = None

    @property
    def has_deferred(self) -> bool:
        """Whether passes begin as soon as the last user is gone."""
        return bool(self.deferred)

    def defer(self, job: _UpdateT) -> None:
        """Have a pass begin as soon as the last user is gone; the first is lent the memory."""
        self.deferred.append(job)

    def take_deferred(self) -> list[_UpdateT]:
        """Return those passes, which wait no more."""
        jobs, self.deferred = self.deferred, []
        return jobs

    def withdraw(self, job: _UpdateT) -> bool:
        """Have a pass not begin; return whether it was to."""
        waited = job in self.deferred
        self.deferred = [one for one in self.deferred if one is not job]
        return waited


class PlacedUnit(Protocol):
    """A unit, as Residency sees it."""

    index: int
    record: Any
    residence: Residence[Any]

    @property
    def window_nbytes(self) -> int:
        """Bytes that it takes of the window while it waits for its use."""

    @property
    def in_place(self) -> bool:
        """Whether it is always where it computes: being resident takes no memory and no transfer."""

    @property
    def pending(self) -> object:
        """True while updates wait for the next pass over its record."""

    def allocate(self) -> None:
        """Give it memory: with its values, if `in_place`, else undefined."""

    def deallocate(self) -> None:
        """Give the memory back."""

    def lend_to(self, job: Any) -> None:
        """Have an update that was not queued yet start from the unit's values."""


class Window(Protocol):
    """The share of the budget for units that wait, resident, for their use."""

    def try_reserve(self, nbytes: int) -> bool:
        """Take `nbytes` if the share has them."""

    def release(self, nbytes: int) -> None:
        """Give back `nbytes` that were reserved."""


_UnitT = TypeVar("_UnitT", bound=PlacedUnit)


class Residency(ABC, Generic[_UnitT, _UpdateT]):
    """Decides when units are fetched, wait and leave: see [Note: residence]. Called from the one thread that
    computes.
    """

    def __init__(self, window: Window, lane: PassLane, *, on_host: bool, in_order: bool) -> None:
        """Begin without units. window: what units that wait are charged to. on_host: the CPU computes,
        so that an update can start from the values of a resident unit. in_order: other ranks fetch in the
        same order, which may not depend on this rank's timing.
        """
        self.units: Sequence[_UnitT] = ()
        self.counts = Counts()
        self._window, self._lane = window, lane
        self._on_host, self._in_order = on_host, in_order
        self._owed: deque[int] = deque()
        self._staying: set[_UnitT] = set()
        self._routed: Mapping[_UnitT, bool] = {}
        """See [Note: routed units]; and whether a backward uses them again."""
        self._announced: OrderedDict[_UnitT, None] = OrderedDict()
        self._charged: dict[_UnitT, None] = {}
        """Units that wait for a use: few, where there are many."""
        self._idle: dict[_UnitT, None] = {}
        """Routed units that wait since a use, the one used longest ago first."""
        self._keeps_resident = False

    @abstractmethod
    def _begin_fetch(self, unit: _UnitT, *, urgent: bool) -> Job:
        """Queue the pass that brings a unit's values to its memory, with the updates pending for it."""

    def _arrived(self, unit: _UnitT) -> None:
        """Have later computing see the values that a fetch has brought."""

    @abstractmethod
    def _make_update(self, unit: _UnitT, *, resident: bool) -> _UpdateT:
        """Return a pass that applies the pending updates: to the unit's values, which it will be lent, if
        `resident`, or to its record.
        """

    @abstractmethod
    def _wait(self, job: Job, cause: str) -> None:
        """Wait for what computing cannot go on without; count the time for `cause`, "read" or "update"."""

    @property
    def in_round(self) -> bool:
        """Whether uses are those of a round: forwards without gradients, one after the other."""
        return False

    # Uses

    def use(self, unit: _UnitT, fetch: Sequence[int], *, keep: bool) -> None:
        """Make a unit resident for a use. By the plan, the fetches of the units `fetch` begin with it; `keep`
        says whether the unit stays afterwards.
        """
        if keep:
            self._staying.add(unit)
        else:
            self._staying.discard(unit)
        job = self._come(unit)
        if fetch:
            self._owed.extend(fetch)
        if self._owed and self.in_round:  # a round waits for the disk alone, which goes on meanwhile
            self.fetch_owed()
        self._await(unit, job)
        if self._owed or self._announced:  # what was lent may have been given back
            self.fetch_owed()

    def announce(self, units: Iterable[_UnitT]) -> None:
        """Begin the fetches of routed units that are used next, in this order: see [Note: routed units]."""
        self._announced = OrderedDict.fromkeys(units)
        for unit in self._announced:
            self._idle.pop(unit, None)
        self.fetch_owed()

    def fetches_any(self, units: Iterable[_UnitT]) -> bool:
        """Whether a use of any of these routed units would have to fetch it."""
        return any(one.residence.fetch is None and not one.in_place for one in units)

    def foresee(
        self,
        units: Iterable[_UnitT],
        room_nbytes: int,
        before: Iterable[Callable[[Sequence[_UnitT], Sequence[int]], None]],
    ) -> None:
        """Begin to fetch routed units that may be used next, behind those that are announced: at most
        `room_nbytes`, which others may have again. before: called with each that is fetched, and its index.
        """
        for unit in units:
            room_nbytes -= unit.window_nbytes
            if unit.residence.fetch is not None or self._announced or room_nbytes < 0:
                continue
            for call in before:
                call([unit], [unit.index])
            if self._begin_owed(unit) and unit.residence.waits:
                self._idle[unit] = None

    def make_resident(self, unit: _UnitT) -> None:
        """Return when `unit` holds its current values on the device. It stays until it is released."""
        self._await(unit, self._come(unit))

    def _come(self, unit: _UnitT) -> Job | None:
        """Have a unit be resident, or on its way; return what brings it, None where it is there."""
        residence = unit.residence
        if residence.charged_nbytes is not None:
            self._end_waiting(unit)
        job = residence.fetch
        if job is not None and (lent := residence.lent) is not None:
            self._wait(lent, "update")
            job = residence.fetch
        if job is not None:
            self.counts.count_met()
        elif self._is_there(unit):
            unit.allocate()
            residence.come(NO_FETCH)
            self.counts.count_met()
            return None
        else:
            job = self._fetch(unit, urgent=True)
            self.counts.count_met(missed=not job.done)
        if not job.done:
            self._lane.promote(unit.record)
        return job

    def _await(self, unit: _UnitT, job: Job | None) -> None:
        """Return when what brings a unit is over; None stands for nothing."""
        if job is not None:
            if not job.done:
                self._wait(job, "read")
            self._arrived(unit)

    def _is_there(self, unit: _UnitT) -> bool:
        """Whether the present values lie in the memory that computes, without a fetch. The lane is asked
        first: once it says so, no pass uses memory that was lent to it.
        """
        return self._lane.settled(unit.record) and unit.in_place and not unit.pending

    def look_again(self, upcoming: Iterable[_UnitT], room_nbytes: int, but: _UnitT | None) -> None:
        """After a use that was not the planned one, of `but`, or a pass of another kind: owe the units that
        are needed next, as many as `room_nbytes` has room for, and evict the others that wait.
        """
        wanted: dict[int, None] = {}
        for unit in upcoming:
            if unit.index in wanted or unit is but:
                continue
            room_nbytes -= unit.window_nbytes
            if room_nbytes < 0:
                break
            wanted[unit.index] = None
        for unit in self._waiting():
            needed = unit is but or unit.index in wanted or unit in self._routed
            if not (self._keeps_resident or needed or unit.residence.lodged):
                self.evict(unit)
        while self._idle and not self._window.try_reserve(0):  # it has shrunk
            self.evict(next(iter(self._idle)))
        self._owed = deque(wanted)

    def release(self, unit: _UnitT) -> None:
        """The last user of a unit is gone: begin the updates that waited for that, in its memory; or keep it
        waiting where the plan says so; else take it off the device.
        """
        residence = unit.residence
        if residence.deferred:
            first, *others = residence.take_deferred()
            self._lend(unit, first)
            for job in others:
                self._lane.submit(job)
            return
        stays = unit in self._staying or self._keeps_resident or residence.lodged
        if stays and not unit.pending and not residence.outdated and self._let_wait(unit):
            if unit in self._routed and not residence.lodged:
                self._idle[unit] = None
            return
        self.evict(unit)
        if self._owed or self._announced:
            self.fetch_owed()

    def _fetch(self, unit: _UnitT, *, urgent: bool) -> Job:
        unit.allocate()
        fetch = self._begin_fetch(unit, urgent=urgent)
        # Now, and not before: it may not stand for a pass that a Ctrl-C kept from the queue.
        unit.residence.come(fetch)
        return fetch

    def fetch_owed(self) -> None:
        """Begin the fetches that were announced, and those that the plan asked for, as far as there is room
        for what waits.
        """
        while self._announced and self._begin_owed(next(iter(self._announced))):
            self._announced.popitem(last=False)
        while self._owed and self._begin_owed(self.units[self._owed[0]]):
            self._owed.popleft()

    def _begin_owed(self, unit: _UnitT) -> bool:
        """Begin the fetch of a unit, if it is to be fetched; False where that has to wait."""
        if (lent := unit.residence.lent) is not None:
            if not self._in_order:
                return False
            self._wait(lent, "update")
        if unit.residence.fetch is None and not self._is_there(unit):
            if not self._has_room(unit) or not self._let_wait(unit):
                return False
            self._fetch(unit, urgent=False)
        return True

    def _has_room(self, unit: _UnitT) -> bool:
        """Whether the device has the memory for a unit that is fetched ahead of its use."""
        return True

    # The window

    def _let_wait(self, unit: _UnitT) -> bool:
        """Charge a unit for waiting, resident, for its use; False where the window has no room."""
        nbytes = 0 if unit.residence.lodged else unit.window_nbytes
        window = self._window_of(unit)
        while not window.try_reserve(nbytes):
            idle = next((one for one in self._idle if self._window_of(one) is window), None)
            if idle is None:
                return False
            self.evict(idle)
        unit.residence.charge(nbytes)
        self._charged[unit] = None
        return True

    def _window_of(self, unit: _UnitT) -> Window:
        """Return what a unit that waits is charged to."""
        return self._window

    def _end_waiting(self, unit: _UnitT) -> None:
        charged = unit.residence.uncharge()
        self._charged.pop(unit, None)
        self._idle.pop(unit, None)
        if charged is not None:
            self._window_of(unit).release(charged)

    def evict(self, unit: _UnitT) -> None:
        """Take a unit without users off the device."""
        residence = unit.residence
        if (lent := residence.lent) is not None:
            lent.wait()
        job = residence.fetch
        if job is None:
            return
        if not job.done:
            job.wait()
        if residence.charged_nbytes is not None:
            self._end_waiting(unit)
        residence.go()
        unit.deallocate()

    def _evict_waiting(self, *, only_pending: bool = False) -> None:
        for unit in self._waiting():
            if unit.pending or not (only_pending or unit.residence.lodged):
                self.evict(unit)

    def _waiting(self) -> list[_UnitT]:
        """Return the units that wait for a use, in the order of `units`."""
        return sorted(self._charged, key=attrgetter("index"))

    def lodge(self, units: Iterable[_UnitT]) -> None:
        """Have these units, and no others, stay on the device from their next use on; see [Note: residence].
        Called between steps.
        """
        wanted = set(units)
        for unit in self.units:
            residence, before = unit.residence, unit.residence.lodged
            residence.lodge(stays=unit in wanted)
            if before and not residence.lodged and residence.waits:
                self.evict(unit)

    def give_way(self, upcoming: Iterable[_UnitT]) -> bool:
        """Take the waiting unit off the device that is needed last, where `upcoming` is the order of uses;
        lodged units only when no other waits, and none that lies where it computes, which would free nothing.
        Return whether there was one.
        """
        waiting = [unit for unit in self._waiting() if not unit.in_place]
        if not waiting:
            return False
        next_use: dict[_UnitT, int] = {}
        for position, unit in enumerate(upcoming):
            next_use.setdefault(unit, position)
        last = max(waiting, key=lambda unit: (not unit.residence.lodged, next_use.get(unit, math.inf)))
        last.residence.lodge(stays=False)
        self.evict(last)
        return True

    # Updates in the backward

    def apply(self, unit: _UnitT, on_done: Callable[[], None]) -> _UpdateT:
        """Apply a unit's pending updates in the backward, from the values on the CPU if they are there, which
        releases it. on_done: called when the last tile was worked on, under the lane's lock.
        """
        residence = unit.residence
        lent, fetch = residence.lent, residence.fetch
        if fetch is not None and not fetch.done:
            fetch.wait()  # else it would count as current, with values from before the update
        resident = self._has_masters(unit) and lent is None and residence.processed
        job = self._make_update(unit, resident=resident)
        job.call_when_done(on_done)
        if not resident:
            self._goes_stale(unit)
            self._lane.submit(job)
        else:
            self.lend_when_free(unit, job)
        return job

    def _goes_stale(self, unit: _UnitT) -> None:
        """A record is about to be updated, and what is on the device of its unit is not: let that leave."""
        self._staying.discard(unit)
        if not unit.residence.users:
            self.evict(unit)
        elif unit.residence.fetch is not None:
            unit.residence.outdate()

    def lend_when_free(self, unit: _UnitT, job: _UpdateT) -> None:
        """Have a pass start from a resident unit's values, and release it, when its last user is gone."""
        if unit.residence.users:
            job.take_over()
            unit.residence.defer(job)
        else:
            self._lend(unit, job)

    def _has_masters(self, unit: _UnitT) -> bool:
        """Whether an update can start from the values of a unit that is resident."""
        return self._on_host

    def _lend(self, unit: _UnitT, job: _UpdateT) -> None:
        """Leave the memory of a unit without users to a pass that starts from its values, and releases it."""
        unit.lend_to(job)
        unit.residence.lend(job)
        self._end_waiting(unit)
        job.call_when_done(partial(_give_back, unit, job.on_done))
        self._lane.submit(job)

    # Steps

    def begin(self, opening: Iterable[int]) -> None:
        """Begin a step with the fetches that open its plan."""
        self._owed.extend(opening)
        self.fetch_owed()

    def stay_by(self, staying: set[_UnitT]) -> set[_UnitT]:
        """Go over to passes of another kind, whose plan keeps the units `staying`; return what was kept."""
        before, self._staying = self._staying, staying
        return before

    def open_round(self, opening: Iterable[int]) -> None:
        """Begin a round, at whose begin `opening` wait, or are on their way. What else waits leaves."""
        wanted = dict.fromkeys(opening)
        for unit in self._waiting():
            stays = unit.index in wanted or unit in self._routed or unit.residence.lodged
            if not (self._keeps_resident or stays):
                self.evict(unit)
        self._owed = deque(wanted)
        self.fetch_owed()

    def end(self) -> None:
        """A step is over, its updates are decided: what waits for a use is stale."""
        self._owed.clear()
        self._announced.clear()
        self._staying.clear()
        self._evict_waiting(only_pending=self._keeps_resident)


def _give_back(unit: PlacedUnit, before: Callable[[], None] | None) -> None:
    """Take a unit off the device when the pass that was lent its memory is done with it."""
    unit.residence.go()
    unit.deallocate()
    if before:
        before()
    unit.residence.given_back()  # last, so that it says all of it is done

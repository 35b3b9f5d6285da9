"""Residency carried out: units are fetched, updated and released by passes of the lane. What is decided, and
why, is in planning/residence.py.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType

import torch

from infinity.device.blocks import BlocksOfAll, DeviceBlocks, HostBlocks
from infinity.device.device import Device, Download
from infinity.errors import UnsupportedError
from infinity.lane.direct import fetch_of
from infinity.lane.fetch import FetchAndUpdatePass, FetchPass, UpdatePass
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import OutgoingShare
from infinity.planning.course import Course
from infinity.planning.cursor import Cursor
from infinity.planning.cycle import make_cycle
from infinity.planning.first_step import guessed_trace
from infinity.planning.frequency import Frequencies
from infinity.planning.plan import make_plan
from infinity.planning.queue import NO_FETCH, Job
from infinity.planning.residence import Residency
from infinity.planning.trace import Phase, Use
from infinity.storage.memory import Ledger
from infinity.timeline import Timeline
from infinity.units.assembler import Assembler
from infinity.units.changes import COMPARED_EVERY, would_be_lost
from infinity.units.device_updates import DeviceUpdates, bring_down
from infinity.units.meeting import MeetingOfRanks
from infinity.units.refusals import Refusals
from infinity.units.round_room import RoundRoom
from infinity.units.routed_layers import RoutedLayers
from infinity.units.stalls import stalls_of
from infinity.units.unit import Unit


class UnitResidency(Residency[Unit, UpdatePass]):
    """Owns the units' residence. Called from the thread that computes; the lane calls back under its lock."""

    def __init__(
        self,
        lane: StreamLane,
        device: Device,
        timeline: Timeline,
        assembler: Assembler | None,
        outgoing: OutgoingShare | None = None,
    ) -> None:
        """Start without units. assembler: None with one rank. outgoing: lends fetches host memory."""
        self._outgoing = outgoing
        self._ahead, self._ahead_of_divided = Ledger(0), Ledger(0)
        """For units that wait: of all ranks; of divided experts, which decide no common fetch."""
        super().__init__(self._ahead, lane, on_host=device.is_host, in_order=assembler is not None)
        self._lane: StreamLane = lane
        self._steps, self._rounds = Course(make_plan), Course(make_cycle)
        self._course = self._steps
        """What is under way."""
        self._set_apart: set[Unit] = set()
        """What stays by the plan of the other course."""
        self._device = device
        self._timeline = timeline
        in_host = HostBlocks(self._ahead, self._ahead_of_divided)
        self.blocks: BlocksOfAll = in_host if device.is_host else DeviceBlocks(device)
        lends = outgoing if device.is_host and assembler is None else None
        self._round_room = RoundRoom(self._ahead, lends, on_host=device.is_host)
        self._windows_nbytes: dict[Course, int] = {}
        """The window that the plan of each course knows."""
        self._values: Download | None = None
        self._device_updates: DeviceUpdates | None = None
        """Updates records that live on the device."""
        self._due: dict[Unit, Callable[[], None]] = {}
        """Units that live on the device, updated when their last user is gone, and the calls that follow."""
        self.updates_at_fetch = True
        """Whether updates are pending until the next fetch, and not applied in the backward."""
        self.refusals = Refusals(lane, None if assembler is None else assembler.post_failure)
        self._assembler = assembler
        self._uses_of: dict[Phase, list[Use]] = {}
        self._meeting: MeetingOfRanks | None = None
        self.before_routed_fetch: list[Callable[[Sequence[Unit], Sequence[int]], None]] = []
        """Called with routed units that a forward is about to fetch, and their indices."""
        self._layers = RoutedLayers()
        self._routed_uses = 0

    def open(
        self,
        units: list[Unit],
        ahead_nbytes: int,
        *,
        keep_resident: bool = False,
        routed: Mapping[Unit, bool] = MappingProxyType({}),
    ) -> None:
        """Take the units of a finished model, in the order of its modules; a first plan assumes they run in
        that order.

        routed: those of which the data decides whether they are used, and whether a backward uses them again,
        as rows of embeddings are not; see [Note: routed units] in residence.
        keep_resident: what is resident stays so until it is updated (ZeRO stages 1 and 2): `ahead_nbytes` has
        room.
        """
        self._keeps_resident = keep_resident
        self.units = units
        self._ahead.resize(ahead_nbytes)
        self._routed = routed
        self._layers.open(units, routed)
        divided = [unit for unit in units if not unit.record.holders.are_all]
        if divided:
            left = self._left_nbytes(routed)
            of_rank = sum(unit.resident_nbytes for unit in divided if not unit.record.is_elsewhere)
            self._ahead_of_divided.resize(of_rank if keep_resident else ahead_nbytes - left)
            self._ahead.resize(left)
        self.give_window(self._ahead.limit_nbytes)
        self._uses_of = {phase: [Use(phase, unit.index) for unit in units] for phase in Phase}
        guess = guessed_trace(one.index for one in self._layers.others)
        for course in (self._steps, self._rounds):
            course.open(len(units))
        self._plan(self._steps, guess, self._fetched_sizes())

    def meet_by(self, meeting: MeetingOfRanks) -> None:
        """Have the ranks meet before each use: see [Note: ranks that choose] in meeting."""
        self._meeting = meeting

    def meet(self) -> None:
        """Return when every rank is about to do what all do."""
        if self._meeting is not None:
            self._meeting.before(None)

    def join_in(self, unit: Unit) -> None:
        """Take part in the fetch of a unit that other ranks need, and this one does not."""
        fetch = unit.residence.fetch
        if fetch is None:
            self._course.frequencies.used(unit.index)
            self.use(unit, (), keep=False)
            self.release(unit)
        elif self._assembler is not None:  # this rank has all of it, and gives its part once more
            self._lane.wait(fetch)
            self._lane.wait(self._assembler.again(unit) or self._assembler.assemble(unit, fetch, unit))

    @property
    def routed(self) -> Collection[Unit]:
        """Units of which the data decides whether they are used."""
        return self._routed

    @property
    def window_nbytes(self) -> int:
        """Bytes that units may take while they wait for their use."""
        return self._ahead.limit_nbytes

    @property
    def ahead_nbytes(self) -> int:
        """Bytes of units that wait for their use."""
        return self._ahead.held_nbytes + self._ahead_of_divided.held_nbytes

    def _window_of(self, unit: Unit) -> Ledger:
        return self._ahead if unit.record.holders.are_all else self._ahead_of_divided

    @property
    def cursor(self) -> Cursor:
        """Where the step is in its plan."""
        return self._steps.cursor

    @property
    def frequencies(self) -> Frequencies:
        """What is expected of a step."""
        return self._steps.frequencies

    @property
    def round_cursor(self) -> Cursor:
        """Where the round is in its plan: see begin_round."""
        return self._rounds.cursor

    @property
    def round_frequencies(self) -> Frequencies:
        """What is expected of a round."""
        return self._rounds.frequencies

    def share_of_steps(self, unit: Unit) -> float:
        """Return the share of the next steps that are expected to use a unit; 1 for one that is no slice."""
        return self.frequencies.share_of_steps(unit.index) if unit in self._routed else 1.0

    @property
    def in_round(self) -> bool:
        """Whether uses are those of a round."""
        return self._course is self._rounds

    def _plan(self, course: Course, trace: tuple[Use, ...], sizes: Sequence[int]) -> None:
        hides = [unit.resident_nbytes for unit in self.units]
        self._windows_nbytes[course] = self._ahead.limit_nbytes
        on_device = () if self._on_host else self.units
        lodged = tuple(unit.index for unit in on_device if self._is_lodged(unit))
        course.plan(trace, sizes, self._planned_nbytes(), hides, lodged)
        self.counts.count_plan()

    def _planned_nbytes(self) -> int:
        """The window, without what is left to routed units: half of it, where they and the largest of the
        others need so much; an eighth to those that no backward uses again, and that wait for one use alone.
        """
        routed = self._routed.items()
        return self._left_nbytes({unit: again for unit, again in routed if unit.record.holders.are_all})

    def _left_nbytes(self, routed: Mapping[Unit, bool]) -> int:
        limit = self._ahead.limit_nbytes
        once = sum(unit.resident_nbytes for unit, again in routed.items() if not again)
        of_routed = min(limit // 8, once)
        of_routed += sum(unit.resident_nbytes for unit, again in routed.items() if again)
        largest = max((unit.resident_nbytes for unit in self._layers.others), default=0)
        return limit - max(0, min(limit // 2, of_routed, limit - largest))

    def _fetched_sizes(self) -> array[int]:
        return self._sizes(lambda one: 0 if self._never_fetched(one) else one.resident_nbytes)

    def _sizes(self, nbytes: Callable[[Unit], int]) -> array[int]:
        """Return the bytes of each unit that a plan has, or names: no slices, unless a device has them."""
        sizes = array("q", bytes(8 * len(self.units)))  # of many, compared in a tenth of a list's time
        for one in self._layers.others if self._on_host else self.units:
            sizes[one.index] = nbytes(one)
        return sizes

    def _never_fetched(self, unit: Unit) -> bool:
        """Whether a use of the unit moves nothing: its values are in place, and either its whole record is in
        host memory or fetches apply no updates; or it lives on the device, and is there.
        """
        if self._is_lodged(unit):
            return True
        return unit.in_place and (unit.record.all_in_host or not self.updates_at_fetch)

    # On an accelerator

    def update_on_device_by(self, updates: DeviceUpdates) -> None:
        """Have records that live on the device be updated there."""
        self._device_updates = updates

    def apply_on_device(self, unit: Unit, on_done: Callable[[], None]) -> None:
        """Apply a unit's pending updates, where its record is on the device: now, or in a backward that still
        uses it when its last user is gone; of several ranks at its next use, as their mean may still be on
        its way. on_done: called then.
        """
        self.frequencies.updated(unit.index)
        if unit.in_parts and self._device_updates is not None:
            self._goes_stale(unit)
            self._device_updates.apply_later(unit, on_done)
            return
        if unit.residence.users:
            self._due[unit] = on_done
            return
        self._update_on_device(unit)
        on_done()

    def _update_on_device(self, unit: Unit) -> DeviceUpdates:
        if self._device_updates is None:
            raise AssertionError(f"{unit.name} is on the device, and nothing updates it there")
        self._device_updates.apply(unit)
        return self._device_updates

    def _fetch_on_device(self, unit: Unit) -> Job:
        updates = self._update_on_device(unit)
        if self._assembler is None or not unit.in_parts:
            return NO_FETCH
        updates.bring_part(unit)
        return self._assembler.assemble(unit, Job(self._lane, done=True), unit)

    def release(self, unit: Unit) -> None:
        """See Residency."""
        if self._due and (on_done := self._due.pop(unit, None)) is not None:
            self._update_on_device(unit)
            on_done()
        super().release(unit)

    @staticmethod
    def _is_lodged(unit: Unit) -> bool:
        """Whether a unit lives on the device, and is there with its present values; a whole record always is,
        and what is pending for it moves nothing.
        """
        if unit.on_device:
            return True
        return unit.residence.lodged and unit.residence.processed and not unit.pending

    def give_window(self, nbytes: int) -> None:
        """Set the bytes of units that wait, from the next step on."""
        self._ahead.resize(nbytes)
        if self._assembler is not None:
            self._assembler.size_buckets(nbytes)

    def _has_other_window(self, course: Course) -> bool:
        """Whether units that wait have other room than the plan knows."""
        return self._windows_nbytes.get(course) != self._ahead.limit_nbytes

    def one_gives_way(self) -> bool:
        """Take one unit off the device that waits there; False where none does."""
        return self.give_way(self.units[use.unit] for use in self._course.cursor.upcoming())

    def _has_room(self, unit: Unit) -> bool:
        room = self._device.room
        return room is None or unit.in_place or room.fits(unit.resident_nbytes)

    # Uses

    def hold(self, unit: Unit, phase: Phase) -> None:
        """Make `unit` resident and its parameters real, until as many `drop`s.

        Raises: UnsupportedError for an expert that other ranks have.
        """
        if not unit.attached:
            unit.check_is_here()
            self._use(unit, phase)
            self._attach(unit)
        unit.residence.use()

    def _attach(self, unit: Unit, *, aside: bool = False) -> None:
        self.refusals.look(unit)
        unit.attach(aside=aside)
        if self._on_host and not aside and unit.residence.uses % COMPARED_EVERY == 1:
            unit.changes.watch_all()

    def are_here(self, units: Iterable[Unit]) -> bool:
        """Whether these units are here to stay, so that a use of any fetches nothing; False while a timeline
        shows each use.
        """
        return not self._timeline.recording and all(
            one.record.holders.are_all and not one.pending and (self._stays(one) or self._is_there(one))
            for one in units
        )

    def _stays(self, unit: Unit) -> bool:
        return unit.residence.fetch is not None and (
            unit in self._staying or self._keeps_resident or unit.residence.lodged
        )

    def hold_here(self, units: Iterable[Unit], held: list[Unit]) -> None:
        """Like `hold`, in a round, for units that `are_here`, which join `held`: nothing is planned."""
        with torch._C.DisableTorchFunctionSubclass():  # asking released parameters takes a tenth of the time
            for unit in units:
                residence = unit.residence
                if not unit.attached:
                    self.counts.count_use()
                    residence.count_use()
                    self.make_resident(unit)
                    self._attach(unit)
                residence.use()
                held.append(unit)

    def drop_here(self, held: list[Unit]) -> None:
        """End the holds of `hold_here`; the list is empty afterwards."""
        with torch._C.DisableTorchFunctionSubclass():
            held.reverse()  # of many, taking the first moves all others
            while held:
                self.drop(held.pop())

    def hold_aside(self, unit: Unit, *, exact: bool = True) -> None:
        """Like `hold`, for a use outside a step (`gathered`). The caller may edit the values, so it gets a
        copy of them, never those of the record. exact: those of the record, where ranks compute with others.
        """
        if not unit.attached:
            self._staying.discard(unit)
            by = self._assembler if exact else None
            with nullcontext() if by is None else by.exactly(partial(self.evict, unit)):
                self.make_resident(unit)
            if unit.residence.fetch is not None:
                # The disk may still write what the fetch updated.
                self._lane.wait(unit.residence.fetch, finished=True)
            unit.make_private()
            if not unit.record.holders.are_all and self._assembler is not None:
                self._lane.wait(self._assembler.spread(unit))
            self._attach(unit, aside=True)
        unit.residence.use()

    def _use(self, unit: Unit, phase: Phase) -> None:
        if self._course is self._rounds and phase is Phase.BACKWARD:
            self.end_rounds()
        if self._meeting is not None and unit.record.holders.are_all:
            self._meeting.before(unit)
        course = self._course
        self.counts.count_use()
        unit.residence.count_use()
        if unit in self._routed:
            self._use_routed(unit, phase)
            return
        course.frequencies.used(unit.index, kept=unit in self._staying)
        fetch, keep, foreseen = course.cursor.advance(self._uses_of[phase][unit.index])
        if not foreseen:
            self.counts.note_divergences(self.cursor.divergences + self.round_cursor.divergences)
            self._look_again(course.cursor, but=unit)
        self.use(unit, fetch if foreseen else (), keep=keep)

    def _look_again(self, cursor: Cursor, but: Unit | None) -> None:
        upcoming = (self.units[use.unit] for use in cursor.upcoming())
        fetched = (one for one in upcoming if not self._never_fetched(one))
        self.look_again(fetched, self._ahead.limit_nbytes, but=but)

    def _use_routed(self, unit: Unit, phase: Phase) -> None:
        self._routed_uses += not self.in_round
        counts, kept = self._course.frequencies, unit.residence.waits and not unit.in_place
        (counts.used_where_kept if kept else counts.used_anew)(unit.index)
        self._announced.pop(unit, None)
        forward = phase is Phase.FORWARD
        if not forward and (needed := self._layers.needed_with(unit)):
            self.announce(needed)
        self.use(unit, (), keep=forward and (self._meeting is None or unit not in self._meeting.chosen))

    def expect(self, units: list[Unit], indices: Sequence[int], phase: Phase, *, again: bool) -> None:
        """Begin to fetch the routed units that a layer is about to use, in this order. indices: theirs.
        again: a backward may use them once more.
        """
        if phase is Phase.BACKWARD:
            self._layers.recomputed(units)
        elif again and any(map(self._routed.get, units[:1])):  # no backward comes to rows of embeddings
            self._layers.announced(units)
        for call in self.before_routed_fetch if phase is Phase.FORWARD else ():
            call(units, indices)
        self.announce(units)

    def drop(self, unit: Unit) -> None:
        """End one `hold`; the last one releases the unit, or keeps it waiting where the plan says so."""
        if not unit.residence.drop():
            return
        if self._timeline.recording:
            self._timeline.span("compute", unit.name, unit.residence.began_s, time.perf_counter())
        if (name := unit.changed()) is not None:
            self.refusals.refuse(unit, would_be_lost(name))
        unit.detach()
        self.release(unit)

    def apply(self, unit: Unit, on_done: Callable[[], None], values: Download | None = None) -> UpdatePass:
        """See Residency. values: of `hi`, on their way from the device; the update starts from them."""
        self.frequencies.updated(unit.index)
        self._values = values
        return super().apply(unit, on_done)

    # What Residency decides

    def _begin_fetch(self, unit: Unit, *, urgent: bool) -> Job:
        if unit.record.on_device:
            return self._fetch_on_device(unit)
        if self._device_updates is not None:
            bring_down(unit, self._device)
        if self._assembler is not None and (again := self._assembler.again(unit)) is not None:
            return again
        target = unit if self._assembler is None else self._assembler.target_of(unit)
        job: FetchPass | FetchAndUpdatePass
        if unit.pending:
            job = FetchAndUpdatePass(target, self._device, unit.record.tile_numel)
            job.orthogonalize_by(self._assembler)
        else:
            job = fetch_of(target, self._device, unit.record.tile_numel, self._outgoing)
        self._lane.submit(job, urgent=urgent)
        return job if self._assembler is None else self._assembler.assemble(unit, job, target)

    def _has_masters(self, unit: Unit) -> bool:
        return super()._has_masters(unit) and (self._assembler is None or not self._assembler.rounds(unit))

    def _arrived(self, unit: Unit) -> None:
        self._device.arrived(unit.flat)

    def _make_update(self, unit: Unit, *, resident: bool) -> UpdatePass:
        if self._device_updates is not None:
            bring_down(unit, self._device)
        job = self._update_pass(unit)
        values, self._values = self._values, None
        if values is not None:
            job.start_from_copy(values)
        return job

    def _update_pass(self, unit: Unit) -> UpdatePass:
        job = UpdatePass(unit, self._device, unit.record.tile_numel)
        job.orthogonalize_by(self._assembler)
        return job

    def _lend(self, unit: Unit, job: UpdatePass) -> None:
        try:
            super()._lend(unit, job)
        except BaseException as error:  # the memory would never be given back
            self._lane.fail(error)
            raise

    def _wait(self, job: Job, cause: str) -> None:
        for name, since, until in stalls_of(self._lane, job, cause):
            self.counts.stalled(name, until - since)
            self._timeline.span("stall", name, since, until)

    # Steps

    def flush(self, unit: Unit) -> None:
        """Apply a unit's pending updates now, whether or not it is needed.

        Raises: UnsupportedError where a view has changed a parameter since it was released.
        """
        if self.refusals.look(unit):
            self.refusals.check()
        if not unit.pending:
            return
        residence = unit.residence
        if not residence.users and residence.lent is None and residence.fetch is not None:
            self.evict(unit)
        if unit.record.on_device:
            self._update_on_device(unit)
            return
        if self._device_updates is not None:
            bring_down(unit, self._device)
        self._lane.submit(self._update_pass(unit))

    def changed(self, unit: Unit) -> None:
        """Take a unit off the device whose values are about to be replaced in its record.

        Raises: UnsupportedError while the unit is in use.
        """
        if unit.residence.users:
            raise UnsupportedError(
                f"{unit.name}: its parameters are in use and cannot be replaced. Do so outside forward and "
                "gathered()."
            )
        self.evict(unit)
        unit.values_changed()

    def close_step(self, *, updates_at_fetch: bool) -> bool:
        """End a step when the optimizer has decided its updates: what was fetched before is stale. Return
        False for the step of a further optimizer, which ends none.

        updates_at_fetch: whether updates are pending until the next fetch, and not applied in the backward.
        """
        self.end_rounds()
        self.updates_at_fetch = updates_at_fetch
        if not self.cursor.trace and not self._routed_uses:
            # Nothing was used since the last step: other fetches stay valid.
            self._evict_waiting(only_pending=True)
            return False
        self.counts.count_step()
        self.blocks.period_ended()
        self.frequencies.close_step()
        self._set_apart.clear()
        self._routed_uses = 0
        self._layers.clear()
        self.end()
        return True

    def begin_step(self) -> None:
        """Plan anew where the last step was not as planned; begin the fetches that open the plan."""
        cursor = self.cursor
        if not cursor.trace:
            return
        if self._has_other_window(self._steps) or self._steps.is_stale(self._fetched_sizes()):
            self._plan(self._steps, tuple(cursor.trace), self._fetched_sizes())
        cursor.restart()
        if cursor.plan is not None and self._assembler is not None:
            self._assembler.check(cursor.plan)
        self.begin(cursor.plan.opening if cursor.plan is not None else ())

    # Rounds

    def close_round(self) -> bool:
        """End a round when another one begins. Return False where none was under way in which anything was
        planned: see [Note: all at once] in autograd/hooks.py.
        """
        if not self.in_round or not self._rounds.cursor.trace:
            return False
        self._rounds.frequencies.close_step()
        return True

    def begin_round(self) -> None:
        """Begin a forward without gradients, of which many may follow: a round, by a plan that is a cycle.
        The step that was under way, if any, goes on at `end_rounds`, where it was.
        """
        self._round_room.begin()
        course, cursor = self._rounds, self._rounds.cursor
        # What is to lie in place is not fetched ahead: its use puts it there.
        sizes = self._sizes(lambda u: 0 if u.comes_in_place or self._is_lodged(u) else u.window_nbytes)
        if cursor.trace and (course.is_stale(sizes) or course.has_other_length):
            self._plan(course, tuple(cursor.trace), sizes)
        elif not course.planned or course.has_other_sizes(sizes) or self._has_other_window(course):
            planned = tuple(step.use for step in cursor.plan.steps) if cursor.plan is not None else None
            in_order = (Use(Phase.FORWARD, one.index) for one in self._layers.others)
            self._plan(course, planned or tuple(in_order), sizes)
        self.counts.count_round()
        self.blocks.period_ended()
        cursor.restart()
        if cursor.plan is None:
            raise AssertionError("expected a plan of the round that begins, got none")
        self._round_room.follow(cursor.plan)
        if self._assembler is not None:
            self._assembler.check(cursor.plan)
        if not self.in_round:
            self._course, self._set_apart = course, self.stay_by(self._set_apart)
        self.open_round(cursor.plan.opening)

    def end_rounds(self) -> None:
        """Go on with the step, where it was; after a round that was the last one, for now."""
        if not self.in_round:
            self._round_room.end()  # of a round that an error has kept from beginning
            return
        if self._rounds.cursor.trace:
            self._rounds.frequencies.close_step()
        self._course, self._set_apart = self._steps, self.stay_by(self._set_apart)
        self._round_room.end()
        self._look_again(self.cursor, but=None)
        self.fetch_owed()

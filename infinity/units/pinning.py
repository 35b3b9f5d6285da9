"""Which fields of records lie in host memory, and which units live on the device: decided from how often
units are used, and carried out.

A field moves up without a transfer of its own: it gets a target, and the next pass that has all of it in
memory leaves it there. It moves down by being written, between two steps or rounds, while no unit is in use.
Whole records move to the device and back between steps alone: what that saves shows in updates, and a round
makes none.

[Note: free room]
How often a slice is used shows slowly, and the placement is decided seldom. Where host memory has room that
nothing is placed in and gradients do not need, a slice takes it with its next fetch, as caches do: it would
be written back otherwise, so that costs nothing. What that room is worth, and which slices leave between
steps, or rounds, to make some, is decided by `Admission`. In rounds nothing but `hi` is read, and comes.

[Note: packed weights]
What is packed in a checkpoint's files stays packed in host memory, unless all fields of all units fit there
as what they are widened to: then nothing is left to be done for a use. That is decided once a step or a round
has shown what gradients take, and a base that did not fit stays packed from then on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np

from infinity.lane.lane import StreamLane
from infinity.lane.passes import LeavePass
from infinity.planning.admission import Admission
from infinity.planning.frequency import Frequencies
from infinity.planning.many_slices import revise_by_likely, revise_in_host
from infinity.planning.placement import (
    HORIZON_STEPS,
    REVISED_EVERY,
    Candidate,
    Key,
    Move,
    Placement,
    PlacementBudget,
    Revision,
    Tier,
    fields_of_unit,
    is_of_most_steps,
    place_before_first_step,
    revise,
    revise_in_turn,
)
from infinity.records.record import Record
from infinity.sizes import BLOCK, round_up
from infinity.storage.memory import Ledger
from infinity.storage.store import Extent, HostStore, Store
from infinity.units.agreed import are_same, never
from infinity.units.all_fields import AllFields
from infinity.units.all_fit import place_all
from infinity.units.device_tier import DeviceTier
from infinity.units.unit import Unit

logger = logging.getLogger("infinity")

_READS_PER_UPDATE = 20
"""Reads from one update to the next, at least, of a field that may live on the device: each update removes it
from the device.
"""


class Pins:
    """Owns the placement of one engine's fields. Called between steps, and between rounds (forwards without
    gradients), from the thread that computes.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        frequencies: Frequencies,
        lane: StreamLane,
        kept: Ledger,
        stores: tuple[HostStore, Store],
        tier: DeviceTier | None = None,
        same: Callable[[int, str], bool] | None = None,
    ) -> None:
        """Place fields of `units` in the first of `stores` as far as `kept` has room; else in the second.
        tier: where `hi` may live as well, None for nowhere. same: of several ranks, says whether all of them
        have the same number; all of them call it.
        """
        self.revisions = 0
        """How often the placement was changed."""
        self.reason = ""
        """Why the placement was decided as it was, as text for logs."""
        self._units = units
        self._fields = AllFields(units)
        self._frequencies = frequencies
        self._lane = lane
        self._kept = kept
        self._host, self._nvme = stores
        self._tier, self._same = tier, same
        self._placement: dict[Key, Tier] = {}
        self._host_nbytes = np.zeros(len(units), np.int64)
        """What fields that are placed in host memory take there, of each unit."""
        self._gradient_nbytes = 0
        self._to_host: deque[Move] = deque()
        self._admitted: dict[Key, int] = {}
        """What has taken free room since the placement was decided, and the bytes of it."""
        self._slices = np.zeros(len(units), np.bool_)
        """Units that have asked for some."""
        self._admission = Admission(frequencies)
        self._admission_in_rounds: Admission | None = None
        self._steps = 0
        self._rounds = 0
        self._packs = False
        self._packed: set[int] = set()
        """Units whose `hi` has a place in host memory, or waits for one, packed."""
        self._opening = 0
        """How many units, the first ones, opened the last step: see `opening` in placement."""

    def forward_began(self, _module: object) -> None:
        """Before the first step ends, no use was counted: let frozen weights live on the device as if each
        was used in every step, so that they come once; on the host, all that is trained, if all of it fits.
        """
        if self._steps or self._placement:
            return
        if self._tier is None:
            here = self._nvme is self._host
            revision = None if here else place_all(self._units, self._fields, self._free_nbytes())
            if revision is not None:
                self._revise(revision)
                self._set_targets()
            return
        frozen = [unit for unit in self._units if not unit.trainable and not self._tier.is_routed(unit)]
        weights = ((one.index, one.record.field_nbytes("hi"), _parts(one)) for one in frozen)
        self._placement = place_before_first_step(weights, self._budget(0))
        self._lodge(moves=False)

    def close_step(self) -> None:
        """Decide anew from time to time, first after the first step: it shows what gradients take. After each
        step while what is used is changing.
        """
        self._forget_own()
        self._steps += 1
        self._opening = self._tier.opening() if self._tier is not None else 0
        held = self._kept.peak_nbytes - self._pinned_nbytes() if self._steps == 1 else self._in_use_nbytes()
        self._gradient_nbytes = max(self._gradient_nbytes, held)
        if self._steps % REVISED_EVERY == 1 or self._frequencies.unsettled or self._rounds:
            budget = self._budget(self._gradient_nbytes, self._admission.reserve_nbytes)
            self._decide_packing(budget.host_nbytes - self._gradient_nbytes)
            self._revise(self._revision(self._frequencies, budget))
        self._rounds = 0
        self._make_reserve(self._admission)
        self._set_targets()
        self._lodge(moves=True)

    def admit(self, units: Sequence[Unit], indices: Sequence[int]) -> None:
        """Let slices that are about to be fetched have free room: see [Note: free room]. Asked for all of a
        layer at once, since a step uses thousands. indices: of these units, most of which need not be asked.
        """
        if self._nvme is self._host or self._to_host:
            return
        self._fields.look()
        if self._fields.any_packed:
            units = [one for one in units if one.record.packed_nbytes is None]
            indices = [one.index for one in units]
        slices = self._slices.data  # of few units, numbers are read and set faster than by arrays
        admission = self._admission_in_rounds if self._rounds else self._admission
        if admission is None or not (self._rounds or self._steps):
            for index in indices:
                slices[index] = True
            return
        more, there, sizes = (
            admission.expects_more().data,
            self._host_nbytes.data,
            self._fields.unit_nbytes.data,
        )
        wanted = []
        for at, index in enumerate(indices):
            slices[index] = True
            if more[index] and there[index] < sizes[index]:  # else all of it is there
                wanted.append(units[at])
        if wanted:
            self._admit(wanted, admission)

    def _admit(self, units: Iterable[Unit], admission: Admission) -> None:
        """Let slices have free room that are expected to be used more than another that has some."""
        there, sizes = self._host_nbytes.data, self._fields.unit_nbytes.data
        free_nbytes, admitted, all_of = self._free_nbytes(), self._admitted, self._fields.of_unit
        in_one = self._tier is None and not self._rounds
        asked_nbytes = 0
        for unit in units:
            record, index = unit.record, unit.index
            if unit.residence.fetch is not None:
                continue  # what waits where it computes is not fetched
            if record.all_in_host or not (self._rounds or record.in_files is None):
                continue  # what is trained leaves its checkpoint's files
            nbytes = sizes[index]
            if nbytes > free_nbytes and in_one and not there[index] and (index, "hi") not in admitted:
                asked_nbytes += nbytes  # as nearly all
                continue
            lacks = [
                (name, nbytes)
                for name, nbytes in all_of(index)
                if not (record.in_host(name) or (index, name) in self._placement or (index, name) in admitted)
            ]
            if self._rounds:
                lacks = [one for one in lacks if one[0] == "hi"]
            if needed := sum(nbytes for _, nbytes in lacks):
                admission.ask(needed)
                if needed <= free_nbytes:
                    self._take(unit, lacks)
                    free_nbytes = self._free_nbytes()
        admission.ask(asked_nbytes)

    def _free_nbytes(self) -> int:
        """Bytes that nothing has, or is to have."""
        of_gradients = 0 if self._rounds else max(0, self._gradient_nbytes - self._in_use_nbytes())
        return self._kept.free_nbytes - self._kept.aside_nbytes - of_gradients

    def _take(self, unit: Unit, fields: Iterable[tuple[str, int]]) -> None:
        for name, nbytes in fields:
            self._admitted[unit.index, name] = nbytes
            self._kept.set_aside(nbytes)
            unit.record.targets[name] = self._host.allocate_promised(nbytes)

    def _make_reserve(self, admission: Admission) -> None:
        """Have those slices leave that are used least, as far as newcomers need room: see admission."""
        if not admission.is_asked:
            return
        placed = np.flatnonzero(self._slices & (self._host_nbytes > 0))
        leaving = admission.close_step(placed, self._host_nbytes[placed], max(0, self._free_nbytes()))
        if not leaving:
            return
        self._fields.look()
        moves = [Move(*one, "host", "nvme") for unit in leaving for one in self._in_host(unit)]
        self._leave(moves)
        for move in moves:
            del self._placement[move.unit, move.field]
        self._host_nbytes[leaving] = 0

    def _in_host(self, unit: int) -> list[tuple[int, str, int]]:
        """Return the fields of a unit that are placed in host memory, with what they take: of `_fields`, as
        they were found last.
        """
        get = self._placement.get
        return [
            (unit, name, nbytes) for name, nbytes in self._fields.of_unit(unit) if get((unit, name)) == "host"
        ]

    def _count_in_host(self, units: Iterable[int]) -> None:
        """Count the bytes of these units anew: where they are placed has changed."""
        self._fields.look()
        for unit in units:
            self._host_nbytes[unit] = sum(nbytes for _, _, nbytes in self._in_host(unit))

    def _place_admitted(self) -> None:
        if not self._admitted:
            return
        placement: dict[Key, Tier] = dict.fromkeys(self._admitted, "host")
        self._placement.update(placement)
        units = np.array([unit for unit, _ in self._admitted], np.int64)
        np.add.at(self._host_nbytes, units, np.array([*self._admitted.values()], np.int64))
        self._admitted.clear()

    def _lodge(self, *, moves: bool) -> None:
        """Let units live on the device, as they are placed; whole records come up if anything `moves`."""
        if self._tier is None:
            return
        there = [unit for unit in self._units if self._placement.get((unit.index, "hi")) == "device"]
        records = [unit for unit in there if self._is_whole(unit)]
        below = [unit for unit in records if not unit.record.on_device]
        if moves:  # those that were in use when it was decided
            placed = set(records)
            self._tier.lower([unit for unit in self._units if unit not in placed], self._allocate_below)
        self._tier.lodge([unit for unit in there if unit not in set(records)], records, moves=moves)
        if self._nvme is self._host:  # the way back is kept free
            for unit in below:
                if unit.record.on_device:
                    self._kept.set_aside(unit.record.nbytes("device"))

    def _is_whole(self, unit: Unit) -> bool:
        """Whether a unit's whole record is placed on the device."""
        fields = unit.record.fields
        return unit.trainable and all(self._placement.get((unit.index, one)) == "device" for one in fields)

    def close_round(self, expected: Frequencies) -> None:
        """Decide anew when the rounds since the last step have doubled: a move has to pay within twice as
        many, so that moves cost no more than the rounds before them. expected: of a round, without updates.
        """
        self._forget_own()
        self._rounds += 1
        if self._admission_in_rounds is None:
            self._admission_in_rounds = Admission(expected)
        if self._rounds & (self._rounds - 1) == 0 or expected.unsettled:
            records = {unit.index for unit in self._units if self._is_whole(unit)}
            taken = self._tier.records_nbytes([self._units[one] for one in records]) if self._tier else 0
            reserve = self._admission_in_rounds.reserve_nbytes
            budget = self._budget(0, self._in_use_nbytes() + reserve, taken)
            self._decide_packing(budget.host_nbytes)
            fixed = {key: tier for key, tier in self._placement.items() if key[0] in records}
            self._revise(self._revision(expected, budget, 2 * self._rounds, records), fixed)
        self._make_reserve(self._admission_in_rounds)
        self._set_targets()
        self._lodge(moves=False)

    def _budget(self, gradient_nbytes: int, held_nbytes: int = 0, taken_nbytes: int = 0) -> PlacementBudget:
        """Return the room there is, but for `held_nbytes` on the host and `taken_nbytes` on the device."""
        on_device = self._tier.room_nbytes - taken_nbytes if self._tier is not None else 0
        on_host = self._kept.limit_nbytes - held_nbytes
        scratch = self._tier.scratch_nbytes if self._tier is not None else 0
        return PlacementBudget(max(0, on_device), max(0, on_host), gradient_nbytes, scratch)

    def make_room(self, nbytes: int) -> None:
        """Let placed fields leave, those that save least first, until `nbytes` are free, or none is left.
        Called outside of forwards and backwards.
        """
        self._forget_own()
        held = self._budget(0, self._in_use_nbytes() + nbytes)
        self._revise(self._revision(self._frequencies, held, by_all=False))

    def _revision(
        self,
        expected: Frequencies,
        budget: PlacementBudget,
        horizon_steps: int = HORIZON_STEPS,
        records: AbstractSet[int] | None = None,
        *,
        by_all: bool = True,
    ) -> Revision:
        """Decide. records: of a round, the units whose whole records live on the device, and stay there.
        by_all: whether all ranks decide, if there are several; else nothing comes to the device or leaves it.
        """
        fields = self._fields
        fields.look()
        if self._tier is None and self._nvme is not self._host and fields.nbytes.all():
            return self._revision_in_host(expected, budget, horizon_steps)
        candidates, old = list(self._candidates(expected)), self._placement
        if records is not None:
            old = {key: tier for key, tier in old.items() if key[0] not in records}
            candidates = [
                replace(one, whole=False) if one.whole else one
                for one in candidates
                if one.unit not in records
            ]
        if self._tier is None or self._same is None:
            return revise(old, candidates, budget, horizon_steps)
        agreed = partial(are_same, self._same) if by_all else never
        return revise_in_turn(old, candidates, budget, horizon_steps, agreed)

    def _revision_in_host(
        self, expected: Frequencies, budget: PlacementBudget, horizon_steps: int
    ) -> Revision:
        """Decide between host memory and NVMe: of many slices by those alone that are used most, as long as
        that decides the same.
        """
        old, fields = self._placement, self._fields
        likely = None
        if not (self._packs and fields.any_packed):
            likely = fields.likely(expected, old, budget.host_nbytes)
        if likely is not None and (found := revise_by_likely(old, *likely, budget, horizon_steps)):
            return found
        packed = self._packed_nbytes if self._packs else None
        columns = fields.columns(expected, old, packed)
        return revise_in_host(old, fields.keys, columns, budget, horizon_steps)

    def _forget_own(self) -> None:
        """Forget the place of what has left its checkpoint's files since, where that is no longer its own.
        Without NVMe it lies in host memory for good: it is placed no longer, and waits for no room. With
        NVMe, what was packed in host memory is there no more.
        """
        self._place_admitted()
        keys: Iterable[Key] = self._placement
        if self._nvme is not self._host:  # of many fields, few or none
            keys = ((unit, "hi") for unit in self._packed)
        placed = [key for key in keys if self._placement.get(key) == "host"]
        gone = {key for key in placed if self._units[key[0]].record.in_files is None}
        if not gone:
            return
        for move in [one for one in self._to_host if (one.unit, one.field) in gone]:
            self._to_host.remove(move)
            self._kept.set_aside(-move.nbytes)
        self._packed -= {unit for unit, _ in gone}
        self._drop(gone)

    def _drop(self, keys: AbstractSet[Key]) -> None:
        for key in keys:
            self._placement.pop(key, None)
        self._count_in_host({unit for unit, _ in keys})

    def _in_use_nbytes(self) -> int:
        """Bytes of the share that are held by others: gradients, activations."""
        return self._kept.held_nbytes - self._host.held_nbytes

    def _pinned_nbytes(self) -> int:
        """Bytes of placed fields that are in host memory, or have their room there."""
        waiting = {(move.unit, move.field) for move in self._to_host}
        placed = {key for key, tier in self._placement.items() if tier == "host"}
        records = ((self._units[unit].record, name) for unit, name in placed - waiting)
        return sum(self._packed_nbytes(*one) or one[0].field_nbytes(one[1]) for one in records)

    def _revise(self, revision: Revision, fixed: Placement = MappingProxyType({})) -> None:
        """Carry a decision out, but for what comes up. fixed: what was no part of it."""
        self.reason = revision.reason
        if not revision.moves:
            return
        logger.info("placement: %s", revision.reason)
        self._placement = {**fixed, **revision.placement}
        self._count_in_host({move.unit for move in revision.moves})
        if self._tier is not None:
            down = dict.fromkeys(move.unit for move in revision.moves if move.source == "device")
            self._tier.lower([self._units[unit] for unit in down], self._allocate_below)
        self._leave([move for move in revision.moves if move.source == "host"])
        self.revisions += 1
        for move in revision.moves:
            if move.target == "host":
                self._kept.set_aside(move.nbytes)
                self._to_host.append(move)
                if self._packed_nbytes(self._units[move.unit].record, move.field) is not None:
                    self._packed.add(move.unit)

    def _decide_packing(self, room_nbytes: int) -> None:
        """Decide whether packed weights stay packed in host memory: all that is there does not fit else."""
        if self._packs:
            return
        self._fields.look()
        if int(self._fields.nbytes.sum()) <= room_nbytes:
            return
        widened = {
            (unit, name): self._units[unit].record.field_nbytes(name)
            for (unit, name), tier in self._placement.items()
            if (tier, name) == ("host", "hi") and self._units[unit].record.packed_nbytes is not None
        }
        self._leave([Move(*key, nbytes, "host", "nvme") for key, nbytes in widened.items()])
        self._drop(widened.keys())
        self._packs = True

    def _packed_nbytes(self, record: Record, name: str) -> int | None:
        """Return the bytes that a field takes in host memory, where it is to stay packed there."""
        packed = record.packed_nbytes if name == "hi" and self._packs else None
        return None if packed is None else round_up(packed, BLOCK)

    def _allocate_below(self, unit: Unit, name: str) -> Extent:
        """Return the place of a field that leaves the device: on NVMe, or in the host memory that was kept
        free.
        """
        nbytes = unit.record.field_nbytes(name)
        if self._nvme is self._host:
            return self._host.allocate_promised(nbytes)
        return self._nvme.allocate(nbytes, f"{unit.name}.{name}")

    def records_leave(self, nbytes: int) -> int:
        """Take records off the device until `nbytes` more are free there, or none can leave; return the bytes
        that are.
        """
        held = self._tier.held_nbytes if self._tier is not None else 0
        freed = 0
        while self._tier is not None and freed < nbytes and self.one_record_leaves():
            freed = held - self._tier.held_nbytes
        return freed

    def one_record_leaves(self) -> bool:
        """Take a record off the device in the middle of a step, the one that saves least there; False where
        none can.
        """
        if self._tier is None:
            return False
        for index, field in reversed(list(self._placement)):
            unit = self._units[index]
            if field == "hi" and self._tier.may_leave(unit):
                logger.info("placement: %s leaves the device for what is in use there", unit.name)
                self._lower([unit])
                return True
        return False

    def _lower(self, units: Sequence[Unit]) -> None:
        if self._tier is None:
            return
        gone = {unit.index for unit in units}
        self._drop({key for key in self._placement if key[0] in gone})
        self._tier.lower(units, self._allocate_below)

    def records_leave_for_good(self) -> None:
        """Take all records off the device: an optimizer without a step for it has come."""
        self._lower([unit for unit in self._units if unit.record.nbytes("device")])

    def empty_device(self) -> None:
        """Take all that lives on the device off it, for good: it has run out of memory. Called outside of
        forwards and backwards.
        """
        if self._tier is not None:
            self._tier.leave_for_activations()
            self._take_off()

    def rest(self) -> None:
        """Take all that lives on the device off it, until `wake`. Called between steps."""
        if self._tier is not None:
            self._tier.rest(resting=True)
            self._take_off()

    def wake(self) -> None:
        """Let units live there again, as it is decided anew."""
        if self._tier is not None:
            self._tier.rest(resting=False)

    def _take_off(self) -> None:
        there = {unit for (unit, _), tier in self._placement.items() if tier == "device"}
        self._lower([unit for unit in self._units if unit.index in there])
        self._lodge(moves=False)

    def _candidates(self, expected: Frequencies) -> Iterator[Candidate]:
        """Every field, with what a step, or a round, is expected to read and write of it."""
        for unit in self._units:
            record = unit.record
            moves = self._nvme is not self._host or record.in_files is not None
            if not moves and self._tier is None:
                continue  # it lies in host memory for good
            fetches = expected.fetches(unit.index)
            updates = expected.updates(unit.index)
            anew = updates if "hi" in record.schema.derived else 0.0
            rises = self._tier is not None and updates > 0
            yield from fields_of_unit(
                unit.index,
                {name: record.field_nbytes(name) for name in record.fields},
                record.schema.derived,
                fetches,
                updates,
                lasts=_READS_PER_UPDATE * updates <= fetches - anew,
                beside_nbytes=self._tier.gradients_nbytes(unit) if self._tier and rises else None,
                opens=unit.index < self._opening and is_of_most_steps(expected.share_of_steps(unit.index)),
                copies=_parts(unit),
                moves=moves,
                packed_nbytes=self._packed_nbytes(record, "hi"),
            )

    def _set_targets(self) -> None:
        """Give fields their place in host memory, as far as this step's gradients leave room by now."""
        while self._to_host and self._to_host[0].nbytes <= self._kept.free_nbytes:
            move = self._to_host.popleft()
            record, extent = self._units[move.unit].record, self._host.allocate_promised(move.nbytes)
            if self._packed_nbytes(record, move.field) is not None:
                record.keep_packed(extent)
            else:
                record.targets[move.field] = extent

    def _stop_coming(self, move: Move) -> None:
        """Have a field that waits for its place in host memory, or is on its way there, stay where it is."""
        unit = self._units[move.unit]
        record = unit.record
        if move.field == "hi":
            self._packed.discard(move.unit)
        waiting = [one for one in self._to_host if (one.unit, one.field) == (move.unit, move.field)]
        if waiting:
            self._to_host.remove(waiting[0])
            self._kept.set_aside(-waiting[0].nbytes)
        elif move.field in record.targets:
            self._lane.drain()  # a pass under way may adopt it
            if move.field in record.targets:
                self._host.free(record.targets.pop(move.field))
                if unit.residence.fetch is None:
                    unit.unbind()  # it may have been used there: see Record.exchange

    def _leave(self, moves: Sequence[Move]) -> None:
        """Move fields to NVMe; those that were still on their way up stay there. The record of a unit that is
        lodged on the device is there, too; one that lives there itself goes there from where it is.
        """
        jobs: list[tuple[Unit, LeavePass]] = []
        for move in moves:
            unit = self._units[move.unit]
            self._stop_coming(move)
            kept = unit.record.packed_copy is not None and move.field == "hi"
            lives_on_device = move.target == "device" and self._is_whole(unit)
            if lives_on_device or (not kept and not unit.record.in_host(move.field)):
                continue
            if unit.record.in_files is not None and move.field == "hi":
                self._lane.drain()
                unit.record.drop_host_copy()
                if unit.residence.fetch is None:
                    unit.unbind()
                continue
            extent = self._nvme.allocate(move.nbytes, f"{unit.name}.{move.field}")
            job = LeavePass(unit.record, move.field, extent, unit.record.tile_numel)
            self._lane.submit(job)
            jobs.append((unit, job))
        for unit, job in jobs:
            self._lane.wait(job, finished=True)
            if unit.residence.fetch is None:
                unit.unbind()


def _parts(unit: Unit) -> int:
    """Return of how many ranks' parts a unit is put together."""
    return len(unit.record.holders.members)

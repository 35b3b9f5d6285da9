"""The device as a tier: how much of an accelerator's memory is for what, which units live there, and whose
whole records do.

[Note: what lives on the device]
A unit that is lodged keeps a copy of `hi` there, whose original is below, until an update changes that. A
record that lives there has all of its fields there and nowhere else: it is used in place, and updated there
(see device_updates). Its gradients stay there, too, until they are applied. It comes up and goes down between
steps, by passes of the lane, while nobody uses it. Where torch has no memory for it, it stays below, and no
more lives there from then on than did. Of several ranks none brings up what another uses, or has no room or
memory for: each says so before anything comes up. Should units in use take more than their share, one record
after the other leaves in the middle of a step, and the room for such records is less from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from infinity.device.room import DeviceRoom
from infinity.lane.lane import StreamLane
from infinity.lane.passes import LeavePass
from infinity.planning.budget import DeviceBudget
from infinity.planning.placement import opening
from infinity.ranks.group import Ranks
from infinity.sizes import format_size
from infinity.storage.store import Extent, TensorStore
from infinity.units.device_updates import DeviceUpdates
from infinity.units.residency import UnitResidency
from infinity.units.unit import Unit

logger = logging.getLogger("infinity")


@dataclass(frozen=True, slots=True)
class Records:
    """What whole records on the device need. takes: the bytes of a unit's gradients that stay there with its
    record. leave: takes them off the device. allowed: whether each optimizer can make its steps there;
    need_scratch: whether these need memory for intermediate values, which no step in one kernel does.
    failure_was_handled: tells the device that we do without memory that torch did not have.
    """

    store: TensorStore
    updates: DeviceUpdates
    takes: Callable[[Unit], int]
    leave: Callable[[Unit], None]
    allowed: Callable[[], bool]
    need_scratch: Callable[[], bool]
    failure_was_handled: Callable[[], None]


class DeviceTier:
    """Divides the window of one engine between units that wait and units that live on the device. Called
    between steps, from the thread that computes.
    """

    def __init__(
        self,
        residency: UnitResidency,
        room: DeviceRoom,
        budget: DeviceBudget,
        lane: StreamLane,
        records: Records | None,
        ranks: Ranks,
    ) -> None:
        """Begin with nobody living there. records: None where whole records do not. ranks: that share the
        units.
        """
        self.budget = budget
        self._residency, self._room, self._lane = residency, room, lane
        self._records, self._ranks = records, ranks
        self._lodgers: frozenset[Unit] = frozenset()
        self._closed = self._resting = False
        self._full_nbytes: int | None = None
        """What lived there when torch had no memory for a further record."""

    @property
    def room_nbytes(self) -> int:
        """Bytes for units that live on the device. They are fewer where units in use have taken more than
        their share, so that others had to give way.
        """
        left = self.budget.lodging_nbytes - self._room.lacked_nbytes
        left = left if self._full_nbytes is None else min(left, self._full_nbytes)
        return 0 if self._closed or self._resting else max(0, left)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of that for intermediate values of updates, where records may live there and some need it."""
        if self._records is None or not self._records.allowed() or not self._records.need_scratch():
            return 0
        return self.budget.scratch_nbytes

    @property
    def held_nbytes(self) -> int:
        """Bytes of what lives there now."""
        here = [unit for unit in self._residency.units if lives_on_device(unit)]
        return sum(unit.record.nbytes("device") or self._nbytes(unit) for unit in here)

    def gradients_nbytes(self, unit: Unit) -> int | None:
        """Return the bytes that a unit's gradients take beside its record, if that may live on the device;
        None where it may not.
        """
        records, record = self._records, unit.record
        if records is None or not unit.trainable or record.in_files is not None:
            return None
        if not record.schema.is_updated_on_device or not records.allowed():
            return None
        return records.takes(unit)

    def is_routed(self, unit: Unit) -> bool:
        """Whether the data decides whether a unit is used."""
        return unit in self._residency.routed

    def opening(self) -> int:
        """Return how many units, the first ones, open the step that has ended: see [Note: what lives on the
        device] in planning/placement. The plan of a first step knows no better than that all are used again.
        """
        return opening(self._residency.cursor.trace)

    def lodge(self, units: Collection[Unit], records: Collection[Unit], *, moves: bool) -> None:
        """Have these units live on the device from their next use on, and no others; and the whole `records`,
        which come up now, if anything `moves`, as far as there is room.
        """
        wanted = frozenset(units)
        left = self.budget.window_nbytes - self._room.lacked_nbytes - sum(map(self._nbytes, wanted))
        left -= self.records_nbytes(records)
        if wanted != self._lodgers or any(not unit.residence.lodged for unit in wanted):
            self._residency.lodge(wanted)
            self._lodgers = wanted
        if moves:
            self._raise([unit for unit in records if not unit.record.on_device])
        self._residency.give_window(max(0, left))

    def _nbytes(self, unit: Unit) -> int:
        return self._room.nbytes(unit.resident_nbytes)

    def records_nbytes(self, units: Collection[Unit]) -> int:
        """Return the bytes that whole records take there, with gradients and intermediate values."""
        nbytes = sum(_fields_nbytes(unit) + (self.gradients_nbytes(unit) or 0) for unit in units)
        return nbytes + self.scratch_nbytes if units else 0

    # Whole records

    def _raise(self, units: Sequence[Unit]) -> None:
        """Bring records to the device, as far as there is room now, on all ranks, which have the same units
        there: see [Note: what lives on the device].
        """
        if self._records is None or not units:
            return
        there = {one for one in self._residency.units if one.record.nbytes("device")}
        rising: list[tuple[Unit, dict[str, Extent]]] = []
        failed = False
        for unit in self._agreed(units, there):
            extents = self._allocate(self._records, unit, _missing(unit))
            if extents is None:
                failed = True
                break
            self._residency.flush(unit)
            self._residency.evict(unit)
            rising.append((unit, extents))
        on_all = self._ranks.least(len(rising), "raise records to the device")
        failed = failed or on_all < len(rising)
        for _, extents in rising[on_all:]:  # another rank has no memory for its part
            for extent in extents.values():
                self._records.store.free(extent)
        rising = rising[:on_all]
        if failed:
            self._full_nbytes = self._living_nbytes({*there, *(one for one, _ in rising)})
        jobs = [
            (unit, self._move(unit, name, extent))
            for unit, extents in rising
            for name, extent in extents.items()
        ]
        self._await(jobs)
        self._release_scratch()

    def _agreed(self, units: Sequence[Unit], there: Collection[Unit]) -> list[Unit]:
        """Return those of these units that no rank uses, and that each has room for, beside the records that
        are `there`. Every rank calls it, with the same units.
        """
        refused: list[int] = []
        more: list[Unit] = []
        taken = 0 if self._records is None or self._records.updates.is_open else self.scratch_nbytes
        for unit in units:
            nbytes, full = taken + _fields_nbytes(unit), self._full_nbytes
            lacks = full is not None and self._living_nbytes({*there, *more, unit}) > full
            if unit.residence.users or lacks or not self._room.fits(max(0, nbytes)):
                refused.append(unit.index)
                continue
            more.append(unit)
            leaves = unit.residence.fetch is not None and not unit.in_place  # it makes room by coming up
            taken = nbytes - leaves * self._nbytes(unit)
        count = len(self._residency.units)
        by_any = set(self._ranks.union(refused, count, "find room for records on the device"))
        return [unit for unit in units if unit.index not in by_any]

    def _living_nbytes(self, records: Collection[Unit]) -> int:
        """Return the bytes that these records take there, with what belongs to them, and all lodged units."""
        return self.records_nbytes(records) + sum(map(self._nbytes, self._lodgers))

    def _allocate(self, records: Records, unit: Unit, names: Sequence[str]) -> dict[str, Extent] | None:
        """Return memory for fields of a unit, and see that there is some for intermediate values; None, with
        a warning, where torch has none.
        """
        extents: dict[str, Extent] = {}
        try:
            records.updates.open(self.scratch_nbytes)
            for name in names:
                nbytes = unit.record.field_nbytes(name)
                extents[name] = records.store.allocate(nbytes, f"{unit.name}.{name}")
        except BaseException as error:
            for extent in extents.values():
                records.store.free(extent)
            if not isinstance(error, torch.OutOfMemoryError):
                raise
        else:
            return extents
        records.failure_was_handled()
        logger.warning(
            "the device has no memory for %s of %s, though device_memory=%s has room: it stays below, and no "
            "more records than the %s that are on the device by now will live there. Give Config a smaller "
            "device_memory.",
            format_size(_fields_nbytes(unit)),
            unit.name,
            format_size(self.budget.total_nbytes),
            format_size(records.store.held_nbytes),
        )
        return None

    def lower(self, units: Sequence[Unit], place: Callable[[Unit, str], Extent]) -> None:
        """Take records that nobody uses off the device, to where `place` puts each field."""
        jobs: list[tuple[Unit, LeavePass]] = []
        for unit in units:
            if self._records is None or not unit.record.nbytes("device") or unit.residence.users:
                continue
            self._records.updates.settle(unit.record)  # it may still be on its way up
            self._residency.flush(unit)
            self._residency.evict(unit)
            self._records.leave(unit)
            names = [name for name in unit.record.fields if unit.record.in_device(name)]
            jobs += [(unit, self._move(unit, name, place(unit, name))) for name in names]
        self._await(jobs)
        self._release_scratch()

    def _move(self, unit: Unit, name: str, extent: Extent) -> LeavePass:
        job = LeavePass(unit.record, name, extent, unit.record.tile_numel)
        self._lane.submit(job)
        return job

    def _await(self, jobs: Sequence[tuple[Unit, LeavePass]]) -> None:
        for unit, job in jobs:
            self._lane.wait(job, finished=True)
            if unit.residence.fetch is None:
                unit.unbind()

    def may_leave(self, unit: Unit) -> bool:
        """Whether a unit's record is on the device, and could leave in the middle of a step."""
        residence, records = unit.residence, self._records
        if records is None or not unit.record.on_device or records.updates.busy is unit:
            return False
        return not residence.users and (residence.fetch is None or residence.waits)

    def rest(self, *, resting: bool) -> None:
        """Let nobody live there, or as many as before."""
        self._resting = resting

    def leave_for_activations(self) -> None:
        """Let nobody live there any more: the device has run out of memory."""
        if self._closed:
            return
        logger.warning(
            "the device ran out of memory: what lives there leaves, %s of device_memory=%s, and nothing "
            "will live there again. Steps take longer from now on. Likely cause: activations take more than "
            "device_memory leaves them. Give Config a smaller device_memory, or smaller batches, or "
            "checkpoint activations.",
            format_size(self.held_nbytes),
            format_size(self.budget.total_nbytes),
        )
        self._closed = True

    def _release_scratch(self) -> None:
        """Give the memory for intermediate values back, if no record is there any more."""
        if self._records is not None and not any(
            one.record.nbytes("device") for one in self._residency.units
        ):
            self._records.updates.close()


def _fields_nbytes(unit: Unit) -> int:
    return sum(unit.record.field_nbytes(name) for name in unit.record.fields)


def lives_on_device(unit: Unit) -> bool:
    """Whether a unit is on the device, and stays there."""
    return unit.record.on_device or (unit.residence.lodged and unit.residence.processed)


def _missing(unit: Unit) -> list[str]:
    """Return the fields of a record that are not on the device."""
    return [name for name in unit.record.fields if not unit.record.in_device(name)]

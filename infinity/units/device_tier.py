"""The device as a tier: how much of an accelerator's memory is for what, and which units live there."""

from __future__ import annotations

from collections.abc import Collection

from infinity.device.room import DeviceRoom
from infinity.planning.budget import DeviceBudget
from infinity.units.residency import Executor
from infinity.units.unit import Unit


class DeviceTier:
    """Divides the window of one engine between units that wait and units that live on the device. Called
    between steps, from the thread that computes.
    """

    def __init__(self, executor: Executor, room: DeviceRoom, budget: DeviceBudget) -> None:
        """Begin with nobody living there."""
        self.budget = budget
        self._executor = executor
        self._room = room
        self._lodgers: frozenset[Unit] = frozenset()

    @property
    def room_nbytes(self) -> int:
        """Bytes for units that live on the device. They are fewer where units in use have taken more than
        their share, so that others had to give way.
        """
        return max(0, self.budget.lodging_nbytes - self._room.lacked_nbytes)

    @property
    def held_nbytes(self) -> int:
        """Bytes of the units that live there now."""
        return sum(self._nbytes(unit) for unit in self._executor.units if lives_there(unit))

    def lodge(self, units: Collection[Unit]) -> None:
        """Have these units live on the device from their next use on, and no others."""
        wanted = frozenset(units)
        left = self.budget.window_nbytes - self._room.lacked_nbytes - sum(map(self._nbytes, wanted))
        if wanted != self._lodgers or any(not unit.residence.lodged for unit in wanted):
            self._executor.lodge(wanted)
            self._lodgers = wanted
        self._executor.give_window(max(0, left))

    def _nbytes(self, unit: Unit) -> int:
        return self._room.nbytes(unit.resident_nbytes)


def lives_there(unit: Unit) -> bool:
    """Whether a unit is on the device, and stays there."""
    return unit.residence.lodged and unit.residence.processed

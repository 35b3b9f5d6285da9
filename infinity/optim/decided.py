"""Which units have updates that earlier steps decided, and which of these updates have to be applied before
the next step decides its own.

An update may wait for the next use of its unit; see [Note: missed steps] in base. After a step over many
slices thousands of updates wait. An update whose gradient lies in the record, and before which its slice has
missed no steps, may wait for as long as the slice may miss steps. The slice's stack keeps that count, so it
is not looked at here; see [Note: steps of a stack] in missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter

from infinity.optim.missed import most_misses
from infinity.records.updates import Update
from infinity.units.unit import Unit


class DecidedUpdates:
    """The units of one optimizer for which updates were decided, and may be pending."""

    def __init__(self) -> None:
        """There are none."""
        self._units: dict[Unit, float] = {}
        """Each with the most steps of zero gradients that any of its updates includes: see `_misses`."""

    def __contains__(self, unit: object) -> bool:
        """Whether updates that were decided may be pending for a unit."""
        return unit in self._units

    def add(self, unit: Unit, update: Update) -> None:
        """Note an update that was decided, and put with its unit."""
        waits = update.field is not None and not (update.missed or update.after)  # of slices, thousands
        misses = 0.0 if waits and update.may_miss else _misses(update)
        if misses > self._units.get(unit, -1.0):
            self._units[unit] = misses

    def leave(self, units: Iterable[Unit]) -> None:
        """Forget units: what is pending for them is known elsewhere."""
        for unit in units:
            self._units.pop(unit, None)

    def that_cannot_wait(
        self, busy: Iterable[Unit], begin: Iterable[Unit], overdue: Iterable[Unit]
    ) -> list[Unit]:
        """Begin a step; return the units whose pending updates have to be applied before its own, in the
        order of their numbers, since ranks may orthogonalize. busy: units for which the step decides further
        updates. begin: units of slices that begin to miss steps. overdue: units of slices that may
        miss no further step.
        """
        decided, anew = self._units, set(busy)
        looked_at = {*overdue, *(set(begin) - decided.keys())}
        looked_at |= {unit for unit, misses in decided.items() if misses}
        looked_at -= anew
        self._units = {unit: 0.0 for unit in decided if unit not in looked_at and unit not in anew}
        known: dict[int, tuple[Update, float]] = {}  # many slices share an update, which is kept alive
        found = [unit for unit in anew if unit.pending]
        for unit in looked_at:
            if not unit.pending:
                continue
            if _most(unit.pending.values(), known) >= most_misses(unit):
                found.append(unit)
            elif unit in decided:
                self._units[unit] = decided[unit]
        return sorted(found, key=attrgetter("index"))


def _misses(update: Update) -> float:
    """Return the steps of zero gradients that an update includes; infinity where it may not wait at all."""
    return update.misses if update.may_miss else math.inf


def _most(updates: Iterable[Update], known: dict[int, tuple[Update, float]]) -> float:
    """Return the most such steps of any of these updates. known: what was found, by an update's id()."""
    most = 0.0
    for one in updates:
        if id(one) not in known:
            known[id(one)] = one, _misses(one)
        most = max(most, known[id(one)][1])
    return most

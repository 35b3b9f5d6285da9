"""Which units have updates that earlier steps decided, and which of these updates have to be applied before
the next step decides its own.

An update may wait for the next use of its unit; see [Note: missed steps] in base. After a step over many
slices thousands of updates wait. An update whose gradient lies in the record, and before which its slice has
missed no steps, may wait for as long as the slice may miss steps. The slice's stack keeps that count, so it
is not looked at here; see [Note: steps of a stack] in missed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import filterfalse
from operator import attrgetter

from infinity.optim.missed import most_misses
from infinity.records.updates import Update
from infinity.units.unit import Unit


class DecidedUpdates:
    """The units of one optimizer for which updates were decided, and may be pending."""

    def __init__(self) -> None:
        """There are none."""
        self._units: set[Unit] = set()
        self._misses: dict[Unit, float] = {}
        """Of those of which any update includes steps of zero gradients, the most: see `_misses`."""

    def __contains__(self, unit: object) -> bool:
        """Whether updates that were decided may be pending for a unit."""
        return unit in self._units

    def expect(self, units: Iterable[Unit]) -> None:
        """Note units for which updates are about to be decided, of slices thousands. Those that include steps
        of zero gradients, or may not wait, are added, too.
        """
        self._units.update(units)

    def add(self, unit: Unit, update: Update) -> None:
        """Note an update that was decided, and put with its unit."""
        self._units.add(unit)
        misses = _misses(update)
        if misses > self._misses.get(unit, 0.0):
            self._misses[unit] = misses

    def leave(self, units: Iterable[Unit]) -> None:
        """Forget units: what is pending for them is known elsewhere."""
        gone = set(units)
        self._units -= gone
        for unit in gone.intersection(self._misses):
            del self._misses[unit]

    def that_cannot_wait(
        self, busy: Collection[Unit], begin: Iterable[Unit], overdue: Iterable[Unit]
    ) -> list[Unit]:
        """Begin a step; return the units whose pending updates have to be applied before its own, in the
        order of their numbers, since ranks may orthogonalize. busy: units for which the step decides further
        updates. begin: units of slices that begin to miss steps. overdue: units of slices that may
        miss no further step.
        """
        decided, misses = self._units, self._misses
        looked_at = {*overdue, *filterfalse(decided.__contains__, begin), *misses}.difference(busy)
        decided.difference_update(busy)
        left: dict[Unit, float] = {}
        known: dict[int, tuple[Update, float]] = {}  # many slices share an update, which is kept alive
        found = [unit for unit in busy if unit.pending]
        for unit in looked_at:
            if not unit.pending:
                decided.discard(unit)
            elif _most(unit.pending.values(), known) >= most_misses(unit):
                decided.discard(unit)
                found.append(unit)
            elif unit in misses:
                left[unit] = misses[unit]
        self._misses = left
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

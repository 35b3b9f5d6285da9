"""Ranks whose data chooses among modules, as among experts that are modules of their own.

[Note: ranks that choose]
Units are partitioned, so every rank has to take part where any rank needs one; and which experts a rank
calls only its own data says. No plan has these units, and no announcement: a forward that loops over a
ModuleList tells nothing before it calls. So before each use the ranks *meet*: each says which of these units
it is about to fetch, or that it is about to do something else, that all do. As long as any rank names one,
all fetch the last one that is named, and those that did not name it let it go again; then they meet anew.
Nobody does what all do before nobody needs a unit of its own. So all ranks begin the same transfers in the
same order, whatever each has chosen, in forwards and backwards, and in recomputations.

Gradients likewise: those of units that were chosen wait, on each rank that has some, until the ranks meet and
none needs a unit. Then all reduce those that any of them has, zeros where a rank has none, as DDP counts
parameters that a rank did not use.

A meeting is one small exchange in host memory; only models with such modules, on several ranks, have any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from infinity.ranks.group import Ranks
from infinity.units.unit import Unit


class MeetingOfRanks:
    """What the ranks do before they use a unit: see [Note: ranks that choose]."""

    def __init__(
        self, ranks: Ranks, units: Sequence[Unit], chosen: Collection[Unit], join_in: Callable[[Unit], None]
    ) -> None:
        """Meet for `chosen`, some of all `units`. join_in: takes part in a fetch that other ranks need."""
        self.chosen = frozenset(chosen)
        self._ranks, self._units, self._join_in = ranks, units, join_in
        self._owing: dict[int, Unit] = {}
        self._reduce: Callable[[Unit], None] | None = None

    def reduce_by(self, call: Callable[[Unit], None]) -> None:
        """Have `call` reduce the gradients of a unit; every rank calls it, with gradients or without."""
        self._reduce = call

    def owes(self, unit: Unit) -> None:
        """Note that this rank has gradients of a unit that the ranks have not summed."""
        self._owing[unit.index] = unit

    def before(self, unit: Unit | None) -> None:
        """Return when this rank may use `unit`, or do what all ranks do; None: the latter."""
        mine = 0
        if unit is not None and unit in self.chosen:
            if unit.residence.fetch is not None:
                return  # it is here: there is nothing to take part in
            mine = unit.index + 1
        while True:
            rows = self._ranks.of_all([mine, len(self._owing)], "meet before a use")
            named = max(row[0] for row in rows)
            if named and named != mine:
                self._join_in(self._units[named - 1])
                continue
            if not named and any(row[1] for row in rows):
                self._reduce_all()
            return

    def _reduce_all(self) -> None:
        owing, self._owing = self._owing, {}
        for index in self._ranks.union(list(owing), len(self._units), "sum gradients of chosen modules"):
            if self._reduce is not None:
                self._reduce(self._units[index])

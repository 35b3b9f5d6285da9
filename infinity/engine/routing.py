"""What an engine does for modules that use those of their tiles alone that the data needs: experts, and rows
of embeddings.

[Note: slices that are not used]
A stack in slices is one parameter to its user: where any of them gets a gradient in a step, the others have
one of zeros, which still decays weights and moments. No such gradient is ever made. The optimizer puts an
update without one with the unit, and it is replayed when the slice is next used; see [Note: missed steps] in
optim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from infinity.autograd.hooks import graph_task
from infinity.engine.foresight import NONE, Foresight
from infinity.planning.trace import Phase
from infinity.ranks.group import Ranks
from infinity.records.updates import PendingUpdates
from infinity.tiling.owner import ExpertDivision
from infinity.units.residency import UnitResidency
from infinity.units.unit import Unit


class Routing:
    """Follows one `Routed` module: fetches the units of the tiles that it announces."""

    def __init__(
        self,
        residency: UnitResidency,
        ranks: Ranks,
        name: str,
        units_of: Sequence[Sequence[Unit]],
        division: ExpertDivision | None = None,
    ) -> None:
        """name: of the module. units_of: those of each tile, by number. division: of its experts among ranks;
        None where each computes with all.
        """
        self._residency, self._ranks, self._name, self._units_of = residency, ranks, name, units_of
        self._alone = _alone(units_of)
        self.division = division
        self._foresight: Foresight = NONE

    def agreed(self, needed: list[int], count: int) -> list[int]:
        """See tiling.RoutingFollower."""
        self._residency.meet()
        return self._ranks.union(needed, count, f"route {self._name}")

    def foresee(self, foresight: Foresight) -> None:
        """Guess, from now on, what the next layer uses."""
        self._foresight = foresight

    def announced(self, numbers: list[int], hidden: torch.Tensor | None) -> None:
        """See tiling.RoutingFollower."""
        if self._alone is not None:
            each, (unit_of, index_of, untold_of) = list(dict.fromkeys(numbers)), self._alone
            units = list(map(unit_of.__getitem__, each))
            indices = list(map(index_of.__getitem__, each))
            untold = list(map(untold_of.__getitem__, each))
        else:
            units = list(dict.fromkeys(chain.from_iterable(map(self._units_of.__getitem__, numbers))))
            indices, untold = [one.index for one in units], [one.untold for one in units]
        PendingUpdates.tell_together(untold)
        phase = Phase.FORWARD if graph_task() == -1 else Phase.BACKWARD
        # Without gradients, and in no round, it is a reentrant checkpoint, which a backward runs again.
        again = torch.is_grad_enabled() or not self._residency.in_round
        self._residency.expect(units, indices, phase, again=again)
        if phase is Phase.FORWARD and hidden is not None:
            for layer in self._foresight.of_this:
                layer.came(units)
            for layer in self._foresight.of_next:
                layer.look(hidden)


def _alone(units_of: Sequence[Sequence[Unit]]) -> tuple[list[Unit], list[int], list[PendingUpdates]] | None:
    """Return the unit of each tile, its index, and what is pending for it, where each has one of its own: to
    ask thousands of units themselves takes longer. None where any has others.
    """
    units = [one[0] for one in units_of if len(one) == 1]
    if len(set(units)) < len(units_of):
        return None
    return units, [one.index for one in units], [one.untold for one in units]

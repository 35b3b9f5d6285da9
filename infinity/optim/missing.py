"""The part of an optimizer that notes what slices without a gradient miss; see [Note: steps of a stack] in
missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from infinity.engine.engine import Engine
from infinity.errors import UnsupportedError
from infinity.optim.decided import DecidedUpdates
from infinity.optim.missed import Beginning, MissedStep, Slice
from infinity.optim.optimizer_view import ShowingState
from infinity.optim.with_gradients import WithGradients
from infinity.records.update_rules import Recipe
from infinity.units.unit import Unit


class NotingMissed(ShowingState):
    """Looks for the slices that begin to miss steps, and notes a step for all that miss it."""

    seed: int
    _decided: DecidedUpdates
    _with_gradients: WithGradients

    def _begin_to_miss(self) -> Beginning:
        """Return the slices that have gradients of zeros because others of their stacks have some, but for
        those that had one in the last such step, too: of the gradients that were last found in order.
        """
        engines = list(self._engines.values())
        stacks = ((id(one), len(one.arrivals.stacks)) for one in engines)
        known = id(self._counts), self._with_gradients.sorts, *stacks
        self._missed.know(known, lambda: self._stacks(engines), self._counts)
        freezes = tuple(one.arrivals.slices.freezes for one in engines)
        return self._missed.look(self._with_gradients.slices, freezes)

    def _stacks(self, engines: Iterable[Engine]) -> Iterator[list[Slice]]:
        """Yield the slices of each stack that are its own. engines: in the order of what watches slices."""
        for number, engine in enumerate(engines):
            for stack in engine.arrivals.stacks:
                yield [
                    Slice(
                        one,
                        *engine.parameters.unit_of(one),
                        place.group,
                        place.position,
                        self.recipe_of(one).matrices is None,
                        (number, engine.arrivals.slices.number(one)),
                    )
                    for one in stack
                    if (place := self.mine.get(id(one))) is not None
                ]

    def _note_missed(self, begin: Beginning, clip: float) -> None:
        """Note a step for all slices with gradients of zeros, of which there are many: none is ever made."""
        engines = self._engines.values()
        if any(engine.arrivals.slices.any_attached for engine in engines):
            for unit in begin.units():
                check_unused(unit)
        in_files = any(engine.checkpoint_store is not None for engine in engines)
        anew = begin if in_files else begin.for_the_first_time()
        for one, unit in zip(anew.parameters(), anew.units(), strict=True):
            if id(one) not in self._begun or unit.record.in_files is not None:
                self.make_room(self.mine[id(one)].engine, one)
        step = MissedStep(clip, self.seed, self._missed.steps)
        self._decided.leave(self._missed.note(step, self._options_of))

    def _options_of(self, parameter: nn.Parameter) -> tuple[Recipe, dict[str, Any]]:
        return self.recipe_of(parameter), self.param_groups[self.mine[id(parameter)].group]


def check_unused(unit: Unit) -> None:
    """Raises: UnsupportedError for a unit that is in use."""
    if unit.residence.users:
        raise UnsupportedError(
            f"{unit.name}: step() inside a forward or `with infinity.gathered(...)`: call it afterwards"
        )

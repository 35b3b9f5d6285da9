"""Values of released parameters, held aside for one operation alone, outside forward and backward.

PEFT's DoRA takes the norms of each weight that it adapts when the adapter is made: layer after layer, a few
operations each, in code that knows nothing of `gathered`. To gather the whole base for that would hold it in
memory. So each of these operations has the values of its layer, and what it gives is memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from infinity.units.residency import UnitResidency
from infinity.units.unit import Unit


class Aside:
    """What an owner answers with, if an operation is to run on values that are there for it alone."""

    def __init__(self, holding: Callable[[], AbstractContextManager[None]]) -> None:
        """holding: gives what keeps the values present."""
        self._holding = holding

    def answer(self, parameters: Sequence[torch.Tensor], run: Callable[[], Any]) -> Any:
        """Return what `run` gives while the parameters have their values, in memory of its own."""
        with self._holding():
            storages = {one.untyped_storage()._cdata for one in parameters}

            def own(one: Any) -> Any:
                shares = isinstance(one, torch.Tensor) and one.untyped_storage()._cdata in storages
                return one.detach().clone() if shares else one

            return pytree.tree_map(own, run())


@contextmanager
def kept_aside(residency: UnitResidency, units: Iterable[Unit]) -> Iterator[None]:
    """Keep the values of units present for an operation that is no part of a step."""
    held: list[Unit] = []
    try:
        for unit in dict.fromkeys(units):
            residency.hold_aside(unit)
            held.append(unit)
        yield
    finally:
        for unit in held:
            residency.drop(unit)

"""Units whose values are kept present for one operation, outside forward and backward; see aside.Aside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from infinity.units.residency import UnitResidency
from infinity.units.unit import Unit


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

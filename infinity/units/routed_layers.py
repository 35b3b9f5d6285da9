"""Which routed units the layers of a forward have announced, to which a backward comes in reverse order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Sequence

from infinity.units.unit import Unit

_LAYERS = 1 << 12
"""Announcements of a forward that are remembered for its backward."""


class RoutedLayers:
    """The layers of the forwards that a backward may follow; see [Note: routed units] in residence."""

    def __init__(self) -> None:
        """Know none."""
        self._layers: deque[Sequence[Unit]] = deque()
        self._layers_of: Counter[Unit] = Counter()
        self._recomputed: Sequence[Unit] = ()
        self.others: Sequence[Unit] = ()
        """Units of the model that are no routed ones."""

    def open(self, units: Sequence[Unit], routed: Container[Unit]) -> None:
        """Take the units of a finished model."""
        self.others = [unit for unit in units if unit not in routed]

    def announced(self, units: Sequence[Unit]) -> None:
        """A layer of a forward is about to use these units."""
        if len(self._layers) == _LAYERS:
            self._layers_of.subtract(self._layers.popleft())
        self._layers.append(units)
        self._layers_of.update(units)

    def recomputed(self, units: Sequence[Unit]) -> None:
        """A layer is about to use these units in a forward that a backward runs again."""
        self._recomputed = units

    def clear(self) -> None:
        """A step is over."""
        self._recomputed = ()
        self._layers.clear()
        self._layers_of.clear()

    def needed_with(self, unit: Unit) -> list[Unit]:
        """Return what a backward that uses `unit` needs next: the other units of its layer, if it is the
        first of these, and those of the layer before; nothing for the others. A backward comes to them in
        reverse order, but to those of a forward that it runs again as that did.
        """
        if not self._layers_of.get(unit):
            return []
        layer = self._take_last()
        while unit not in layer:
            layer = self._take_last()
        before = self._layers[-1] if self._layers else ()
        order = list if unit in self._recomputed else reversed
        return [*(one for one in order(layer) if one != unit), *order(before)]

    def _take_last(self) -> Sequence[Unit]:
        layer = self._layers.pop()
        self._layers_of.subtract(layer)
        return layer

"""Rounds: forwards without gradients, as the tokens of a generation and the batches of an evaluation are."""

from __future__ import annotations

import sys
from types import FrameType

from torch.utils.checkpoint import CheckpointFunction

from infinity.units.pinning import Pins
from infinity.units.residency import UnitResidency


class Rounds:
    """Finds where a round ends: where a module begins, outside any other, that began in this round before.
    So one forward of a model is a round, and so is one over its blocks, called one after the other, or that
    of an encoder and a decoder. A forward that a backward may follow, and a backward, go on with the step.
    """

    def __init__(self, residency: UnitResidency, pins: Pins | None) -> None:
        """pins: None where fields of records stay where they are."""
        self._residency = residency
        self._pins = pins
        self._begun: set[int] = set()

    def forward_began(self, module: object) -> None:
        """A module begins, outside any other, and no backward will follow."""
        if _inside_reentrant_checkpoint():
            return
        if not self._residency.in_round or id(module) in self._begun:
            self._begun.clear()
            if self._residency.close_round() and self._pins is not None:
                self._pins.close_round(self._residency.round_frequencies)
            self._residency.begin_round()
        self._begun.add(id(module))

    def step_goes_on(self, _module: object) -> None:
        """A module begins whose backward may follow."""
        self._residency.end_rounds()


def _inside_reentrant_checkpoint() -> bool:
    """Whether a reentrant checkpoint runs this forward, which has gradients off for now."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False

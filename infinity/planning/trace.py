"""What a step touched, in order. Pure: no torch, no I/O."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    """In which half of a step a unit was used; recomputation inside a backward counts as backward."""

    FORWARD = "F"
    BACKWARD = "B"
    __hash__ = object.__hash__  # Enum's own hashes the name, in Python, at each use of a unit


class Use(NamedTuple):
    """One touch of one unit, named by its index."""

    phase: Phase
    unit: int

    def __str__(self) -> str:
        """As plans print it: "F12"."""
        return f"{self.phase.value}{self.unit}"


Trace = tuple[Use, ...]
"""The uses of one optimizer step, from the first forward after a step() to the next step()."""

"""Targets for measured figures, and whether they are met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Target:
    """A limit for a measured figure."""

    sign: Literal["≥", "≤"]
    limit: float
    what: str

    def met(self, value: float) -> bool:
        """Whether a measured value meets the limit."""
        return value >= self.limit if self.sign == "≥" else value <= self.limit

    def verdict(self, values: Sequence[float]) -> str:
        """Return a line with the median of the values, one per round, and a mark for whether it is met."""
        words = f"{self.sign} {self.limit:g} {self.what}"
        if not values:
            return f"{words}: not measured"
        median = statistics.median(values)
        return f"{words}: {median:.2f} {mark(met=self.met(median))}"


def mark(*, met: bool) -> str:
    """Return the mark after a figure with a limit."""
    return "✓" if met else "✗"

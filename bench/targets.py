"""Figures that have to be reached, and whether they were."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Target:
    """A limit on a measured figure."""

    sign: Literal["≥", "≤"]
    limit: float
    what: str

    def met(self, value: float) -> bool:
        """Whether a measured value is on the right side of the limit."""
        return value >= self.limit if self.sign == "≥" else value <= self.limit

    def verdict(self, values: Sequence[float]) -> str:
        """Return a line with the median of the values, one per round, and whether it meets the target."""
        words = f"{self.sign} {self.limit:g} {self.what}"
        if not values:
            return f"{words}: not measured"
        median = statistics.median(values)
        return f"{words}: {median:.2f} {mark(met=self.met(median))}"


def mark(*, met: bool) -> str:
    """Return the sign that stands behind a figure with a limit."""
    return "✓" if met else "✗"

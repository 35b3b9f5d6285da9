"""How often units, and rows and experts within them, are used: an average over past steps that forgets. Pure.

[Note: the average]
After every step the sum of what was counted is multiplied by `decay` and the step's count added, and so is
the weight of the steps, each counting 1. Their quotient weighs the steps by age, and is right from the first
step on: a count that is the same in every step is its own average (Adam's correction of its start, Kingma and
Ba 2015).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

HALF_LIFE_STEPS = 20.0
"""After so many steps a step counts half. Longer: less noise in how often a rare expert is used, but slower
to follow when routing drifts.
"""


class Frequencies:
    """Uses and updates of each unit, expected per step. 60 bytes a unit."""

    def __init__(self, units: int, half_life_steps: float = HALF_LIFE_STEPS) -> None:
        """Nothing was used yet, and nothing is expected."""
        self._uses = _Average(units, half_life_steps, np.int32, np.float64)
        self._fetches = _Average(units, half_life_steps, np.int32, np.float64)
        self._updates = _Average(units, half_life_steps, np.int32, np.float64)
        # Of this step: lists, which count one at a time faster than arrays.
        self._used, self._fetched, self._updated = [0] * units, [0] * units, [0] * units

    @property
    def steps(self) -> int:
        """Steps that were counted."""
        return self._uses.steps

    def used(self, unit: int, *, kept: bool = False) -> None:
        """Count a use in this step.

        kept: the unit had stayed since its use before, as the plan says, so that no tier had to be asked for
        it. A unit that is pinned where it computes was not kept: what is expected must not depend on where
        the unit is placed now, or the placement would chase itself.
        """
        self._used[unit] += 1
        if not kept:
            self._fetched[unit] += 1

    def updated(self, unit: int) -> None:
        """Count the update of this step."""
        self._updated[unit] += 1

    def close_step(self) -> None:
        """Fold what this step counted into what is expected."""
        counted = (self._uses, self._used), (self._fetches, self._fetched), (self._updates, self._updated)
        for average, now in counted:
            average.now[:] = now
            average.close_step()
            now[:] = [0] * len(now)

    def uses(self, unit: int) -> float:
        """Return the uses expected per step; 0 before the first step ends, as all of these."""
        return self._uses.of(unit)

    def fetches(self, unit: int) -> float:
        """Return the uses expected per step that find the unit gone since its use before."""
        return self._fetches.of(unit)

    def updates(self, unit: int) -> float:
        """Return the updates expected per step."""
        return self._updates.of(unit)


class SliceCounts:
    """Which slices of a parameter a step touches: rows of an nn.Embedding, experts of a 3-D parameter.

    The parameter is fetched whole; this says what fetching only the touched slices would save. 5 bytes a
    slice.
    """

    def __init__(self, slices: int, half_life_steps: float = HALF_LIFE_STEPS) -> None:
        """slices: the parameter's first dimension."""
        self._touched = _Average(slices, half_life_steps, np.bool_, np.float32)

    @property
    def steps(self) -> int:
        """Steps that were counted."""
        return self._touched.steps

    def observe(self, indices: NDArray[np.integer]) -> None:
        """Count the slices that one forward looks up: integers of any shape, each as often as it likes.

        Raises: IndexError naming one that is no slice.
        """
        if indices.size == 0:
            return
        touched = self._touched.now
        for index in (int(indices.min()), int(indices.max())):
            if not 0 <= index < touched.size:
                raise IndexError(f"index {index} is none of the {touched.size} slices")
        touched[indices] = True

    def close_step(self) -> None:
        """Fold what this step touched into what is expected."""
        self._touched.close_step()

    @property
    def touched_fraction(self) -> float:
        """The share of the slices that a step is expected to touch; 1 before the first step ends."""
        return float(self.frequencies().mean(dtype=np.float64)) if self.steps else 1.0

    def frequencies(self) -> NDArray[np.float32]:
        """Return for each slice the share of steps that are expected to touch it."""
        return self._touched.all()

    def would_save(self, nbytes: float) -> float:
        """Return the bytes that a step would be spared if it moved touched slices alone; nbytes: what it
        moves of the whole parameter.
        """
        return nbytes * (1 - self.touched_fraction)


class _Average:
    """See [Note: the average]. now: what this step counts."""

    def __init__(
        self, count: int, half_life_steps: float, now_dtype: DTypeLike, sum_dtype: DTypeLike
    ) -> None:
        if count < 0 or half_life_steps <= 0:
            raise ValueError(f"cannot count {count} things with a half life of {half_life_steps} steps")
        self.now = np.zeros(count, now_dtype)
        self.steps = 0
        self._decay = 0.5 ** (1 / half_life_steps)
        self._sum = np.zeros(count, sum_dtype)
        self._weight = 0.0

    def close_step(self) -> None:
        self._sum *= self._decay
        self._sum += self.now
        self._weight = self._weight * self._decay + 1
        self.now[:] = 0
        self.steps += 1

    def of(self, index: int) -> float:
        return float(self._sum[index] / self._weight) if self.steps else 0.0

    def all(self) -> NDArray[Any]:
        return self._sum / max(self._weight, 1.0)

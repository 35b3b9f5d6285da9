"""How often units are used: an average over past steps that forgets. Pure.

[Note: the average]
After every step the sum of what was counted is multiplied by `decay` and the step's count added, and so is
the weight of the steps, each counting 1. Their quotient weighs the steps by age, and is right from the first
step on: a count that is the same in every step is its own average (Adam's correction of its start, Kingma and
Ba 2015).

[Note: another pattern]
Such an average takes about its half life, 20 steps, until what has come into use counts more than what has
gone out of it; then come a margin in favour of what is placed (see placement), and up to 8 steps until the
placement is revised (see pins). So a changed pattern was followed after 24 to 36 steps. With a half life of
5 steps and a revision in every fourth it would be after 8; but then routing that only wavers moves up to 12 %
more bytes, since a rare expert that happens to be used twice looks like a frequent one.

So there is a second, short average, of which units a step uses. Where the two are further apart than wavering
explains, those units that are get the short one for the long one, and the placement is revised in each of the
next steps. How far apart they are is the squared differences of all units together, by what these would be on
average, were each used by itself, at its own frequency: about 0.6 of that where nothing changes, always, of
many experts by Zipf's law; now and then more than 2 where a step draws one of a few topics, which use many
experts together. So it is learnt what is usual, and how much that spreads, from the steps before the last
LAG, so that a change is none of them; "further apart" is SPREADS of those above it, and SURPRISE at least.
While it still rises steeply, the short average has seen too little of what is new: then nothing is done below
AT_ONCE.

Simulated (240 steps, means of several seeds), NVMe bytes against those of the long average alone. A set of 8
of 32 experts that another one takes turns with, every 40 steps on average: 0.64 with room for one, 1.00 for
both; every 20: 0.64 and 1.05, so that following pays least; every 12: 0.85 and 0.99; every 5: 1.02. Skewed or
even routing that stays or drifts slowly, batches drawn from a few topics, dense training: the same bytes,
since nothing is taken for a change. Where all of 128 experts, of which a step uses a sixth by Zipf's law,
change places every 40 steps, each change is seen 4 to 6 steps later, and with room for an eighth of them 42 %
of the uses are hits, where they were 38 %.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

HALF_LIFE_STEPS = 20.0
"""After so many steps a step counts half. Longer: less noise in how often a rare expert is used, but slower
to follow when routing drifts.
"""
RECENT_HALF_LIFE_STEPS = 3.0
"""Of the short average. Shorter: a change is seen a step sooner, and sets that take turns move more."""
SURPRISE, AT_ONCE = 1.75, 4.0
SPREADS, LAG = 7.0, 8
"""See [Note: another pattern]."""
FOLLOWED_WITHIN_STEPS = 8
"""Steps after a clear change of the pattern within which the placement follows; it is revised in each."""

_USUAL, _SPREAD = 0.6, 0.45
"""How far apart the averages are, and how much that spreads, until it is learnt."""
_USUAL_HALF_LIFE_STEPS = 12.0
_STEEP = 1.4
"""By so much what rises from one step to the next rises steeply."""
_LEAST_VARIANCE = 0.5
"""Added to that of all units' uses: one rare unit, used twice, is no other pattern."""
_LEAST_UNIT_VARIANCE = 0.05
"""Added to that of one unit's."""


Counted = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Units, each once, and how often each was counted."""


def _counted(units: Sequence[int]) -> Counted:
    """Return how often each of these is there, as all averages take it."""
    found, counts = np.unique(np.array(units, np.int64), return_counts=True)
    return found, counts.astype(np.float64)


class Frequencies:
    """Uses and updates of each unit, expected per step. 150 bytes a unit."""

    def __init__(self, units: int, half_life_steps: float = HALF_LIFE_STEPS) -> None:
        """Nothing was used yet, and nothing is expected."""
        self._uses = _Followed(units, half_life_steps)
        self._fetches = _Followed(units, half_life_steps)
        self._updates = _Followed(units, half_life_steps)
        self._touched = _Followed(units, half_life_steps)  # whether a step has any use
        self._settled_at = 0
        # Of this step, one unit for each time: of many slices a step uses few.
        self._kept: list[int] = []
        self._fetched: list[int] = []
        self._updated: list[int] = []
        self.used_where_kept, self.used_anew = self._kept.append, self._fetched.append
        """Count a use of a unit in this step: of one that was kept, and of one that was not; see `used`. They
        are called too often for functions.
        """
        self._steps_used = np.zeros(units, np.int64)

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
        if kept:
            self.used_where_kept(unit)
        else:
            self.used_anew(unit)

    def updated(self, unit: int) -> None:
        """Count the update of this step."""
        self._updated.append(unit)

    def were_updated(self, units: Iterable[int]) -> None:
        """Count those of many units."""
        self._updated += units

    def close_step(self) -> None:
        """Fold what this step counted into what is expected."""
        used = _counted(self._kept + self._fetched)
        self._steps_used[used[0]] += 1
        self._touched.close_step((used[0], np.ones(len(used[0]))))
        self._uses.close_step(used)
        self._fetches.close_step(_counted(self._fetched))
        self._updates.close_step(_counted(self._updated))
        for counts in (self._kept, self._fetched, self._updated):
            counts.clear()
        changed = self._touched.changed()
        if changed is not None:
            for one in (self._uses, self._fetches, self._updates, self._touched):
                one.forget(changed)
            self._settled_at = self.steps + FOLLOWED_WITHIN_STEPS

    @property
    def unsettled(self) -> bool:
        """Whether the pattern has just changed, so that what is expected does in every step: see
        [Note: another pattern].
        """
        return self.steps < self._settled_at

    def steps_used(self, unit: int) -> int:
        """Return in how many steps a unit was used, since the start."""
        return int(self._steps_used[unit])

    def uses(self, unit: int) -> float:
        """Return the uses expected per step; 0 before the first step ends, as all of these."""
        return self._uses.of(unit)

    def uses_of(self, units: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return `uses` of some units."""
        return self._uses.of_some(units)

    def uses_with_another(self, less: float) -> NDArray[np.float64]:
        """Return the uses of each unit that will be expected when a step is over that uses it once more, and
        each of its uses counts so much `less`.
        """
        return self._uses.with_another(1 - less)

    def share_of_steps(self, unit: int) -> float:
        """Return the share of steps that are expected to use a unit at all."""
        return self._touched.of(unit)

    def fetches(self, unit: int) -> float:
        """Return the uses expected per step that find the unit gone since its use before."""
        return self._fetches.of(unit)

    def updates(self, unit: int) -> float:
        """Return the updates expected per step."""
        return self._updates.of(unit)

    def fetches_of_all(self) -> NDArray[np.float64]:
        """Return `fetches` of each unit."""
        return self._fetches.of_all()

    def updates_of_all(self) -> NDArray[np.float64]:
        """Return `updates` of each unit."""
        return self._updates.of_all()


class _Average:
    """See [Note: the average]."""

    def __init__(self, count: int, half_life_steps: float) -> None:
        if count < 0 or half_life_steps <= 0:
            raise ValueError(f"cannot count {count} things with a half life of {half_life_steps} steps")
        self.steps = 0
        self.decay = 0.5 ** (1 / half_life_steps)
        self.sum = np.zeros(count)
        self.weight = np.zeros(1)
        """Of all units together, while it is that of each: each pass over so many numbers takes time."""

    def close_step(self, counted: Counted) -> None:
        units, counts = counted
        self.sum *= self.decay
        self.sum[units] += counts
        self.weight *= self.decay
        self.weight += 1
        self.steps += 1

    def all(self) -> NDArray[np.float64]:
        average: NDArray[np.float64] = self.sum / np.maximum(self.weight, 1.0)
        return average

    def some(self, units: NDArray[np.int64]) -> NDArray[np.float64]:
        weight = self.weight[units] if len(self.weight) > 1 else self.weight
        average: NDArray[np.float64] = self.sum[units] / np.maximum(weight, 1.0)
        return average

    def of(self, unit: int) -> float:
        weight = self.weight[unit if len(self.weight) > 1 else 0]
        return float(self.sum[unit] / weight)

    def become(self, other: _Average, units: NDArray[np.bool_]) -> None:
        """Be another one for these units, which is of one weight."""
        if len(self.weight) == 1:
            self.weight = np.full(len(self.sum), self.weight[0])
        self.sum[units] = other.sum[units]
        self.weight[units] = other.weight


class _Followed:
    """An average, and beside it that of the last few steps: see [Note: another pattern]."""

    def __init__(self, count: int, half_life_steps: float) -> None:
        self._all = _Average(count, half_life_steps)
        self._recent = _Average(count, RECENT_HALF_LIFE_STEPS)
        self._looks_from = round(3 * RECENT_HALF_LIFE_STEPS)
        self._usual, self._spread = _USUAL, _SPREAD
        self._lately: deque[float] = deque()
        """How far apart the averages were in the last steps, of which nothing is learnt yet."""

    @property
    def steps(self) -> int:
        return self._all.steps

    def close_step(self, now: Counted) -> None:
        for average in (self._all, self._recent):
            average.close_step(now)

    def of(self, index: int) -> float:
        return self._all.of(index) if self.steps else 0.0

    def of_all(self) -> NDArray[np.float64]:
        return self._all.all()

    def of_some(self, units: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._all.some(units)

    def with_another(self, count: float) -> NDArray[np.float64]:
        decay = self._all.decay
        expected: NDArray[np.float64] = self._all.sum * decay
        expected += count  # of many units, each new array takes more time than the operation
        expected /= self._all.weight * decay + 1
        return expected

    def changed(self) -> NDArray[np.bool_] | None:
        """Return of which units the share of steps that use them is another; None where the pattern is what
        it was, or has just changed, or there are not two averages to compare yet.
        """
        recent = self._recent
        if self.steps < self._looks_from or self._all.decay <= recent.decay:
            return None
        expected = self._all.all()
        variances = 1 - expected
        variances *= expected
        squares = recent.all()
        squares -= expected
        squares *= squares  # of many units, each new array takes more time than the operation
        shorter = (1 - recent.decay) / (1 + recent.decay)  # the variance of an average, by that of a step
        apart = float(np.sum(squares) / (shorter * (np.sum(variances) + _LEAST_VARIANCE)))
        clear = max(SURPRISE, self._usual + SPREADS * self._spread)
        rises = bool(self._lately) and apart > _STEEP * self._lately[-1]
        self._learn(apart)
        if apart <= (max(AT_ONCE, clear) if rises else clear):
            return None
        self._lately.clear()
        self._looks_from = self.steps + round(RECENT_HALF_LIFE_STEPS)
        changed: NDArray[np.bool_] = squares > 2 * shorter * (variances + _LEAST_UNIT_VARIANCE)
        return changed

    def _learn(self, apart: float) -> None:
        self._lately.append(apart)
        if len(self._lately) > LAG:
            new, off = 1 - 0.5 ** (1 / _USUAL_HALF_LIFE_STEPS), self._lately.popleft() - self._usual
            self._usual += new * off
            self._spread = math.sqrt((1 - new) * (self._spread**2 + new * off**2))

    def forget(self, units: NDArray[np.bool_]) -> None:
        """Expect of these units what was counted of late."""
        self._all.become(self._recent, units)

"""What is decided from the times of steps, kept for each length of steps. Pure: no torch, no I/O, no clock.

[Note: steps of several lengths]
What is decided from how long halves of a step compute is right for steps that compute as long. Sequences have
several lengths, though: in turn, more and more, at random. So steps are told apart by their *length*: how
many bits it takes to count the elements that a forward is given. Steps of one length differ by less than a
factor of two, and each length has a decision of its own, so that lengths which alternate find theirs again.

For one length it is decided behind its first step, then behind twice as many, and so on, and else where steps
of it have come to compute for longer, or shorter, than those that it was decided from: for the length within
these bounds, for what is recomputed, for what else runs there. By that is meant that the median of the
last few steps is off by more than `DRIFT`: a step that was disturbed changes nothing, and what was decided
stays until times have moved as far once more.

For a length that no step had so far it is decided from the nearest one that was timed, as if computing were
in proportion to the number of elements; that is put right behind its first step.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

DRIFT = 1.5
"""By how many times the computing of a half has to change for another decision."""
UNLIMITED = 1 << 62
"""Bytes, for no limit."""
_RECENT = 5
"""Steps whose median counts."""
_LITTLE = 0.1
"""Of the computing of both halves: what does not count."""

_DecisionT = TypeVar("_DecisionT")


@dataclass(frozen=True, slots=True)
class TimedStep:
    """What a step took."""

    forward_s: float
    """For which its forward computed, and waited for nothing; without what the lane's work took of that."""
    backward_s: float
    rate: float
    """Bytes per second that its drive has moved, in the half in which it moved more."""
    room_nbytes: int = UNLIMITED
    """Of gradients that found room in host memory until the next forward; UNLIMITED where all did."""
    worked_s: float = 0.0
    """Of the lane, where its thread takes a core from those that compute; else 0."""

    def scaled(self, factor: float) -> TimedStep:
        """Return what a step would take that computes so many times as much."""
        return replace(self, forward_s=factor * self.forward_s, backward_s=factor * self.backward_s)

    def drifted(self, before: TimedStep) -> bool:
        """Whether either half computes for much longer, or shorter, than in `before`; a half that hardly
        computes, beside the other, does not.
        """
        least_s = _LITTLE * (self.forward_s + self.backward_s)
        for now_s, then_s in ((self.forward_s, before.forward_s), (self.backward_s, before.backward_s)):
            shorter_s, longer_s = sorted((now_s, then_s))
            if max(longer_s, least_s) > DRIFT * max(shorter_s, least_s):
                return True
        return False


class _StepsOfLength(Generic[_DecisionT]):
    """What is known of steps of one length."""

    def __init__(self) -> None:
        self.decision: _DecisionT | None = None
        self._recent: deque[TimedStep] = deque(maxlen=_RECENT)
        self._count = self._decided_behind = 0
        self._decided_from: TimedStep | None = None

    @property
    def usual(self) -> TimedStep | None:
        """The median of the last steps; None before the first one."""
        if not self._recent:
            return None
        low = statistics.median_low
        return TimedStep(
            low(one.forward_s for one in self._recent),
            low(one.backward_s for one in self._recent),
            low(one.rate for one in self._recent),
            low(one.room_nbytes for one in self._recent),
            low(one.worked_s for one in self._recent),
        )

    def add(self, timed: TimedStep) -> None:
        self._recent.append(timed)
        self._count += 1

    def due(self) -> TimedStep | None:
        """Return what to decide from, None where what was decided holds."""
        usual, before = self.usual, self._decided_from
        if usual is None:
            return None
        in_turn = self._count >= max(1, 2 * self._decided_behind)
        return usual if in_turn or before is None or usual.drifted(before) else None

    def decide(self, decision: _DecisionT | None, timed: TimedStep) -> None:
        self.decision, self._decided_from, self._decided_behind = decision, timed, self._count


class DecisionsByLength(Generic[_DecisionT]):
    """Owns what was decided for steps of each length: see [Note: steps of several lengths]."""

    def __init__(self) -> None:
        """Know of no step."""
        self._of: dict[int, _StepsOfLength[_DecisionT]] = {}

    def add(self, length: int, timed: TimedStep) -> None:
        """Note what a step took."""
        self._of.setdefault(length, _StepsOfLength()).add(timed)

    def due(self, length: int) -> TimedStep | None:
        """Return what to decide from for a step that begins; None where what was decided holds, or no step
        was timed.
        """
        known = self._of.get(length)
        if known is not None:
            return known.due()
        timed = {one: usual for one, steps in self._of.items() if (usual := steps.usual) is not None}
        if not timed:
            return None
        nearest = min(timed, key=lambda one: (abs(one - length), one))
        return timed[nearest].scaled(2.0 ** (length - nearest))

    def decide(self, length: int, decision: _DecisionT | None, timed: TimedStep) -> None:
        """Note what was decided, from `timed`."""
        self._of.setdefault(length, _StepsOfLength()).decide(decision, timed)

    def of(self, length: int) -> _DecisionT | None:
        """Return what was decided last for steps of this length; None for nothing."""
        known = self._of.get(length)
        return None if known is None else known.decision

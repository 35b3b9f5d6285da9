"""Whether the next backward makes updates that step() has not decided yet: pure, from what happened before.

[Note: when speculation pays]
An update that is made in the backward, as if the norm of all gradients would stay within its bound, moves its
bytes while there is computing beside them; if step() then decides another one, they were moved for nothing.
So it is done where it would have been right lately: a moving average of the steps whose factor was the one
expected, with two bounds, so that it does not waver. The factor that is expected is the commonest of the last
steps: 1 where norms stay within their bound, 1/scale where losses are scaled. Where speculation was wrong for
another reason (a learning rate that is set between the backward and step(), say), it rests, twice as long
each time.
"""

from __future__ import annotations

from collections import Counter, deque

_WEIGHT = 0.25
"""Of the last step, in the average."""
_BEGINS, _ENDS = 0.7, 0.5
"""The average above which speculation begins, and below which it ends."""
_SCALES = 8
"""Steps whose factors are remembered."""
_REST, _LONGEST_REST = 8, 512
"""Steps for which it rests first, and at most."""


class SpeculationHistory:
    """What has become of one optimizer's steps, and what follows for the next backward."""

    def __init__(self, forced: bool | None) -> None:  # noqa: FBT001 - its only argument
        """Know nothing. forced: True or False decides in advance, where it is possible at all."""
        self._forced = forced
        self._likely = 0.5
        self._on = False
        self._rest = self._next_rest = 0
        self._scales: deque[float] = deque(maxlen=_SCALES)
        self._adds_up = False

    @property
    def speculates(self) -> bool:
        """Whether the next backward is to make updates."""
        if self._forced is not None:
            return self._forced and not self._adds_up
        return self._on and not self._adds_up and not self._rest

    @property
    def rests(self) -> bool:
        """Whether it speculates at other times, and not in the next backward."""
        return self._forced is not False and not self.speculates

    @property
    def decides(self) -> bool:
        """Whether what happened decides, and not its maker."""
        return self._forced is None

    @property
    def is_forced(self) -> bool:
        """Whether it is to speculate in any case."""
        return self._forced is True

    @property
    def is_likely(self) -> bool:
        """Whether the last steps were as expected more often than not: to undo is rare."""
        return self._likely >= _ENDS

    @property
    def scale(self) -> float:
        """The factor on the gradients that is expected."""
        for scale, times in Counter(self._scales).most_common(1):
            if times > 1:
                return scale
        return 1.0

    def give_up(self) -> None:
        """Never speculate again."""
        self._forced = False

    def close_step(self, scale: float, *, confirmed: int, dropped: int, added_up: bool) -> None:
        """Note a step: the factor on its gradients, how many units' updates were made before it and confirmed
        or dropped, and whether gradients of several backwards were added up.
        """
        as_expected = scale == self.scale
        if scale == scale:  # noqa: PLR0124 - not NaN: the factors were not all the same
            self._scales.append(scale)
        self._adds_up = added_up
        self._likely += _WEIGHT * (as_expected - self._likely)
        self._on = self._likely >= (_ENDS if self._on else _BEGINS)
        self._rest = max(0, self._rest - 1)
        if confirmed:
            self._next_rest = 0
        elif dropped and as_expected:
            self._next_rest = min(_LONGEST_REST, 2 * self._next_rest or _REST)
            self._rest = self._next_rest

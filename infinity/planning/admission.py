"""Which slices take room in host memory with their use, and which leave it for others. Pure.

[Note: room for newcomers]
What is used next is known best by what is used now. A cache takes in each slice that is used and gives up
another at once; here that would be a write to wait for in the middle of a forward. So a reserve is kept free:
a slice that comes into use takes of it, with the pass that has its record in memory anyway, if it is expected
to be used more than the one that has a place and is used least. After the step those that are used least
leave, all together, until the reserve is what newcomers have asked for of late.

A use counts `WAVERING` less than it would, and the reserve is `RESERVED` of what was asked for, and a quarter
of all that is placed at most: where all slices are used equally often, newcomers are no better than what they
replace. Simulated (`infinity bench experts`: 128 experts, room for 16, 32 and 64): on each of its traces at
most 1.8 % of the uses fewer hits than the better of LRU and LFU; 6.7 % where the placement alone decides.
"""

from __future__ import annotations

import numpy as np

from infinity.planning.densest import Booleans, Integers
from infinity.planning.frequency import Frequencies

WAVERING = 0.5
RESERVED = 0.85
"""See [Note: room for newcomers]."""
_KEPT = 0.5
"""Of what was asked for in earlier steps, each step."""


class Admission:
    """Decides which slices of one model have a place in host memory; their uses are counted elsewhere."""

    def __init__(self, expected: Frequencies) -> None:
        """expected: of a step, or of a round."""
        self._expected = expected
        self._lowest = 0.0
        """Uses a step that are expected of the least used slice that has a place."""
        self._more: Booleans | None = None
        self._steps = 0
        """Which units are expected to be used more than that, and the step after which this was found."""
        self._asked_nbytes = 0
        self._average_nbytes, self._weight = 0.0, 0.0
        self._placed_nbytes = 0

    def expects_more(self) -> Booleans:
        """Return for each unit whether it is expected, once it is used in this step, to be used more than the
        least used slice that has a place.
        """
        if self._more is None or self._steps != self._expected.steps:  # once a step: layers and guesses ask
            self._more = self._expected.uses_with_another(WAVERING) > self._lowest
            self._steps = self._expected.steps
        return self._more

    def ask(self, nbytes: int) -> None:
        """Count the bytes of a slice that is worth a place, and asks for one."""
        self._asked_nbytes += nbytes

    def wants(self, unit: int, nbytes: int) -> bool:
        """Whether one slice, which would take so many bytes, is worth a place; if so, it asks for it."""
        wanted = bool(self.expects_more()[unit])
        if wanted:
            self.ask(nbytes)
        return wanted

    @property
    def is_asked(self) -> bool:
        """Whether anything has asked for room of late, so that `close_step` has something to do."""
        return self._asked_nbytes + self._average_nbytes >= 1

    @property
    def reserve_nbytes(self) -> int:
        """Bytes to keep free for slices that come into use."""
        if not self._weight:
            return 0
        return min(round(RESERVED * self._average_nbytes / self._weight), self._placed_nbytes // 4)

    def close_step(self, placed: Integers, nbytes: Integers, free_nbytes: int) -> list[int]:
        """Return the slices that are to leave, when the uses of a step or a round have been counted.

        placed: the slices that have a place; nbytes: the bytes of each. free_nbytes: bytes that no slice has.
        """
        self._more = None
        self._average_nbytes = self._average_nbytes * _KEPT + self._asked_nbytes
        self._weight = self._weight * _KEPT + 1
        self._asked_nbytes = 0
        self._placed_nbytes = int(nbytes.sum()) + free_nbytes
        if free_nbytes > self._placed_nbytes // 2:
            self._lowest = 0.0
            return []
        uses, missing_nbytes = self._expected.uses_of(placed), self.reserve_nbytes - free_nbytes
        if missing_nbytes <= 0:
            self._lowest = float(uses.min()) if len(placed) else 0.0
            return []
        order = np.argsort(uses, kind="stable")
        count = 1 + int(np.searchsorted(np.cumsum(nbytes[order]), missing_nbytes))
        self._lowest = float(uses[order[count]]) if count < len(placed) else 0.0
        leaving: list[int] = placed[order[:count]].tolist()
        return leaving

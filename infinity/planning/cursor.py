"""Where in its plan a step is. Pure: no torch, no I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator

from infinity.planning.plan import Plan
from infinity.planning.trace import Use

_NEAR = 64
"""Uses. A use this close ahead in the plan may come early."""

_TRACE_LIMIT = 1 << 20
"""Uses. Beyond that (a long generation without a step) a step is followed but not remembered."""


class Cursor:
    """Where in the plan the step is, and what was used so far.

    Uses close by may come in another order than planned (the first plan only guesses the order in a block):
    they are taken as they come. A use that is not close by is a divergence: the cursor jumps to where the
    plan has it next.
    """

    def __init__(self) -> None:
        """Without a plan."""
        self.plan: Plan | None = None
        self.position = 0
        """The first use of the plan that has not come."""
        self.trace: list[Use] = []
        self.reordered = 0
        """Uses of the step that were not the next of the plan."""
        self.divergences = 0
        self._early: set[int] = set()
        self._opened = False
        self._places: dict[Use, list[int]] = {}

    def follow(self, plan: Plan) -> None:
        """Take a plan; its opening has not been fetched."""
        self.plan = plan
        places = defaultdict(list)
        for position, step in enumerate(plan.steps):
            places[step.use].append(position)
        self._places = dict(places)
        self.restart()
        self._opened = False

    def restart(self) -> None:
        """Go back to the start of the plan, whose opening is fetched now; forget the uses of the step."""
        self._opened = True
        self._early.clear()
        self.position = 0
        self.trace = []
        self.reordered = 0

    def upcoming(self) -> Iterator[Use]:
        """Return the plan's uses from here to the end of the step."""
        if self.plan is not None:
            for position in range(self.position, len(self.plan.steps)):
                yield self.plan.steps[position].use

    def advance(self, use: Use) -> tuple[tuple[int, ...], bool, bool]:
        """Take note of a use; return the fetches that begin with it, whether its unit stays, and whether it
        was foreseen.
        """
        if len(self.trace) < _TRACE_LIMIT:
            self.trace.append(use)
        if self._opened and not self._early and self.plan is not None:
            step = self.plan.steps[self.position] if self.position < len(self.plan.steps) else None
            if step is not None and step.use == use:  # as nearly always
                self.position += 1
                return step.fetch, step.keep, True
        places = self._places.get(use, ())
        if self.plan is None or not places:
            return (), False, False
        place = next(
            (one for one in places[bisect_left(places, self.position) :] if one not in self._early), None
        )
        foreseen = self._opened and place is not None and place <= self.position + _NEAR
        if place is None:
            place = places[0]
        self.reordered += place != self.position
        if foreseen:
            self._early.add(place)
            while self.position in self._early:
                self._early.discard(self.position)
                self.position += 1
        else:
            self.divergences += self._opened
            self._opened = True
            self._early.clear()
            self.position = place + 1
        step = self.plan.steps[place]
        return step.fetch, step.keep, foreseen

"""What is remembered of one kind of pass over the model, steps or rounds: where it is in its plan, and how
often it uses what. Pure: no torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from infinity.planning.cursor import Cursor
from infinity.planning.frequency import Frequencies
from infinity.planning.plan import Plan
from infinity.planning.trace import Trace

REPLAN_SHARE = 0.1
"""A new plan is made when more than this share of a pass's uses was not as planned."""

Planner = Callable[..., Plan]
"""make_plan, or make_cycle."""


class Course:
    """One kind of pass: its cursor, what is expected of it, and its plans."""

    def __init__(self, planner: Planner) -> None:
        """Begin without units. planner: makes the plans."""
        self.cursor = Cursor()
        self.frequencies = Frequencies(0)
        self._planner = planner
        self._sizes: Sequence[int] = ()

    def open(self, units: int) -> None:
        """Expect nothing yet of so many units."""
        self.frequencies = Frequencies(units)

    @property
    def planned(self) -> bool:
        """Whether there is a plan."""
        return self.cursor.plan is not None

    def plan(
        self,
        trace: Trace,
        sizes: Sequence[int],
        window_nbytes: int,
        hides: Sequence[int],
        lodged: tuple[int, ...] = (),
    ) -> None:
        """Make a plan for passes like `trace`, and follow it from its start. See make_plan; lodged:
        units that are on an accelerator all the time, for the plan to name.
        """
        self._sizes = sizes
        self.cursor.follow(replace(self._planner(trace, sizes, window_nbytes, hides=hides), lodged=lodged))

    def is_stale(self, sizes: Sequence[int]) -> bool:
        """Whether the pass that ends was not as planned, or units take other memory than they did."""
        surprised = self.cursor.reordered > REPLAN_SHARE * max(1, len(self.cursor.trace))
        return surprised or self.has_other_sizes(sizes)

    def has_other_sizes(self, sizes: Sequence[int]) -> bool:
        """Whether units take other memory than the plan knows."""
        return self._sizes != sizes

    @property
    def has_other_length(self) -> bool:
        """Whether the pass that ends has many more uses than planned, or fewer."""
        uses, plan = len(self.cursor.trace), self.cursor.plan
        return plan is None or abs(uses - len(plan.steps)) > REPLAN_SHARE * max(1, uses)

"""The plan of a round: of one forward without gradients among many that are alike, as the tokens of a
generation or the batches of an evaluation are. Pure: no torch, no I/O.

[Note: rounds are a cycle]
Nothing changes between two rounds, so what waits at the end of one may be used by the next. Where a cycle does
not fit the window, a cache that gives up what was used longest ago gives up everything just before its use.
What reads least is a set that always stays: every round then reads all the rest, and only that (the bound of
Belady 1966; running there and back, as zig-zag schedules do, saves the same bytes). So some units stay, for as
long as rounds follow each other, and the rest streams by through what is left of the window.

What is left has room for two of the largest units that stream, so that one is read while another is used. Of
the others, those that a round uses most often stay first, then the largest, and of equals the same share of
every stretch of layers: between two that stay lies what hides a read.

The reads run on from one round into the next. The plan is the middle one of three rounds that are planned as
one; what waits when it begins is its opening, and is on its way already, but for the first round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from infinity.planning.placement import spread
from infinity.planning.plan import Plan, PlanStep, make_plan
from infinity.planning.trace import Trace

_STREAMED = 2
"""So many of the largest units that stream find room in the window."""


def make_cycle(
    trace: Trace, unit_nbytes: Sequence[int], window_nbytes: int, *, hides: Sequence[int] | None = None
) -> Plan:
    """Plan a round that others like it follow: see [Note: rounds are a cycle]. The arguments are make_plan's.

    The opening names all that waits when a round begins, in the order of its use.
    """
    stay = staying(trace, unit_nbytes, window_nbytes)
    sizes = [0 if unit in stay else nbytes for unit, nbytes in enumerate(unit_nbytes)]
    room = window_nbytes - sum(unit_nbytes[unit] for unit in stay)
    count = len(trace)
    several = make_plan(trace * 3, sizes, room, hides=hides)
    waiting = _waiting(several.opening, several.steps[:count])
    steps = several.steps[count : 2 * count]
    if _waiting(tuple(waiting), steps) != waiting:  # the rounds of this plan are not alike
        one = make_plan(trace, sizes, room, hides=hides)
        waiting, steps = set(one.opening), one.steps
    first: dict[int, int] = {}
    for position, use in enumerate(trace):
        first.setdefault(use.unit, position)
    opening = sorted(waiting | stay, key=first.__getitem__)
    return Plan(
        tuple(opening), tuple(replace(step, keep=step.keep or step.use.unit in stay) for step in steps)
    )


def _waiting(before: Sequence[int], steps: Sequence[PlanStep]) -> set[int]:
    """Return the units that wait after `steps`, where `before` wait before them."""
    waiting = set(before)
    for step in steps:
        waiting.discard(step.use.unit)
        waiting.update(step.fetch)
        if step.keep:
            waiting.add(step.use.unit)
    return waiting


def staying(trace: Trace, unit_nbytes: Sequence[int], window_nbytes: int) -> frozenset[int]:
    """Return the units that always stay in the window."""
    uses = Counter(use.unit for use in trace if unit_nbytes[use.unit])
    even = {unit: rank for rank, unit in enumerate(_evenly(sorted(uses)))}
    order = sorted(uses, key=lambda unit: (-uses[unit], -unit_nbytes[unit], even[unit]))
    largest = sorted(uses, key=lambda unit: -unit_nbytes[unit])
    stay: set[int] = set()
    held = place = 0
    for unit in order:
        while place < len(largest) and largest[place] in stay:
            place += 1
        others = (one for one in largest[place:] if one not in stay and one != unit)
        streams = next(others, None)
        room = _STREAMED * unit_nbytes[streams] if streams is not None else 0
        if held + unit_nbytes[unit] + room <= window_nbytes:
            stay.add(unit)
            held += unit_nbytes[unit]
    return frozenset(stay)


def _evenly(units: Sequence[int]) -> list[int]:
    """Return the units in an order of which every beginning is spread evenly."""
    return [units[index] for index in spread(len(units))]

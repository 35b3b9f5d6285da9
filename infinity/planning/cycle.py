"""The plan of a round: of one forward without gradients among many that are alike, as the tokens of a
generation or the batches of an evaluation are. Pure: no torch, no I/O.

[Note: rounds are a cycle]
Nothing changes between two rounds, so what waits at the end of one may be used by the next. Where a cycle
does not fit the window, a cache that gives up what was used longest ago gives up everything just before its
use. What reads least is a set that always stays: every round then reads all the rest, and only that (the
bound of Belady 1966; running there and back, as zig-zag schedules do, saves the same bytes). So some units
stay, for as long as rounds follow each other, and the rest streams by through what is left of the window.

What is left has room for the two largest units that stream, so that one is read while another is used. Of the
others, those that a round uses most often stay first, then the largest, and of equals the same share of every
stretch of layers: between two that stay lies what hides a read.

The reads run on from one round into the next. Three rounds are planned as one, each with units of its own;
the plan is the middle one, and what it has begun to read for the third is what waits when a round begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from infinity.planning.placement import spread
from infinity.planning.plan import Plan, PlanStep, make_plan
from infinity.planning.trace import Trace, Use

_STREAMED = 2
"""So many of the largest units that stream find room in the window together."""


def make_cycle(
    trace: Trace, unit_nbytes: Sequence[int], window_nbytes: int, *, hides: Sequence[int] | None = None
) -> Plan:
    """Plan a round that others like it follow: see [Note: rounds are a cycle]. The arguments are make_plan's.

    The opening names all that waits when a round begins, in the order of its use.
    """
    stay = staying(trace, unit_nbytes, window_nbytes)
    sizes = [0 if unit in stay else nbytes for unit, nbytes in enumerate(unit_nbytes)]
    room = window_nbytes - sum(unit_nbytes[unit] for unit in stay)
    plan = _endless(trace, sizes, room, hides) or make_plan(trace, sizes, room, hides=hides)
    first: dict[int, int] = {}
    for position, use in enumerate(trace):
        first.setdefault(use.unit, position)
    opening = sorted(stay.union(plan.opening), key=first.__getitem__)
    steps = (replace(step, keep=step.keep or step.use.unit in stay) for step in plan.steps)
    return Plan(tuple(opening), tuple(steps))


def _endless(trace: Trace, sizes: Sequence[int], room: int, hides: Sequence[int] | None) -> Plan | None:
    """Return a plan whose reads run on into the next round; None where these rounds would not be alike."""
    units, count = len(sizes), len(trace)
    thrice = [Use(use.phase, use.unit + one * units) for one in range(3) for use in trace]
    hidden = None if hides is None else [*hides] * 3
    plan = make_plan(tuple(thrice), [*sizes] * 3, room, hides=hidden)
    rounds = plan.steps[:count], plan.steps[count : 2 * count]
    following = [_read_for(at + 1, steps, units) for at, steps in enumerate(rounds)]
    early = [one for one in plan.opening if one >= units]
    if early or following[0] != following[1] or _read_for(2, rounds[0], units):
        return None
    last = {use.unit: position for position, use in enumerate(trace)}
    keeps = {last[unit] for position, unit in following[1] if position <= last[unit]}
    steps = []
    for position, step in enumerate(rounds[1]):
        fetch = [one % units for one in step.fetch if one < 2 * units or position > last[one % units]]
        use = trace[position]
        steps.append(PlanStep(use, tuple(fetch), step.keep or position in keeps))
    return Plan(tuple(unit for _, unit in following[1]), tuple(steps))


def _read_for(number: int, steps: Sequence[PlanStep], units: int) -> list[tuple[int, int]]:
    """Return (position, unit) of the reads in `steps` for the uses of round `number`, from 0."""
    reads = ((position, one) for position, step in enumerate(steps) for one in step.fetch)
    return [(position, one % units) for position, one in reads if one // units == number]


def staying(trace: Trace, unit_nbytes: Sequence[int], window_nbytes: int) -> frozenset[int]:
    """Return the units that always stay in the window."""
    uses = Counter(use.unit for use in trace if 0 < unit_nbytes[use.unit] <= window_nbytes)
    even = {unit: rank for rank, unit in enumerate(_evenly(sorted(uses)))}
    order = sorted(uses, key=lambda unit: (-uses[unit], -unit_nbytes[unit], even[unit]))
    largest = sorted(uses, key=lambda unit: -unit_nbytes[unit])
    stay: set[int] = set()
    held = place = 0
    for unit in order:
        while place < len(largest) and largest[place] in stay:
            place += 1
        others = (largest[at] for at in range(place, len(largest)))
        streams = islice((one for one in others if one not in stay and one != unit), _STREAMED)
        if held + unit_nbytes[unit] + sum(unit_nbytes[one] for one in streams) <= window_nbytes:
            stay.add(unit)
            held += unit_nbytes[unit]
    return frozenset(stay)


def _evenly(units: Sequence[int]) -> list[int]:
    """Return the units in an order of which every beginning is spread evenly."""
    return [units[index] for index in spread(len(units))]

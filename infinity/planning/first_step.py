"""What the first step of a run finds gone, from which it is decided what lives on an accelerator. Pure: no
torch, no I/O.

[Note: the first choice stays]
Of records that are equally dense any would do, and those that live on an accelerator after the first step
stay there: others in their place would save nothing. So a plan chooses from the same counts, to the unit, as
a run does: those of a first step, which follows a plan made before any use was seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infinity.planning.cursor import Cursor
from infinity.planning.plan import make_plan
from infinity.planning.trace import Phase, Trace, Use


def guessed_trace(units: Iterable[int]) -> Trace:
    """Return the uses of a step of which nothing was seen: units in the order of their modules, and back."""
    order = tuple(units)
    forward = (Use(Phase.FORWARD, unit) for unit in order)
    back = (Use(Phase.BACKWARD, unit) for unit in reversed(order))
    return (*forward, *back)


def fetches_of_first_step(trace: Trace, unit_nbytes: Sequence[int], window_nbytes: int) -> list[int]:
    """Return how many uses of the first step find each unit gone since its use before.

    unit_nbytes: of resident units; window_nbytes: of those that wait.
    """
    guess = guessed_trace(range(len(unit_nbytes)))
    cursor, staying = Cursor(), set[int]()
    cursor.follow(make_plan(guess, unit_nbytes, window_nbytes, hides=unit_nbytes))
    counts = [0] * len(unit_nbytes)
    for use in trace:
        counts[use.unit] += use.unit not in staying
        _, keep, _ = cursor.advance(use)
        (staying.add if keep else staying.discard)(use.unit)
    return counts

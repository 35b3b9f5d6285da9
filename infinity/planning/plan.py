"""The schedule of a step, decided before it runs. Pure: no torch, no I/O; a plan is text.

[Note: the window]
A unit that waits, resident, for its use takes room in the window; a unit in use takes none, and one of size 0
is resident for good. Between two uses of a unit it either waits (it is *kept*) or is read again. So a plan is
two decisions, taken one after the other:

1. What is kept. Belady: when room is short, give up what is used furthest in the future. Said from the other
   end: walk the trace; at each use, keep its unit since the use before if that fits beside all that is kept
   already. Whatever was considered earlier is used earlier, so it goes first. For units of one size no choice
   reads less (it is the earliest-end rule for intervals on k machines: Carlisle and Lloyd 1995). For
   different sizes the best choice is NP-hard (Folwarczny and Sgall 2015), and this one can read more than it:
   tests/planning/test_plan.py says how much. What holds for any sizes: a unit is kept if all that is used
   until its next use fits the window, so a plan never reads more than looking ahead in the order of the trace
   would.
   This is also why the last units of a forward, the first of its backward, are not read twice.

2. When reads begin (the conservative rule: Cao, Felten, Karlin and Li 1995). What is kept is settled, so no
   read can push it out: each begins as early as the room left over from there to its use allows, those
   needed sooner first. One that fits only later does not hold up smaller ones behind it. A unit for which
   there is no room even just before its use is not in the plan: it is read when its use asks for it. One that
   turns out to fit all the time since its use before is kept after all.

Keeping all that saves a read may leave no room to read ahead. So room is held back before each use whose
unit has to be read, over the uses that take as long as the read: `hides` says how many bytes arrive while a
unit is used. A read behind a small unit's use may thus begin with the use before that, or earlier. Nothing is
fetched across the end of a step, where records change.

So both look ahead by bytes and by time, not by a number of units. But no clock is read. Each read begins as
soon as there is room for it, so that, whatever reads and uses take, none that begins later makes the step
shorter (for units of one size: tests/planning/test_plan.py). And ranks, whose collectives follow their
plans, need the same one, which their clocks would not give them: what they say that a use hides are the bytes
of its unit, with which its computing grows as its reading does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infinity.planning.trace import Trace, Use


@dataclass(frozen=True, slots=True)
class PlanStep:
    """What happens at one use: the units whose fetch begins with it, and whether its own unit stays
    afterwards.
    """

    use: Use
    fetch: tuple[int, ...] = ()
    keep: bool = False

    def __str__(self) -> str:
        """As text: "F3 fetch 4 5 keep"."""
        parts = [str(self.use)]
        if self.fetch:
            parts.append("fetch " + " ".join(map(str, self.fetch)))
        if self.keep:
            parts.append("keep")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """The uses of one step in order, and the fetches that begin before the first of them."""

    opening: tuple[int, ...]
    steps: tuple[PlanStep, ...]
    lodged: tuple[int, ...] = ()
    """Units that are on an accelerator before the first use, and stay there."""

    @property
    def reads(self) -> bool:
        """Whether anything is fetched after the opening."""
        return any(step.fetch for step in self.steps)

    def __str__(self) -> str:
        """One line a use."""
        opening = "open" + (" fetch " + " ".join(map(str, self.opening)) if self.opening else "")
        opening += " device " + " ".join(map(str, self.lodged)) if self.lodged else ""
        return "\n".join([opening, *map(str, self.steps)])


def make_plan(
    trace: Trace, unit_nbytes: Sequence[int], window_nbytes: int, *, hides: Sequence[int] | None = None
) -> Plan:
    """Decide what is kept and what is fetched when: see [Note: the window].

    unit_nbytes: bytes a resident unit takes, by unit index; one of 0 is neither fetched nor kept.
    window_nbytes: bytes that may wait. hides: bytes that can be read while a unit is used, by unit index. A
    unit is not kept where another, which has to be read, would find no room during the uses that hide its
    read, or at least the last of them: no unit that fits the window ever has to be asked for. None: nothing
    is held back, and the fewest bytes are read.

    Each use costs a few operations of numpy over the uses since its unit's use before.
    """
    before = _uses_before(trace)
    kept = _choose_kept(trace, before, unit_nbytes, window_nbytes, hides)
    waiting = np.zeros(len(trace) + 1, np.int64)
    stays = [False] * len(trace)
    for position, use in enumerate(trace):
        if kept[position]:
            stays[before[position]] = True
            waiting[before[position] + 1 : position + 1] += unit_nbytes[use.unit]
    begins: list[list[int]] = [[] for _ in range(len(trace) + 1)]
    for position, use in enumerate(trace):
        nbytes = unit_nbytes[use.unit]
        if kept[position] or not nbytes:
            continue
        since = before[position] + 1
        start = _fits_from(waiting, since, position, window_nbytes - nbytes)
        if start > position:
            continue
        waiting[start : position + 1] += nbytes
        if start == since > 0:  # with its unit's use before: that has it still
            stays[before[position]] = True
        else:
            begins[start].append(use.unit)
    steps = (
        PlanStep(use, tuple(fetch), keep) for use, fetch, keep in zip(trace, begins[1:], stays, strict=True)
    )
    return Plan(tuple(begins[0]), tuple(steps))


# Below, moment p lies between use p - 1 and use p; moment 0 is the opening. A unit kept from use i to use j
# waits at the moments i + 1 to j, and so does one whose read, for use j, begins with use i.


def _uses_before(trace: Trace) -> list[int]:
    """Return, for each use, the position of its unit's use before; -1 where it is the first."""
    last: dict[int, int] = {}
    before = []
    for position, use in enumerate(trace):
        before.append(last.get(use.unit, -1))
        last[use.unit] = position
    return before


def _choose_kept(
    trace: Trace,
    before: Sequence[int],
    unit_nbytes: Sequence[int],
    window_nbytes: int,
    hides: Sequence[int] | None,
) -> list[bool]:
    """Return, for each use, whether its unit is kept since the use before: 1. of [Note: the window]."""
    claimed = np.zeros(len(trace) + 1, np.int64)
    kept = []
    for position, use in enumerate(trace):
        nbytes = unit_nbytes[use.unit]
        since = before[position] + 1
        start = _fits_from(claimed, since, position, window_nbytes - nbytes)
        kept.append(since > 0 and nbytes > 0 and start == since)
        if not kept[-1]:
            latest = position + 1 if hides is None else _hidden_from(trace, position, nbytes, hides)
            start = max(start, latest)
        claimed[start : position + 1] += nbytes
    return kept


def _hidden_from(trace: Trace, position: int, nbytes: int, hides: Sequence[int]) -> int:
    """Return the last moment from which the uses before use `position`, one at least, hide a read."""
    moment = position
    while moment > 0 and (nbytes := nbytes - hides[trace[moment - 1].unit]) > 0:
        moment -= 1
    return moment


def _fits_from(waiting: NDArray[np.int64], first: int, position: int, room_nbytes: int) -> int:
    """Return the first moment, from `first` on, from which to use `position` no more than `room_nbytes` wait;
    position + 1 if there is none.
    """
    full = np.flatnonzero(waiting[first : position + 1] > room_nbytes)
    return first + (int(full[-1]) + 1 if full.size else 0)

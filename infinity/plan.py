"""The schedule of a step, decided before it runs. Pure: no torch, no I/O; a plan is text.

[Note: the window]
A unit that waits, resident, for its use takes room in the window. Fetching follows the trace: at each use,
units that come next are fetched as long as all that waits fits the window, so a unit never waits while one
needed sooner is absent. A unit just used stays when its next use is within reach of that same look-ahead:
this is what keeps the last units of a forward for the first of its backward. Nothing is fetched across the
end of a step, where records change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.trace import Phase, Trace, Use


@dataclass(frozen=True, slots=True)
class Step:
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
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        """One line a use; `Plan.parse` reads it back."""
        opening = "open" + (" fetch " + " ".join(map(str, self.opening)) if self.opening else "")
        return "\n".join([opening, *map(str, self.steps)])

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read what `str(plan)` wrote.

        Raises: ValueError with the line that is no step.
        """
        lines = text.strip().splitlines()
        if not lines or lines[0].split()[0] != "open":
            raise ValueError("a plan begins with a line 'open'")
        return cls(_fetches(lines[0]), tuple(_parse_step(line) for line in lines[1:]))


def _fetches(line: str) -> tuple[int, ...]:
    words = line.split()
    if "fetch" not in words:
        return ()
    return tuple(int(word) for word in words[words.index("fetch") + 1 :] if word != "keep")


def _parse_step(line: str) -> Step:
    name = line.split(maxsplit=1)[0]
    try:
        use = Use(Phase(name[0]), int(name[1:]))
        return Step(use, _fetches(line), line.rsplit(maxsplit=1)[-1] == "keep")
    except ValueError as error:
        raise ValueError(f"no step of a plan: {line!r}") from error


def make_plan(trace: Trace, unit_nbytes: Sequence[int], window_nbytes: int) -> Plan:
    """Decide fetches for `trace`: see [Note: the window].

    unit_nbytes: bytes a resident unit takes, by unit index. window_nbytes: bytes that may wait.
    """
    ahead: Counter[int] = (
        Counter()
    )  # uses of each unit that the look-ahead has taken in and that are still to come
    waiting_nbytes = 0
    reach = 0  # the first position of the trace that the look-ahead has not taken in

    def look_ahead(in_use: int | None) -> tuple[int, ...]:
        nonlocal waiting_nbytes, reach
        fetch = []
        while reach < len(trace):
            unit = trace[reach].unit
            if not ahead[unit]:
                if waiting_nbytes + unit_nbytes[unit] > window_nbytes:
                    break
                waiting_nbytes += unit_nbytes[unit]
                if unit != in_use:
                    fetch.append(unit)
            ahead[unit] += 1
            reach += 1
        return tuple(fetch)

    opening = look_ahead(None)
    steps = []
    for position, use in enumerate(trace):
        if reach > position:
            ahead[use.unit] -= 1
            if not ahead[use.unit]:
                waiting_nbytes -= unit_nbytes[use.unit]
        else:
            reach = position + 1
        fetch = look_ahead(use.unit)
        steps.append(Step(use, fetch, ahead[use.unit] > 0))
    return Plan(opening, tuple(steps))

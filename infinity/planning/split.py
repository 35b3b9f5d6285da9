"""Which units' updates are made in the backward, and which in the next forward. Pure: no torch, no I/O.

[Note: both halves equally busy]
An update moves ten times what a fetch does. With all updates in the forward, which has a quarter to a third
of the computing, the disk is idle for much of the backward; with all of them in the backward, for much of the
forward. A half of a step takes as long as the longer of what it computes and what it moves. So of all numbers
of updates that the backward could make, those count with which both halves together take least, to
`EQUAL`, and of these the one with which what moves stands in the same proportion to what computes in both:
then neither has less to spare than the other.

Which units these are matters little, as long as each half has updates all along: they are the first of an
order of which every beginning is spread evenly (`spread`).

Of updates that are made ahead of their decision (`ahead`) the same is decided, but they cost more: of a
`hi` that is placed in host memory, which keeps the old values until then, half as many bytes are written to
NVMe, and read from there in the forward. An update that is not made ahead moves less by that, so those come
last in the order whose `hi` is placed.

An update that waits for the forward has its gradient wait as well. How many bytes of gradients find room in
host memory until then, the last steps have shown; the others are written in the backward, and read in the
forward. That is twice what an update made ahead takes for `hi` that is placed. So where steps wait for the
disk all the time, the forward is left with as many updates as keep it busy while it computes, and no more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from infinity.planning.forecast import Moves
from infinity.planning.placement import spread
from infinity.planning.plan import Plan
from infinity.planning.simulator import Rates
from infinity.planning.trace import Phase

EQUAL = 1.01
"""Steps that take at most so many times the least are taken to be as fast."""


@dataclass(frozen=True, slots=True)
class HalfStep:
    """The seconds for which a half of a step keeps the cores, and the disk, busy."""

    compute_s: float
    """Updates included, where they take the cores that compute."""
    disk_s: float

    @property
    def seconds(self) -> float:
        """What it takes if all of it overlaps."""
        return max(self.compute_s, self.disk_s)

    @property
    def load(self) -> float:
        """What it moves, in proportion to what it computes."""
        return self.disk_s / max(self.compute_s, 1e-9)

    def with_more(self, compute_s: float, disk_s: float) -> HalfStep:
        """Return what it is with more to do, or less."""
        return HalfStep(self.compute_s + compute_s, self.disk_s + disk_s)


@dataclass(frozen=True, slots=True)
class UpdateSplit:
    """Which updates are made in the backward, and what the halves of a step then have to do."""

    early: tuple[int, ...]
    """Units whose updates the backward makes, in the order in which they were chosen."""
    candidates: int
    """Units whose updates either half could make."""
    forward: HalfStep
    backward: HalfStep

    @property
    def seconds(self) -> float:
        """Of both halves, if all overlaps."""
        return self.forward.seconds + self.backward.seconds

    def __str__(self) -> str:
        """As people read it."""
        shares = [
            f"{half.disk_s / half.seconds:.0%}" if half.seconds else "none"
            for half in (self.forward, self.backward)
        ]
        return (
            f"{len(self.early)} of {self.candidates} units in the backward; the disk is busy for {shares[0]} "
            f"of the forward, {shares[1]} of the backward"
        )


def split_updates(
    computes: tuple[float, float],
    plan: Plan,
    units: Sequence[Moves],
    candidates: Collection[int],
    rates: Rates,
    *,
    ahead: bool = False,
    room_nbytes: float = math.inf,
) -> UpdateSplit:
    """Divide updates between the halves of a step: see [Note: both halves equally busy].

    computes: seconds that forward and backward compute, without updates. candidates: units, by index, whose
    updates either half can make; the forward makes those of the others. ahead: whether those of the backward
    are made before they are decided. room_nbytes: of gradients that find room until the forward.
    """
    several = sorted(_updated(plan, units).intersection(candidates))
    groups = [several]
    if ahead:
        groups = [
            [one for one in several if bool(units[one].hi_nbytes) is on_nvme] for on_nvme in (True, False)
        ]
    order = [group[at] for group in groups for at in spread(len(group))]
    forward, backward = _all_in_forward(computes, plan, units, rates)
    waiting_nbytes = sum(units[one].computing_nbytes for one in _updated(plan, units))
    found = []
    for count in range(len(order) + 1):
        if count:
            unit = units[order[count - 1]]
            work_s, disk_s = _costs(unit, rates)
            again_s = 0.5 * (unit.computing_nbytes - unit.hi_nbytes) / rates.disk.mixed if ahead else 0.0
            forward = forward.with_more(-work_s, again_s - disk_s)
            backward = backward.with_more(work_s, again_s + disk_s)
            waiting_nbytes -= unit.computing_nbytes
        spilled_s = max(0.0, waiting_nbytes - room_nbytes) / rates.disk.mixed
        halves = (one.with_more(0.0, spilled_s) for one in (forward, backward))
        found.append(UpdateSplit(tuple(order[:count]), len(order), *halves))
    least_s = min(one.seconds for one in found)
    fast = [one for one in found if one.seconds <= EQUAL * least_s]
    return min(fast, key=lambda one: abs(one.forward.load - one.backward.load))


def of_first(split: UpdateSplit, count: int) -> UpdateSplit:
    """Return a split of the first `count` of its units alone: as many as all ranks have chosen."""
    return split if count >= len(split.early) else replace(split, early=split.early[:count])


def _all_in_forward(
    computes: tuple[float, float], plan: Plan, units: Sequence[Moves], rates: Rates
) -> tuple[HalfStep, HalfStep]:
    """Return the halves of a step whose updates come with the next forward's fetches; without gradients that
    find no room.
    """
    moved = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0}
    kept: set[int] = set()
    for step in plan.steps:
        unit = step.use.unit
        moved[step.use.phase] += 0 if unit in kept else units[unit].hi_nbytes
        (kept.add if step.keep else kept.discard)(unit)
    forward = HalfStep(computes[0], moved[Phase.FORWARD] / rates.disk.mixed)
    backward = HalfStep(computes[1], moved[Phase.BACKWARD] / rates.disk.mixed)
    for unit in sorted(_updated(plan, units)):
        forward = forward.with_more(*_costs(units[unit], rates))
    return forward, backward


def _updated(plan: Plan, units: Sequence[Moves]) -> set[int]:
    """Return the units that a step uses, and updates."""
    return {step.use.unit for step in plan.steps if units[step.use.unit].trainable}


def _costs(unit: Moves, rates: Rates) -> tuple[float, float]:
    """Return what a unit's update takes beside fetches, of the cores and of the disk."""
    work_s = unit.numel / rates.update if rates.shared else 0.0
    return work_s, (2 * unit.state_nbytes + unit.hi_nbytes) / rates.disk.mixed

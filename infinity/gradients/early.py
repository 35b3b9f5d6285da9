"""Which updates the backward makes of an optimizer with update="auto", as steps are measured.

[Note: updates by turns]
At first all updates come with the next forward's fetches. When some steps have been timed, it is decided by
planning/split.py which units have theirs in the backward from the next step on, as update="backward" has all
of them; ranks agree on how many. That is decided again after twice as many steps, and so on. An update is
the same whenever it is made, so bits do not depend on clocks.

An update in the backward takes the gradient with it. So where steps need gradients when all have come (they
are read or clipped, dropped, added up over several backwards, or the options of param groups change before
step()),
no update is made in the backward any more. Steps show that before the first is; one that shows it for the
first time later stops with an error, as its gradients are gone.

The same is decided for an optimizer with speculate="auto": which units have their updates made ahead, where
any have. Those keep their gradients, and nothing has to be known of what follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from infinity.lane.outgoing import OutgoingShare
from infinity.planning.forecast import Moves
from infinity.planning.simulator import Disk, Rates
from infinity.planning.split import UpdateSplit, of_first, split_updates
from infinity.ranks.group import Ranks
from infinity.records.record import Traffic
from infinity.records.weights import WEIGHTS
from infinity.units.moves import moves_of
from infinity.units.residency import UnitResidency
from infinity.units.unit import Unit

_FIRST = 2
"""The step after which it is decided first: its fetches are as planned."""
UNMOVED = Moves(0, 0, 0, trainable=False)
"""What stands for a slice: plans have none."""
_ALL = 3
"""Moments of a step: its forward begins, its backward begins, and ends."""


class _Mark(NamedTuple):
    """What had happened at one moment."""

    seconds: float
    stalled_s: float
    moved_nbytes: int

    def until(self, later: _Mark) -> _Mark:
        """Return what happened between this moment and a later one."""
        return _Mark(
            later.seconds - self.seconds,
            later.stalled_s - self.stalled_s,
            later.moved_nbytes - self.moved_nbytes,
        )


class EarlyUpdates:
    """Decides, for one engine: see [Note: updates by turns]. Called from the thread that computes."""

    def __init__(
        self,
        units: Sequence[Unit],
        residency: UnitResidency,
        traffic: Traffic,
        outgoing_share: OutgoingShare,
        ranks: Ranks,
        *,
        on_host: bool,
        foreseen: Callable[[Unit], bool] | None = None,
    ) -> None:
        """Make none in the backward so far. units: a list that the engine fills. foreseen: for updates that
        are made ahead, says of which units they can be; None for those that a backward decides.
        """
        self.split: UpdateSplit | None = None
        """What was decided last; None before, and where all come with the next forward."""
        self._never = "" if on_host else "an accelerator computes, whose work is not timed"
        self._wanted, self._foreseen = False, foreseen
        self._units, self._residency, self._traffic = units, residency, traffic
        self._outgoing_share, self._ranks = outgoing_share, ranks
        self._chosen: frozenset[Unit] = frozenset()
        self._marks: list[_Mark] = []
        """Of the step: see _ALL."""
        self._steps = 0
        self._came: dict[int, nn.Parameter] = {}
        """The parameters, by id(), to which gradients have come in the step, while none is made early."""

    def want(self) -> None:
        """Look at steps from now on: an optimizer asks for it. What was decided for another is void."""
        self._wanted, self._steps = True, 0
        self.split, self._chosen = None, frozenset()

    def has(self, unit: Unit) -> bool:
        """Whether the backward makes a unit's update."""
        return unit in self._chosen

    def leaves(self, unit: Unit) -> bool:
        """Whether it was decided that the next forward makes a unit's update."""
        return self.split is not None and unit not in self._chosen

    @property
    def told(self) -> str:
        """What was decided, in words; empty where no optimizer asks for it."""
        if not self._wanted:
            return ""
        if self.split is not None:
            return str(self.split)
        if self._foreseen is not None:
            return ""
        return f"all in the next forward: {self._never or 'no step was timed yet'}"

    # What a step shows

    def forward_began(self, _module: nn.Module) -> None:
        """A forward begins; the first one of a step counts."""
        if self._wanted and not self._marks:
            self._marks.append(self._now())

    def gradient_came(self, parameter: nn.Parameter) -> None:
        """A gradient of `parameter` has come; the first one of a step tells that its backward has begun."""
        if len(self._marks) == 1:
            self._marks.append(self._now())
        if self._wanted and self._foreseen is None and not self._never and not self._chosen:
            self._came[id(parameter)] = parameter

    @property
    def came(self) -> Mapping[int, nn.Parameter]:
        """The parameters, by id(), to which gradients have come in a step whose backward made no update."""
        return self._came

    def backward_ended(self) -> bool:
        """A backward is over, or one that was over is looked at again. Return whether it is the first of its
        step in which gradients came.
        """
        if len(self._marks) != _ALL - 1:
            return False
        self._marks.append(self._now())
        return True

    def _now(self) -> _Mark:
        counts = self._residency.counts
        stalled_s = sum(counts.stalls_s.values()) + self._outgoing_share.stall_s
        moved = sum(
            nbytes
            for moved in (self._traffic.read, self._traffic.written)
            for (tier, _), nbytes in moved.items()
            if tier == "nvme"
        )
        return _Mark(time.perf_counter(), stalled_s, moved)

    # What follows

    def stop(self, why: str) -> None:
        """Make no update in the backward any more."""
        self._never = self._never or why
        self.split, self._chosen = None, frozenset()
        self._came.clear()

    def close_step(self) -> None:
        """A step is decided: decide, after some, for the next one."""
        marks, self._marks = self._marks, []
        self._came.clear()
        if not marks:
            return  # the step of a further optimizer
        self._steps += 1
        if self._steps < _FIRST or self._steps & (self._steps - 1):
            return
        split = self._decide(marks) if len(marks) == _ALL and not self._never else None
        count = len(split.early) if split is not None else 0
        count = self._ranks.least(count, "divide updates between backward and forward")
        self.split = of_first(split, count) if split is not None else None
        chosen = self.split.early if self.split is not None else ()
        self._chosen = frozenset(self._units[index] for index in chosen)

    def _decide(self, marks: list[_Mark]) -> UpdateSplit | None:
        """Divide updates by what a step took; None without a plan of it."""
        plan = self._residency.cursor.plan
        if plan is None:
            return None
        forward, backward = marks[0].until(marks[1]), marks[1].until(marks[2])
        computes = [max(0.0, one.seconds - one.stalled_s) for one in (forward, backward)]
        # A half that waits for the disk moves what that can. One that never waits moves less than it could,
        # which makes the disk look slower than it is, and changes nothing: it has nothing to gain.
        rate = max([1.0, *(one.moved_nbytes / max(one.seconds, 1e-9) for one in (forward, backward))])
        return split_updates(
            (computes[0], computes[1]),
            plan,
            [self._moves_of(unit) for unit in self._units],
            [unit.index for unit in self._units if self._may(unit)],
            Rates(Disk(rate, rate, rate), shared=False),
            ahead=self._foreseen is not None,
        )

    def _moves_of(self, unit: Unit) -> Moves:
        """Return what a unit moves, as if `hi` that comes back to its place in host memory were there."""
        if unit in self._residency.routed:
            return UNMOVED
        moves = moves_of(unit)
        return replace(moves, hi_nbytes=0) if "hi" in unit.record.targets else moves

    def _may(self, unit: Unit) -> bool:
        """Whether the backward could make a unit's update: not that of a slice, which may not be used in each
        step, nor one that an overflow may forbid.
        """
        record = unit.record
        if self._foreseen is not None:
            return unit.trainable and unit not in self._residency.routed and self._foreseen(unit)
        return (
            unit.trainable
            and unit not in self._residency.routed
            and record.holders.are_all
            and not record.on_device
            and not WEIGHTS[record.schema.dtype].overflows
        )

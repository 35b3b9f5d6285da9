"""Which updates the backward makes of an optimizer with update="auto", as steps are measured.

[Note: updates by turns]
At first all updates come with the next forward's fetches. When a step has been timed, it is decided by
planning/split.py which units have theirs in the backward from the next step on, as update="backward" has all
of them. That is decided anew for other lengths of sequences, where steps have come to compute for longer or
shorter, and from time to time: see [Note: steps of several lengths] in planning/step_lengths.py. An update is
the same whenever it is made, so bits do not depend on clocks.

Several ranks need the same updates in their backwards. So when a step begins they tell each other its length,
and what the last one took: the longest of each counts on all, and when it is decided, the least number of
units that any has chosen.

An update in the backward takes the gradient with it. So where steps need gradients when all have come (they
are read or clipped, dropped, added up over several backwards, or the options of param groups change before
step()), no update is made in the backward any more, on any rank. Steps show that before the first is; one
that shows it for the first time later stops with an error, as its gradients are gone.

The same is decided for an optimizer with speculate="auto": which units have their updates made ahead, where
any have. Those keep their gradients, and nothing has to be known of what follows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from infinity.lane.counts import LaneTimes
from infinity.lane.outgoing import OutgoingShare
from infinity.planning.forecast import Moves
from infinity.planning.simulator import Disk, Rates
from infinity.planning.split import UpdateSplit, of_first, split_updates
from infinity.planning.step_lengths import UNLIMITED, DecisionsByLength, TimedStep
from infinity.ranks.group import Ranks
from infinity.records.record import Traffic
from infinity.records.weights import WEIGHTS
from infinity.units.moves import moves_of
from infinity.units.residency import UnitResidency
from infinity.units.unit import Unit

_FIRST = 2
"""The first step that counts: its fetches are as planned."""
UNMOVED = Moves(0, 0, 0, trainable=False)
"""What stands for a slice: plans have none."""
_SPILLED = {("nvme", "grad16"), ("nvme", "grad32")}
"""What `Traffic` calls gradients that found no room."""
_ALL = 3
"""Moments of a step: its forward begins, its backward begins, and ends."""
_WHAT = "divide updates between backward and forward"


class _Mark(NamedTuple):
    """What had happened at one moment."""

    seconds: float
    stalled_s: float
    worked_s: float
    moved_nbytes: int

    def until(self, later: _Mark) -> _Mark:
        """Return what happened between this moment and a later one."""
        return _Mark(
            later.seconds - self.seconds,
            later.stalled_s - self.stalled_s,
            later.worked_s - self.worked_s,
            later.moved_nbytes - self.moved_nbytes,
        )


def _timed(marks: Sequence[_Mark], room_nbytes: int, *, shares_cores: bool) -> TimedStep:
    """Return what a step took, by its moments. room_nbytes: see TimedStep. shares_cores: whether the lane's
    thread takes a core from those that compute: then these take so much longer as it works beside them.

    A half that waits for the disk moves what that can. Where neither does, both move less than they could,
    which makes the disk look slower than it is: then somewhat more updates wait for the forward than have to.
    """
    halves = [one.until(later) for one, later in pairwise(marks)]
    works = [one.worked_s if shares_cores else 0.0 for one in halves]
    forward_s, backward_s = (
        max(0.0, one.seconds - one.stalled_s) * (1 - min(1.0, work_s / max(one.seconds, 1e-9)))
        for one, work_s in zip(halves, works, strict=True)
    )
    rate = max([1.0, *(one.moved_nbytes / max(one.seconds, 1e-9) for one in halves)])
    return TimedStep(forward_s, backward_s, rate, room_nbytes, sum(works))


def length_of(inputs: Any) -> int:
    """Return the length of a step, see planning/step_lengths.py, by what its forward is given; 0 where that
    has no tensors that are known.
    """
    with torch._C.DisableTorchFunctionSubclass():  # how many there are is no value
        counts = [int(one.numel()) for one in pytree.tree_leaves(inputs) if isinstance(one, torch.Tensor)]
    return sum(counts).bit_length()


class EarlyUpdates:
    """Decides, for one engine: see [Note: updates by turns]. Called from the thread that computes."""

    def __init__(
        self,
        units: Sequence[Unit],
        residency: UnitResidency,
        traffic: Traffic,
        outgoing_share: OutgoingShare,
        lane_times: LaneTimes,
        ranks: Ranks,
        *,
        on_host: bool,
        foreseen: Callable[[Unit], bool] | None = None,
    ) -> None:
        """Make none in the backward so far. units: a list that the engine fills. foreseen: for updates that
        are made ahead, says of which units they can be; None for those that a backward decides.
        """
        self.split: UpdateSplit | None = None
        """What was decided for the last step that began; None where all come with the next forward."""
        self._never = "" if on_host else "an accelerator computes, whose work is not timed"
        self._on_host, self._wanted, self._foreseen = on_host, False, foreseen
        self._units, self._residency, self._traffic = units, residency, traffic
        self._outgoing_share, self._lane_times, self._ranks = outgoing_share, lane_times, ranks
        self._chosen: frozenset[Unit] = frozenset()
        self._marks: list[_Mark] = []
        """Of the step: see _ALL."""
        self._steps = self._length = self._spilled_nbytes = 0
        self._timed: TimedStep | None = None
        """The last step, until the next one begins."""
        self._decisions: DecisionsByLength[UpdateSplit] = DecisionsByLength()
        self._over = not on_host
        """Whether all ranks know that no update is made in the backward any more."""
        self._came: dict[int, nn.Parameter] = {}
        """The parameters, by id(), to which gradients have come in the step, while none is made early."""

    def want(self) -> None:
        """Look at steps from now on: an optimizer asks for it. What was decided for another is void."""
        self._wanted, self._steps, self._over = True, 0, not self._on_host
        self._timed, self._decisions = None, DecisionsByLength()
        self.split, self._chosen = None, frozenset()

    def has(self, unit: Unit) -> bool:
        """Whether the backward makes a unit's update."""
        return unit in self._chosen

    @property
    def why_not(self) -> str:
        """Why the next forward makes the update of a unit that the backward does not make."""
        if self.split is not None:
            return "the next forward has time for them"
        return self._never or "no step was timed yet"

    @property
    def told(self) -> str:
        """What was decided, in words; empty where no optimizer asks for it."""
        if not self._wanted:
            return ""
        if self.split is not None:
            return str(self.split)
        if self._foreseen is not None and not self._never:
            return ""
        return f"all in the next forward: {self.why_not}"

    # What a step shows

    def forward_began(self, inputs: Any) -> None:
        """A forward begins, of a module that is given `inputs`; the first one of a step counts."""
        if self._wanted and not self._marks:
            if not self._over:
                self._choose(length_of(inputs))
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
        return _Mark(perf_counter(), stalled_s, self._lane_times.work_s, moved)

    # What follows

    def stop(self, why: str) -> None:
        """Make no update in the backward any more."""
        self._never = self._never or why
        self.split, self._chosen = None, frozenset()
        self._came.clear()

    def close_step(self) -> None:
        """A step is decided: remember what it took, for the next one."""
        marks, self._marks = self._marks, []
        self._came.clear()
        if not marks:
            return  # the step of a further optimizer
        self._steps += 1
        room_nbytes = self._room() if self._wanted else UNLIMITED
        self._timed = None
        if len(marks) == _ALL and self._steps >= _FIRST:
            shares_cores = torch.get_num_threads() * self._ranks.local_size >= len(os.sched_getaffinity(0))
            self._timed = _timed(marks, room_nbytes, shares_cores=shares_cores)

    def _room(self) -> int:
        """Return the bytes of gradients that have found room in host memory, of those that wait for the next
        forward; UNLIMITED where all have. What the lane has not written yet counts in the next step, which
        changes nothing where steps are alike.
        """
        fields = self._traffic.written.items()
        before, self._spilled_nbytes = self._spilled_nbytes, sum(n for key, n in fields if key in _SPILLED)
        spilled_nbytes = self._spilled_nbytes - before
        if not spilled_nbytes:
            return UNLIMITED
        waiting = (unit for unit in self._units if unit.trainable and unit not in self._chosen)
        return max(0, sum(self._moves_of(unit).computing_nbytes for unit in waiting) - spilled_nbytes)

    def _choose(self, length: int) -> None:
        """Know which updates the backward of a step makes, which begins, of this length; that is decided if
        it is due. All ranks do the same.
        """
        timed, self._timed = self._timed, None
        if self._ranks.size > 1:
            length, timed = self._agree(length, timed)
        if self._never:
            self._over = True
            return
        if timed is not None:
            self._decisions.add(self._length, timed)
        self._length = length
        if (due := self._decisions.due(length)) is not None:
            self._decisions.decide(length, self._decide(due), due)
        before, self.split = self.split, self._decisions.of(length)
        if self.split is not before:
            chosen = self.split.early if self.split is not None else ()
            self._chosen = frozenset(self._units[index] for index in chosen)

    def _agree(self, length: int, timed: TimedStep | None) -> tuple[int, TimedStep | None]:
        """Return the length of the step that begins, and what the last one took, for all ranks; stop where
        one has stopped.
        """
        took = [0] * 5
        if timed is not None:
            seconds = timed.forward_s, timed.backward_s, timed.worked_s
            took = [*(round(1e6 * one) for one in seconds), int(timed.rate), timed.room_nbytes]
        rows = self._ranks.of_all([int(not self._never), length, *took], _WHAT)
        going, lengths, forwards, backwards, works, rates, rooms = zip(*rows, strict=True)
        if not all(going):
            self.stop("steps of another rank need their gradients")
        slowest = (max(forwards) / 1e6, max(backwards) / 1e6)
        of_all = TimedStep(*slowest, min(rates), min(rooms), max(works) / 1e6)
        return max(lengths), of_all if all(rates) else None

    def _decide(self, timed: TimedStep) -> UpdateSplit | None:
        """Divide updates for steps that take so long: as many as the rank has that divides off least."""
        split = self._divide(timed)
        count = self._ranks.least(0 if split is None else len(split.early), _WHAT)
        return None if split is None else of_first(split, count)

    def _divide(self, timed: TimedStep) -> UpdateSplit | None:
        """Divide updates; None without a plan of the step."""
        plan = self._residency.cursor.plan
        if plan is None:
            return None
        moves = [self._moves_of(unit) for unit in self._units]
        updated, disk = sum(one.numel for one in moves if one.trainable) or 1, Disk(*[timed.rate] * 3)
        return split_updates(
            (timed.forward_s, timed.backward_s),
            plan,
            moves,
            [unit.index for unit in self._units if self._may(unit)],
            Rates(disk, update=updated / max(timed.worked_s, 1e-9), shared=timed.worked_s > 0),
            ahead=self._foreseen is not None,
            room_nbytes=timed.room_nbytes,
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

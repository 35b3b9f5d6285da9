"""What noting the steps that slices of stacks miss takes of the computing thread.

    python -m infinity.bench.engine.missed --nvme DIR

Steps of an optimizer over stacks of 1,000 slices each, of which each step uses some, by chance: looking for
gradients, and noting the step for all others. Slices are parameters; their units are stand-ins without
records, so that what a pass over a record costs is no part of it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from torch import nn

from infinity.autograd.slice_watch import SliceWatch
from infinity.bench.arguments import positive
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.optim.missed import MissedStep, MissedSteps, Slice
from infinity.optim.with_gradients import WithGradients
from infinity.planning.layout import FP32
from infinity.records.update_rules import ADAMW
from infinity.records.updates import MissedUpdates, PendingUpdates

_OF_STACK = 1000
_OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "params": []}
_RECORD = SimpleNamespace(is_elsewhere=False, schema=FP32)


class _Slice:
    """Stands for a unit with one parameter."""

    record = _RECORD

    def __init__(self, index: int) -> None:
        self.index, self.parameter = index, nn.Parameter(torch.zeros(1))
        self.parameters = [self.parameter]
        self._pending = PendingUpdates()

    def may_miss(self, index: int, missed: MissedUpdates, number: int) -> PendingUpdates:
        self._pending.may_miss(index, missed, number)
        return self._pending

    @property
    def pending(self) -> PendingUpdates:
        if self._pending.owes:
            self._pending.tell()
        return self._pending


def measured(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of this thread that a step with so many slices takes."""
    units: list[Any] = [_Slice(index) for index in range(count)]
    slices = [Slice(one.parameter, one, 0, 0, number, True, (0, number)) for number, one in enumerate(units)]
    stacks: Sequence[list[Slice]] = [slices[at : at + _OF_STACK] for at in range(0, count, _OF_STACK)]
    parameters, steps = [one.parameter for one in units], MissedSteps()
    steps.know(1, lambda: stacks, {})
    watch, finds, groups = SliceWatch(), WithGradients(), [{"params": parameters}]
    watch.follow(parameters)
    seconds, draw = [], random.Random(0)  # noqa: S311 - no secret
    for _ in range(options.steps + 1):
        used = draw.sample(units, max(1, int(count * options.used)))
        for one in used:
            one.pending.clear()  # its use has told it, and applied it
            one.parameter.grad = torch.zeros(1)
        began = time.thread_time()
        for one in used:
            watch.assigned(one.parameter, "grad")
        having = [parameter for _, parameter in finds.of(groups, [watch])]
        steps.look(finds.slices, watch.freezes)
        steps.due()
        steps.note(MissedStep(1.0, 0, steps.steps), lambda _: (ADAMW, _OPTIONS))
        for parameter in having:
            parameter.grad = None
        finds.dropped([watch])
        seconds.append(time.thread_time() - began)
    return {"slices": count, "used": len(used), "step": statistics.median(seconds[1:])}


def _measure(options: argparse.Namespace, _folder: Path, console: Console) -> Findings:
    with console.status("noting"):
        rows = [measured(count, options) for count in options.slices]
    return Findings(
        title="Noting a step for slices that it does not use",
        rows=rows,
        columns=[
            Column("slices", "slices"),
            Column("used", "used"),
            Column("step", "step", lambda seconds: f"{1e3 * seconds:.2f} ms"),
        ],
        verdicts=[
            f"{one['slices']:,} slices: {1e6 * one['step'] / one['slices']:.3f} µs each" for one in rows
        ],
        options=asked(options),
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure, and show."""
    parser = command("engine.missed", "what noting steps for slices that are not used takes of a CPU")
    add = parser.add_argument
    add("--slices", type=positive, nargs="+", default=[1_000, 10_000, 100_000], metavar="N", help="how many")
    add("--used", type=float, default=0.02, metavar="SHARE", help="that a step uses; 0.02")
    add("--steps", type=positive, default=9, metavar="N", help="measured; 9")
    run_command(parser, arguments, _measure)


if __name__ == "__main__":
    main()

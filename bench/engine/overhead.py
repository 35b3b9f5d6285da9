"""The time of Infinity's own Python code: the lane's per request, and the compute thread's per use of a unit.
Measured with real engines on models with almost no bytes or arithmetic, alone and while something computes.

    python -m infinity.bench.engine.overhead --nvme DIR

prints the latter, with everything in memory and with almost nothing there, with units of modules and of
blocks. A use of a block is one of all its modules, so both are shown for each use of a module, too.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import nn

from infinity import AdamW, Init, kernels, stats
from infinity.bench.engine import contestant
from infinity.bench.engine.contestant import Spec
from infinity.bench.engine.runs import settings_of
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.bench.targets import Target
from infinity.engine.engine import engine_of_model
from infinity.lane.counts import LaneTimes
from infinity.planning.budget import least_budget
from infinity.records.updates import Update

_SCALARS = kernels.AdamWScalars(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
_REQUESTS = 8
"""Requests per tile of a record: hi, lo, m and v are read and written."""
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
_SMALL["vocab_size"] = 256
"""A Llama with negligible arithmetic, of 39 modules with parameters, each used twice in a step."""
_LITTLE, _SOME, _ALL = "256KiB", "2MiB", "64MiB"
"""Budgets that hold little of it, some, and everything."""
_MEASURED = ((_LITTLE, "module"), (_SOME, "module"), (_SOME, "block"), (_ALL, "module"), (_ALL, "block"))
"""With little, no block is small enough."""
_GOALS = {
    units: Target("≤", 100, f"µs of the compute thread per use of a module, all in memory, by {units}")
    for units in ("module", "block")
}
_LEAST_SHARE = 0.02
"""The least part of its speed that computing keeps: with 0, a forecast would never end."""


class Asking:
    """A real lane over a real file, with tiles so small that its time is Python's and the disk requests'."""

    def __init__(self, folder: str, numel: int = 1 << 20) -> None:
        """Build a record of `numel` elements in `folder`, with the smallest possible budget.

        Raises: the errors of Init.
        """
        with Init(nvme=folder, host_memory=least_budget(), device="cpu"):
            self._layer = nn.Linear(1024, numel // 1024, bias=False)
        self._optimizer = AdamW(self._layer.parameters(), update="backward")
        self._engine = engine_of_model(self._layer)
        self._gradient = torch.full((numel,), 0.5, dtype=torch.bfloat16)
        self._requests = _REQUESTS * -(-numel // self._engine.budget.tile_numel)
        self._ended = False
        self._began_s, self._before = 0.0, LaneTimes()
        self._walks = 0
        self._thread = threading.Thread(target=self._run, name="infinity-asking", daemon=True)
        self._walk()  # moments exist after the first update

    def _walk(self) -> None:
        unit = self._engine.units[0]
        unit.pending[0] = Update(_SCALARS, self._gradient, None)
        self._engine.residency.flush(unit)
        self._engine.lane.drain()
        self._walks += 1

    def alone(self, seconds: float = 0.5) -> float:
        """Walk over the record for some seconds; return the lane's seconds per request."""
        self._start_counting()
        while time.perf_counter() - self._began_s < seconds:
            self._walk()
        return self._busy_s() / self._asked()

    def start(self) -> None:
        """Start a thread that walks until `stop`."""
        self._start_counting()
        self._thread.start()

    def stop(self) -> tuple[float, float]:
        """Return the seconds per request since `start`: the lane's, and the clock's."""
        self._ended = True
        self._thread.join()
        return self._busy_s() / self._asked(), (time.perf_counter() - self._began_s) / self._asked()

    def _run(self) -> None:
        while not self._ended:
            self._walk()

    def _start_counting(self) -> None:
        times = self._engine.lane.times
        self._before = LaneTimes(times.read_wait_s, times.work_s, times.write_wait_s, times.idle_s)
        self._began_s, self._walks = time.perf_counter(), 0

    def _asked(self) -> int:
        return max(1, self._walks) * self._requests

    def _busy_s(self) -> float:
        """Return the seconds since the start in which the lane did not wait."""
        times, before = self._engine.lane.times, self._before
        waited_s = (
            times.read_wait_s - before.read_wait_s,
            times.write_wait_s - before.write_wait_s,
            times.idle_s - before.idle_s,
        )
        return max(time.perf_counter() - self._began_s - sum(waited_s), 1e-9)


def request_toll(folder: str, compute: Callable[[], object], steps: int = 2) -> tuple[float, float, float]:
    """Return the lane's seconds per request; its rate of requests while `compute` runs, relative to the lane
    alone; and the speed of `compute` meanwhile, relative to `compute` alone.

    Other threads contend as well: the disk's, and those waiting for the interpreter lock. Computing may
    therefore lose more time per request than the lane spends; the larger time counts as the lane's.
    """
    lane = Asking(folder)
    alone_s = lane.alone()
    computing_s = statistics.median(_seconds(compute) for _ in range(steps))
    lane.start()
    try:
        beside_s = statistics.median(_seconds(compute) for _ in range(steps))
    finally:
        asked_s, passed_s = lane.stop()
    lost_s = passed_s * (1 - min(1.0, computing_s / beside_s))
    taken_s = max(alone_s, asked_s, lost_s / (1 - _LEAST_SHARE))
    return alone_s, alone_s / taken_s, 1 - lost_s / taken_s


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class StepToll(NamedTuple):
    """What Infinity's Python takes of a step of the small model, beside the step itself."""

    host_memory: str
    units: str
    seconds: float
    uses: int
    """Of units."""

    @property
    def use_s(self) -> float:
        """Seconds per use of a unit."""
        return self.seconds / self.uses


def step_toll(
    folder: str, host_memory: str = _LITTLE, repeats: int = 5, *, units: str = "module"
) -> StepToll:
    """Return the compute thread's additional seconds of a step: of a small model's step in Infinity, compared
    with the same step without it, in turns. Updates of what lies in memory are among them.
    """
    settings = {**settings_of(host_memory), "units": units}
    ours = Spec("infinity", _SMALL, 1, 8, folder, "", settings=settings)
    without = contestant.forward_backward(ours)
    within = replace(contestant.infinity(ours), moved=without.moved)  # counting bytes is no part of a step
    for _ in range(3):  # after these the order of uses is known, moments exist, and fields have moved
        contestant.one_step(within, ours, 0)
    before = stats(within.model).uses
    contestant.one_step(within, ours, 0)
    uses = stats(within.model).uses - before
    steps = [partial(contestant.one_step, one, ours, 0) for one in (within, without)]
    seconds = [[_thread_s(step) for step in steps] for _ in range(repeats)]
    within_s, without_s = (min(taken) for taken in zip(*seconds, strict=True))
    return StepToll(host_memory, units, float(max(0.0, within_s - without_s)), uses)


def tolls(folder: str, compute: Callable[[], object]) -> dict[str, float]:
    """Return all figures, by their names in simulator.Rates; see `request_toll` for `compute`."""
    names = ("request_s", "asking", "computing_asked")
    return {**dict(zip(names, request_toll(folder, compute), strict=True)), "use_s": step_toll(folder).use_s}


def _thread_s(call: Callable[[], Any]) -> float:
    """Return the CPU time that a call takes of this thread."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


# The command


def findings_of(tolls: Sequence[StepToll], options: argparse.Namespace) -> Findings:
    """Show the seconds of a step, and per use, at each host_memory beside the goal. Uses of modules are those
    of a step whose units are modules.
    """
    modules = max(one.uses for one in tolls)
    rows: list[dict[str, Any]] = [
        {**one._asdict(), "use_s": one.use_s, "module_s": one.seconds / modules} for one in tolls
    ]
    return Findings(
        title="The compute thread's time for Infinity",
        rows=rows,
        columns=[
            Column("host_memory", "host_memory"),
            Column("units", "units"),
            Column("uses", "uses a step", str),
            Column("seconds", "a step", lambda taken: f"{1e3 * taken:.1f} ms"),
            Column("use_s", "per use of a unit", lambda taken: f"{1e6 * taken:.0f} µs"),
            Column("module_s", "per use of a module", lambda taken: f"{1e6 * taken:.0f} µs"),
        ],
        verdicts=[
            _GOALS[row["units"]].verdict([1e6 * row["module_s"]])
            for row in rows
            if row["host_memory"] == _ALL
        ],
        options=asked(options),
    )


def _measure(options: argparse.Namespace, folder: Path, console: Console) -> Findings:
    torch.set_num_threads(1)  # what others compute meanwhile is no time of this thread's
    with console.status("training a small model"):
        found = [step_toll(str(folder), budget, options.repeats, units=units) for budget, units in _MEASURED]
    return findings_of(found, options)


def main(arguments: list[str] | None = None) -> None:
    """Measure the seconds per use, and show them."""
    parser = command("engine.overhead", "the compute thread's time per use of a unit")
    parser.add_argument("--repeats", type=int, default=40, help="steps, of which the fastest counts")
    run_command(parser, arguments, _measure)


if __name__ == "__main__":
    main()

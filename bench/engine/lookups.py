"""The share of a step that looking slices up takes: finding which slices the step uses, where they lie and
which stay in memory; noting that the others miss the step; and asking which have gradients.

    python -m infinity.bench.engine.lookups --nvme DIR --slices 100000

A real engine trains embeddings in blocks of rows, each a slice with a record of its own on NVMe; a step uses
some of them, by Zipf's law. The seconds are those of the computing thread in the functions that are named in
`FINDING` and `NOTING`, without what these begin (fetches, writes) and without the counting; the step's are
the wall clock's. A number that a use appends to a list, as `Frequencies.used_anew` does, a unit that enters a
set, or an update that is put with its unit, is part of that use, and not counted.

Nor is what malloc does with the first larger block that it is asked for after a backward: it merges all small
ones that were freed there, which takes 1 to 2 µs for each used slice, and was counted as the first look-up of
a step (`_having_gradients`) before. Such a block is asked for where no look-up is timed: the step's seconds
have it.

100,000 slices of 64 KiB take 40 GB of the disk; of 8 KiB, which no Init would cut, 5 GB.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import infinity
from infinity.autograd.slice_watch import SliceWatch
from infinity.bench.arguments import positive, some_size
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.bench.targets import Target
from infinity.engine.routing import Routing
from infinity.optim.base import OffloadedOptimizer
from infinity.optim.decided import DecidedUpdates
from infinity.optim.missed import Beginning, MissedSteps, Stack
from infinity.optim.with_gradients import WithGradients
from infinity.planning.course import Course
from infinity.planning.frequency import Frequencies
from infinity.planning.tile_size import LEAST_SLICE_NBYTES
from infinity.tiling import TiledEmbedding
from infinity.units.pinning import Pins
from infinity.units.residency import UnitResidency
from infinity.units.routed_layers import RoutedLayers

_OF_STACK = 1000
_COLUMNS = 256
_SETTLING = 3
_MERGES_NBYTES = 4096
"""Of a block that malloc merges freed ones for: 1 KiB or more."""
_GOAL = Target("≤", 1.0, "% of a step")

FINDING: Sequence[tuple[type[Any], str]] = (
    (Frequencies, "used"),
    (Frequencies, "updated"),
    (Frequencies, "were_updated"),
    (Frequencies, "close_step"),
    (Pins, "admit"),
    (Pins, "close_step"),
    (Course, "is_stale"),
    (UnitResidency, "_fetched_sizes"),
    (Routing, "announced"),
    (RoutedLayers, "announced"),
    (RoutedLayers, "needed_with"),
)
"""Which slices are needed, where they lie, and which of them stay in memory."""

NOTING: Sequence[tuple[type[Any], str]] = (
    (OffloadedOptimizer, "_having_gradients"),
    (OffloadedOptimizer, "_begin_to_miss"),
    (OffloadedOptimizer, "_flush_earlier"),
    (OffloadedOptimizer, "_note_missed"),
    (WithGradients, "that_may_have"),
    (WithGradients, "dropped"),
    (DecidedUpdates, "add"),
    (MissedSteps, "due"),
    (Beginning, "parameters"),
    (Beginning, "units"),
    (Beginning, "places"),
    (Stack, "tell"),
    (SliceWatch, "assigned"),
    (SliceWatch, "look"),
)
"""Which slices have gradients, and which updates wait: what of an optimizer's step grows with the slices."""

LOOKED_UP = (*FINDING, *NOTING)
_BEGUN: Sequence[tuple[type[Any], str]] = (
    (Pins, "_leave"),
    (Pins, "_take"),
    (UnitResidency, "expect"),
    (UnitResidency, "flush"),
)
"""What these begin, and what is therefore not counted: fetches and writes, and memory that is allocated."""


def _named(function: tuple[type[Any], str]) -> str:
    kind, name = function
    return f"{kind.__name__}.{name}"


class Stopwatch:
    """Adds up the seconds of this thread in some functions, each second once."""

    def __init__(self) -> None:
        """None so far."""
        self.seconds: dict[str, float] = {}
        self.calls: Counter[str] = Counter()
        self._reads: dict[str, float] = {}
        """What reading the clock took, once for each time that was added: more where others use the CPU's
        caches, too.
        """
        self._within: list[str | None] = []
        self._since = 0.0

    def _add(self, now: float) -> None:
        inside = self._within[-1] if self._within else None
        if inside is not None:
            self.seconds[inside] = self.seconds.get(inside, 0.0) + now - self._since

    def _add_read(self, seconds: float) -> None:
        inside = self._within[-1] if self._within else None
        if inside is not None:
            self._reads[inside] = self._reads.get(inside, 0.0) + seconds

    def timed(self, call: Callable[..., Any], name: str | None) -> Callable[..., Any]:
        """Return `call`, whose seconds are counted under `name`; not at all, where that is None. What
        counting takes is left out: of thousands of short calls it would be most.
        """

        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._add(time.thread_time())
            self._within.append(name)
            if name is not None:
                self.calls[name] += 1
            self._since = time.thread_time()
            try:
                result = call(*args, **kwargs)
                return list(result) if isinstance(result, Iterator) else result  # which looks as it yields
            finally:
                ended = time.thread_time()
                read = time.thread_time() - ended
                self._add(ended)
                self._add_read(read)
                self._within.pop()
                self._add_read(read)  # of whoever has called this, and was counted until then
                self._since = time.thread_time()

        return timed

    def clear(self) -> None:
        """Forget what was counted."""
        self.seconds.clear()
        self.calls.clear()
        self._reads.clear()

    def without_counting(self, of_call: float) -> dict[str, float]:
        """Return the seconds without those that counting takes: reading the clock, and so many for a call."""
        return {
            name: seconds - self._reads.get(name, 0.0) - of_call * self.calls[name]
            for name, seconds in self.seconds.items()
        }


def of_a_call() -> float:
    """Return the seconds that are counted for a call because it is counted, beside reading the clock."""
    watch, calls = Stopwatch(), 10_000
    nothing = watch.timed(lambda: None, "nothing")
    for _ in range(calls):
        nothing()
    return watch.without_counting(0.0)["nothing"] / calls


@contextmanager
def watched() -> Iterator[Stopwatch]:
    """Count the seconds of all functions that look things up, until this ends."""
    watch = Stopwatch()
    before = [(kind, name, getattr(kind, name)) for kind, name in (*LOOKED_UP, *_BEGUN)]
    for kind, name, call in before:
        where = None if (kind, name) in _BEGUN else _named((kind, name))
        setattr(kind, name, watch.timed(call, where))
    try:
        yield watch
    finally:
        for kind, name, call in before:
            setattr(kind, name, call)


class _Looked(nn.Module):
    """Embeddings of so many blocks of rows, whose rows are added up."""

    def __init__(self, slices: int, rows: int) -> None:
        super().__init__()
        self._rows = rows
        counts = [min(_OF_STACK, slices - begin) for begin in range(0, slices, _OF_STACK)]
        self.tables = nn.ModuleList(
            TiledEmbedding(count * rows, _COLUMNS, row_tiles=[rows] * count) for count in counts
        )

    def forward(self, slices: torch.Tensor) -> torch.Tensor:
        """Return a loss of these slices, of each one row."""
        total = torch.zeros(())
        for number, table in enumerate(self.tables):
            own = slices[slices // _OF_STACK == number] % _OF_STACK
            total = total + table(own * self._rows).float().square().sum()
        return total


def measured(slices: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the seconds of steps with so many slices, and those of looking them up."""
    random = torch.Generator().manual_seed(0)
    popular = torch.arange(1, slices + 1, dtype=torch.float64) ** -1.0
    popular = popular[torch.randperm(slices, generator=random)]
    (folder / str(slices)).mkdir()
    count = max(1, int(slices * options.used))
    steps, of_call = [], of_a_call()
    with watched() as watch:  # an engine keeps some of these functions from the start
        with infinity.Init(nvme=str(folder / str(slices)), host_memory=options.host_memory):
            model = _Looked(slices, max(1, options.slice_size // (2 * _COLUMNS)))
        optimizer = infinity.AdamW(model.parameters(), lr=1e-4)
        for step in range(_SETTLING + options.steps):
            some = torch.multinomial(popular, count, generator=random)
            if step == _SETTLING:
                watch.clear()
            began = time.perf_counter()
            model(some).backward()
            bytearray(_MERGES_NBYTES)
            optimizer.step()
            optimizer.zero_grad()
            if step >= _SETTLING:
                steps.append(time.perf_counter() - began)
        looked = watch.without_counting(of_call)
    each = {
        name: seconds / options.steps for name, seconds in sorted(looked.items(), key=lambda item: -item[1])
    }
    finding, noting = (sum(each.get(one, 0.0) for one in map(_named, group)) for group in (FINDING, NOTING))
    mean = sum(steps) / len(steps)
    return {
        "slices": slices,
        "used": count,
        "step": statistics.median(steps),
        "finding": finding,
        "noting": noting,
        "of_use": (finding + noting) / count,
        "finding_share": 100 * finding / mean,
        "share": 100 * (finding + noting) / mean,
        "each": each,
    }


def _measure(options: argparse.Namespace, folder: Path, console: Console) -> Findings:
    with console.status("building and training"):
        rows = [measured(slices, options, folder) for slices in options.slices]

    def milliseconds(seconds: float) -> str:
        return f"{1e3 * seconds:.2f} ms"

    def percent(share: float) -> str:
        return f"{share:.2f} %"

    lines = []
    for row in rows:
        parts = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in row["each"].items())
        alone = f"finding alone {percent(row['finding_share'])}"
        lines.append(f"{row['slices']:,} slices: {_GOAL.verdict([row['share']])}, {alone}; {parts}")
    return Findings(
        title="Looking slices up, in a step",
        rows=rows,
        columns=[
            Column("slices", "slices"),
            Column("used", "used"),
            Column("step", "step", milliseconds),
            Column("finding", "finding", milliseconds),
            Column("noting", "noting", milliseconds),
            Column("of_use", "a used slice", lambda seconds: f"{1e6 * seconds:.1f} µs"),
            Column("finding_share", "finding", percent),
            Column("share", "both", percent),
        ],
        verdicts=lines,
        options=asked(options),
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure, and show."""
    parser = command("engine.lookups", "what looking slices up takes of a step")
    add = parser.add_argument
    add("--slices", type=positive, nargs="+", default=[10_000], metavar="N", help="how many; 10000")
    add("--used", type=float, default=0.02, metavar="SHARE", help="that a step uses; 0.02")
    least = "bytes of a slice as it computes, six times as many of state; 64KiB, the least that Init cuts"
    add("--slice-size", type=some_size, default=LEAST_SLICE_NBYTES, metavar="SIZE", help=least)
    add("--host-memory", type=some_size, default=16 << 20, metavar="SIZE", help="16MiB")
    add("--steps", type=positive, default=12, metavar="N", help="measured; 12")
    run_command(parser, arguments, _measure)


if __name__ == "__main__":
    main()

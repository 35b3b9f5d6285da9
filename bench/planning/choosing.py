"""What counting the uses of many slices takes of a CPU, and choosing which of them host memory keeps.

    python -m infinity.bench.planning.choosing --nvme DIR

Each slice has four fields, as an expert of 64 KiB in 16 bits has with AdamW; a step uses some of them, by
Zipf's law. Beside the seconds stands a hundredth of the time in which a disk of 2 GB/s moves what the step
uses: what a step takes at least where nothing of it is in memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console

from infinity.bench.arguments import positive, some_size
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.planning.densest import FieldColumns
from infinity.planning.frequency import Frequencies
from infinity.planning.many_slices import revise_in_host
from infinity.planning.placement import REVISED_EVERY, Placement, PlacementBudget

_FIELDS = ("hi", "lo", "m", "v")
_NBYTES = (64 << 10, 64 << 10, 128 << 10, 128 << 10)
_MOVED = 26 * (32 << 10)
"""Bytes that a use of a slice moves where it is not in memory."""
_DISK = 2e9


def measured(slices: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of this thread that a step takes, by what for; a revision's over steps."""
    random = np.random.default_rng(0)
    weights = np.arange(1, slices + 1) ** -1.0
    weights /= weights.sum()
    frequencies = Frequencies(slices)
    unit, field = np.repeat(np.arange(slices), len(_FIELDS)), np.tile(np.arange(len(_FIELDS)), slices)
    nbytes, placed = np.tile(np.array(_NBYTES), slices), np.zeros(slices * len(_FIELDS), np.bool_)
    keys = [(one, name) for one in range(slices) for name in _FIELDS]
    budget = PlacementBudget(0, options.host_memory, 0)
    placement: Placement = MappingProxyType({})
    taken: dict[str, list[float]] = {"counting": [], "closing": [], "choosing": []}
    used = []
    for _ in range(options.steps):
        some = np.unique(random.choice(slices, max(1, slices // 20), p=weights)).tolist()
        used.append(len(some))
        began = time.thread_time()
        for one in some:  # in the forward, in the backward, by the update
            frequencies.used(one)
            frequencies.used(one, kept=True)
            frequencies.updated(one)
        counted = time.thread_time()
        frequencies.close_step()
        closed = time.thread_time()
        fetches, updates = frequencies.fetches_of_all()[unit], frequencies.updates_of_all()[unit]
        reads = np.where(field == 0, fetches, updates)
        columns = FieldColumns(unit, field, nbytes, reads + updates, placed)
        placement = revise_in_host(placement, keys, columns, budget).placement
        placed = np.zeros(len(keys), np.bool_)
        placed[[one * len(_FIELDS) + _FIELDS.index(name) for one, name in placement]] = True
        ended = time.thread_time()
        taken["counting"].append(counted - began)
        taken["closing"].append(closed - counted)
        taken["choosing"].append((ended - closed) / REVISED_EVERY)
    found = {name: statistics.median(seconds) for name, seconds in taken.items()}
    step_s = statistics.median(used) * _MOVED / _DISK
    return {"slices": slices, "used": statistics.median(used), **found, "hundredth": step_s / 100}


def _measure(options: argparse.Namespace, _folder: Path, console: Console) -> Findings:
    with console.status("choosing"):
        rows = [measured(slices, options) for slices in options.slices]

    def milliseconds(seconds: float) -> str:
        return f"{1e3 * seconds:.2f} ms"

    lines = []
    for row in rows:
        seconds = row["counting"] + row["closing"] + row["choosing"]
        each, share = 1e6 * seconds / row["slices"], seconds / row["hundredth"]
        lines.append(f"{row['slices']:,} slices: {each:.2f} µs a slice and step, {share:.2f} % of it")
    return Findings(
        title=f"A step's counting and choosing, {options.host_memory >> 20} MiB for slices",
        rows=rows,
        columns=[
            Column("slices", "slices"),
            Column("used", "used", lambda count: f"{count:.0f}"),
            *(Column(name, name, milliseconds) for name in ("counting", "closing", "choosing", "hundredth")),
        ],
        verdicts=lines,
        options=asked(options),
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure, and show."""
    parser = command("planning.choosing", "what counting and choosing slices takes of a CPU")
    add = parser.add_argument
    add("--slices", type=positive, nargs="+", default=[1_000, 10_000, 100_000], metavar="N", help="how many")
    add("--host-memory", type=some_size, default=1 << 30, metavar="SIZE", help="for slices; 1GiB")
    add("--steps", type=positive, default=17, metavar="N", help="measured; 17")
    run_command(parser, arguments, _measure)


if __name__ == "__main__":
    main()

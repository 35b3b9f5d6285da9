"""What a durable run costs over one that is not, and what checksums cost over none: time, and bytes counted.

    python -m infinity.bench.durable.durability --nvme DIR --json bench/results/durability-16.json
    python -m infinity.bench.durable.durability --nvme DIR --tokens 256 --races 3 \
        --json bench/results/durability-256.json
    python -m infinity.bench.durable.durability --nvme DIR --model 269m --host-memory 512MiB --races 3 \
        --beside unchecked --json bench/results/durability-269m.json

One training runs with three settings, each in a process that lives for a race: as it is, with durable=True,
and with verify="off". They take turns of a few steps, in changing order. The result is the median of the
ratios within the turns of all races, because a disk's speed drifts, and the same settings differ by some
percent from process to process. Each turn begins by measuring the disk with our own engine. If moving the
step's bytes at that speed takes most of the step, the disk is the bottleneck; checksums then run while the
disk works, and their limit is lower. Bytes are the kernel's count. Fields that the budget keeps in host
memory, which a durable run writes with every commit, are shown separately and not counted as its cost.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.aio.fio import Bandwidth, read_percent
from infinity.bench.arguments import size_of
from infinity.bench.engine.floor import Gauge, gauge_on, terms
from infinity.bench.engine.runs import OWN, SHAPES, Measured, Model, measure, settings_of
from infinity.bench.engine.turns import seconds_of_turns, take_turns
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.bench.targets import Target
from infinity.sizes import format_size

WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "durable": {"durable": True},
    "unchecked": {"verify": "off"},
}
DURABLE_TIME = Target("≤", 1.05, "x the time of a step that is not durable")
DURABLE_BYTES = Target("≤", 1.01, "x the bytes of a step that is not durable, on NVMe-resident state")
CHECKED_DISK = Target("≤", 1.03, "x the time of a step without checksums, the disk being the limit")
CHECKED = Target("≤", 1.10, "x the time of a step without checksums")
NEAR = 0.85
"""The disk is the bottleneck if it needs this part of a step without checksums."""
TURN = 4
"""Steps of a turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds per step of each setting in one turn, and the disk's speed before it, if known."""

    seconds: Mapping[str, float]
    disk: Bandwidth | None = None


@dataclass(frozen=True, slots=True)
class Race:
    """The runs and turns of the same processes."""

    runs: Mapping[str, Measured]
    turns: Sequence[Turn]

    def busy_in(self, turn: Turn, way: str) -> float:
        """Return the part of a step that the disk needs for its bytes; 0 if its speed is not known."""
        run = self.runs[way]
        return terms(0.0, run.read_nbytes, run.written_nbytes, turn.disk).floor_s / turn.seconds[way]

    def ratios(self, way: str, other: str) -> list[float]:
        """Return how many times as long a step of one setting took as of the other, turn by turn."""
        return [turn.seconds[way] / turn.seconds[other] for turn in self.turns]


def bytes_over(race: Race) -> float:
    """Return the bytes of a durable step over those of a plain one, without fields in host memory."""
    durable, plain = race.runs["durable"], race.runs["as it is"]
    nbytes = durable.bytes_per_parameter * durable.parameters - float(durable.engine["host_nbytes"])
    return nbytes / (plain.bytes_per_parameter * plain.parameters)


def verdicts(tokens: int, races: Sequence[Race]) -> list[str]:
    """Compare the ratios within the turns of all races with their limits."""
    lines, ways = [], races[0].runs
    if "durable" in ways:
        times = [race.ratios("durable", "as it is") for race in races]
        lines += [
            f"{tokens} tokens, durable: {DURABLE_TIME.verdict(list(chain(*times)))} {spread(times)}",
            f"{tokens} tokens, durable: {DURABLE_BYTES.verdict([bytes_over(race) for race in races])}",
        ]
    if "unchecked" in ways:
        busy = [race.busy_in(turn, "unchecked") for race in races for turn in race.turns]
        limit = CHECKED_DISK if statistics.median(busy) >= NEAR else CHECKED
        times = [race.ratios("as it is", "unchecked") for race in races]
        lines.append(f"{tokens} tokens, checksums: {limit.verdict(list(chain(*times)))} {spread(times)}")
    return lines


def spread(times: Sequence[Sequence[float]]) -> str:
    """Describe the ratios in the turns of several races."""
    values = list(chain(*times))
    if len(values) == 1:
        return "(1 turn)"
    low, _, high = statistics.quantiles(values, method="inclusive")
    said = f"{len(values)} turns, half of them {low:.2f} to {high:.2f}"
    medians = ", ".join(f"{statistics.median(race):.2f}" for race in times)
    return f"({said})" if len(times) == 1 else f"({said}; race by race {medians})"


def rows_of(tokens: int, number: int, race: Race) -> list[dict[str, Any]]:
    """Return each setting's turns in a race as rows."""
    return [
        {
            "tokens": tokens,
            "race": number,
            "turn": at,
            "way": way,
            "seconds": turn.seconds[way],
            "read_per_parameter": run.read_per_parameter,
            "written_per_parameter": run.written_per_parameter,
            "host_nbytes": run.engine["host_nbytes"],
            "busy": race.busy_in(turn, way),
            "disk": None if turn.disk is None else asdict(turn.disk),
            "loss": run.loss,
            "load": run.load,
        }
        for at, turn in enumerate(race.turns, 1)
        for way, run in race.runs.items()
    ]


def findings_of(found: Mapping[int, Sequence[Race]], options: argparse.Namespace) -> Findings:
    """Show all turns."""
    return Findings(
        title="What durable runs and checksums cost",
        rows=[
            row
            for tokens, races in found.items()
            for number, race in enumerate(races, 1)
            for row in rows_of(tokens, number, race)
        ],
        columns=[
            Column("tokens", "tokens"),
            Column("race", "race"),
            Column("turn", "turn"),
            Column("way", "setting"),
            Column("seconds", "s per step", "{:.3f}".format),
            Column("read_per_parameter", "read, B per parameter", "{:.2f}".format),
            Column("written_per_parameter", "written", "{:.2f}".format),
            Column("host_nbytes", "kept in host memory", format_size),
            Column("busy", "that the disk needs", "{:.0%}".format),
            Column("loss", "last loss", "{:.6f}".format),
        ],
        verdicts=[line for tokens, races in found.items() for line in verdicts(tokens, races)],
        options=asked(options),
    )


def compare(tokens: int, options: argparse.Namespace, folder: Path, gauge: Gauge) -> list[Race]:
    """Run the races, each with new processes."""
    ways = [way for way in WAYS if way == "as it is" or way in options.beside]
    orders = itertools.cycle(itertools.permutations(ways))
    return [
        _race(tokens, options, folder, gauge, list(itertools.islice(orders, options.turns)))
        for _ in range(options.races)
    ]


def _race(
    tokens: int, options: argparse.Namespace, folder: Path, gauge: Gauge, orders: Sequence[Sequence[str]]
) -> Race:
    """Let the settings train in turns of these orders, after one turn that settles."""
    settings = settings_of(options.host_memory, options.update) | {"dtype": options.dtype}
    model = Model(options.model, tokens, (1 + options.turns) * TURN, turn=TURN)
    disk: list[Bandwidth | None] = []

    def run(more: Mapping[str, Any], baton: int) -> Measured:
        return measure(OWN, "infinity", model, folder, {**settings, **more}, baton=baton)

    runs = take_turns(
        {way: partial(run, WAYS[way]) for way in orders[0]},
        [orders[0], *orders],
        lambda: disk.append(gauge.measure(read_percent(0, 0)).own),
    )
    seconds = {way: seconds_of_turns(one, TURN) for way, one in runs.items()}
    return Race(
        runs,
        [
            Turn({way: each[number] for way, each in seconds.items()}, disk[1 + number])
            for number in range(options.turns)
        ],
    )


def race_all(options: argparse.Namespace, folder: Path, console: Console) -> Findings:
    """Run the races for each number of tokens."""
    gauge = gauge_on(folder, options.disk_size, seconds=1)
    found: dict[int, list[Race]] = {}
    for tokens in options.tokens:
        with console.status(f"{tokens} tokens, {options.races} races"):
            found[tokens] = compare(tokens, options, folder, gauge)
    return findings_of(found, options)


def main(arguments: list[str] | None = None) -> None:
    """Measure; print the table, write the record."""
    parser = command("durable.durability", "What durable runs and checksums cost")
    add = parser.add_argument
    add("--model", choices=SHAPES, default="125m")
    add("--host-memory", default="128MiB", metavar="SIZE", help="small, so that state lies on NVMe; 128MiB")
    add("--update", choices=("forward", "backward"), default="backward")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="of computing; bf16")
    add("--tokens", nargs="+", type=int, default=[16], metavar="N", help="per step")
    add("--races", type=int, default=6, metavar="N", help="each with new processes; 6")
    turns = f"of a race, {TURN} steps each, of which the first does not count, after one that settles; 3"
    add("--turns", type=int, default=3, metavar="N", help=turns)
    beside = [way for way in WAYS if way != "as it is"]
    add("--beside", nargs="+", choices=beside, default=beside, help="settings to compare with")
    size = "of the file to measure the disk with; 1GiB"
    add("--disk-size", type=size_of, default=1 << 30, metavar="SIZE", help=size)
    run_command(parser, arguments, race_all)


if __name__ == "__main__":
    main()

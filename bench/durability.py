"""What a durable run costs over one that is not, and what checksums cost over none: time, and bytes counted.

    python -m infinity.bench.durability --nvme DIR --json bench/results/durability-16.json
    python -m infinity.bench.durability --nvme DIR --tokens 256 --steps 5 --rounds 2 \
        --json bench/results/durability-256.json
    python -m infinity.bench.durability --nvme DIR --model 269m --host-memory 512MiB --steps 5 --rounds 6 \
        --beside unchecked --json bench/results/durability-269m.json

Three settings of one training, each run in a fresh process, in changing order: as it is, with durable=True,
and with verify="off". What counts are the medians of the ratios within rounds, since a disk's speed drifts.
Each round begins with measuring that speed, by our own engine: where the disk, at it, needs most of a step
for its bytes, the disk is the limit, and checksums, which computing has time for then, may cost less. Bytes
are the kernel's count; fields that the budget keeps in host memory, which a durable run writes with every
commit, are told beside them and not held against it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, show, write
from infinity.bench.fio import Bandwidth, read_percent
from infinity.bench.floor import gauge_on, terms
from infinity.bench.runs import OWN, SETTLING, SHAPES, Measured, Model, folder_on, measure, settings_of
from infinity.bench.targets import Target
from infinity.errors import InfinityError
from infinity.sizes import format_size, parse_size

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
"""The disk is the limit where it needs this part of a step without checksums, as of a step near its floor."""


@dataclass(frozen=True, slots=True)
class Round:
    """One run of each way, and what the disk did before them; None where it cannot be measured."""

    runs: Mapping[str, Measured]
    disk: Bandwidth | None = None

    def busy(self, way: str) -> float:
        """Return the part of a step that the disk needs for its bytes; 0 where its speed is not known."""
        run = self.runs[way]
        return terms(0.0, run.read_nbytes, run.written_nbytes, self.disk).floor_s / run.seconds


def bytes_over(one: Round) -> float:
    """Return the bytes of a durable step over those of one that is not, without what lies in host memory."""
    durable, plain = one.runs["durable"], one.runs["as it is"]
    nbytes = durable.bytes_per_parameter * durable.parameters - float(durable.engine["host_nbytes"])
    return nbytes / (plain.bytes_per_parameter * plain.parameters)


def verdicts(tokens: int, rounds: Sequence[Round]) -> list[str]:
    """Hold the ratios within the rounds against what they may be."""
    lines = []
    if "durable" in rounds[0].runs:
        durable = [one.runs["durable"].seconds / one.runs["as it is"].seconds for one in rounds]
        lines += [
            f"{tokens} tokens, durable: {DURABLE_TIME.verdict(durable)}",
            f"{tokens} tokens, durable: {DURABLE_BYTES.verdict(list(map(bytes_over, rounds)))}",
        ]
    if "unchecked" in rounds[0].runs:
        checked = [one.runs["as it is"].seconds / one.runs["unchecked"].seconds for one in rounds]
        busy = statistics.median(one.busy("unchecked") for one in rounds)
        limit = CHECKED_DISK if busy >= NEAR else CHECKED
        lines.append(f"{tokens} tokens, checksums: {limit.verdict(checked)}")
    return lines


def row_of(tokens: int, number: int, way: str, one: Round) -> dict[str, Any]:
    """Return one run as a row."""
    run = one.runs[way]
    return {
        "tokens": tokens,
        "round": number,
        "way": way,
        "seconds": run.seconds,
        "read_per_parameter": run.read_per_parameter,
        "written_per_parameter": run.written_per_parameter,
        "host_nbytes": run.engine["host_nbytes"],
        "busy": one.busy(way),
        "disk": None if one.disk is None else asdict(one.disk),
        "loss": run.loss,
        "all_seconds": run.all_seconds,
        "load": run.load,
    }


def findings_of(found: dict[int, list[Round]], options: argparse.Namespace) -> Findings:
    """Lay all runs side by side."""
    return Findings(
        title="What durable runs and checksums cost",
        rows=[
            row_of(tokens, number, way, one)
            for tokens, rounds in found.items()
            for number, one in enumerate(rounds, 1)
            for way in one.runs
        ],
        columns=[
            Column("tokens", "tokens"),
            Column("round", "round"),
            Column("way", "setting"),
            Column("seconds", "s per step", "{:.3f}".format),
            Column("read_per_parameter", "read, B per parameter", "{:.2f}".format),
            Column("written_per_parameter", "written", "{:.2f}".format),
            Column("host_nbytes", "kept in host memory", format_size),
            Column("busy", "that the disk needs", "{:.0%}".format),
            Column("loss", "loss", "{:.6f}".format),
        ],
        verdicts=[line for tokens, rounds in found.items() for line in verdicts(tokens, rounds)],
        options=asked(options),
    )


def compare(options: argparse.Namespace, folder: Path, console: Console) -> dict[int, list[Round]]:
    """Run every setting in turn, round by round."""
    settings = settings_of(options.host_memory, options.update) | {"dtype": options.dtype}
    found: dict[int, list[Round]] = {tokens: [] for tokens in options.tokens}
    ways = [(way, more) for way, more in WAYS.items() if way == "as it is" or way in options.beside]
    orders = list(itertools.permutations(ways))
    gauge = gauge_on(folder, options.disk_size, seconds=1)
    for number in range(options.rounds):
        for tokens, rounds in found.items():
            model = Model(options.model, tokens, options.steps)
            speeds = gauge.measure(read_percent(0, 0))
            runs: dict[str, Measured] = {}
            for way, more in orders[number % len(orders)]:
                with console.status(f"{tokens} tokens, {way}"):
                    runs[way] = measure(OWN, "infinity", model, folder, {**settings, **more})
            rounds.append(Round(runs, speeds.own))
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure; print the table, write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m infinity.bench.durability", description="What durable runs and checksums cost"
    )
    parser.add_argument("--nvme", type=Path, required=True, metavar="DIR", help="a folder on the disk")
    parser.add_argument("--model", choices=SHAPES, default="125m")
    parser.add_argument("--host-memory", default="128MiB", metavar="SIZE", help="so that state lies on NVMe")
    parser.add_argument("--update", choices=("forward", "backward"), default="backward")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="that computes; bf16")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16], metavar="N", help="per step")
    parser.add_argument("--steps", type=int, default=7, help=f"of which the first {SETTLING} do not count")
    parser.add_argument("--rounds", type=int, default=3)
    beside = [way for way in WAYS if way != "as it is"]
    parser.add_argument("--beside", nargs="+", choices=beside, default=beside, help="what it is held against")
    size = "of the file to measure the disk with; 1GiB"
    parser.add_argument("--disk-size", type=parse_size, default=1 << 30, metavar="SIZE", help=size)
    add_outputs(parser, plots=False)
    options = parser.parse_args(arguments)
    console = Console()
    try:
        check_outputs(options)
        with folder_on(options.nvme) as folder:
            found = compare(options, folder, console)
            findings = findings_of(found, options)
            show(findings, console, folder)
            write(findings, options, folder)
    except InfinityError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()

"""What a durable run costs over one that is not, and what checksums cost over none: time, and bytes counted.

    python -m infinity.bench.durability --nvme DIR --json bench/results/durability-16.json
    python -m infinity.bench.durability --nvme DIR --tokens 256 --steps 5 --rounds 2 \
        --json bench/results/durability-256.json
    python -m infinity.bench.durability --nvme DIR --model 269m --host-memory 512MiB --steps 5 --rounds 6 \
        --beside unchecked --json bench/results/durability-269m.json

Three settings of one training, each run in a fresh process, in changing order: as it is, with durable=True,
and with verify="off". With few tokens and room for many tiles the disk is the limit, with many tokens, or few
tiles under way, it is not. What counts are the medians of the ratios within rounds, since a disk's speed
drifts. Bytes are the kernel's count; fields that the budget keeps in host memory, which a durable run writes
with every commit, are told beside them and not held against it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, show, write
from infinity.bench.runs import OWN, SETTLING, SHAPES, Measured, Model, folder_on, measure, settings_of
from infinity.bench.targets import Target
from infinity.errors import InfinityError
from infinity.sizes import format_size

WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "durable": {"durable": True},
    "unchecked": {"verify": "off"},
}
Round = dict[str, Measured]
DURABLE_TIME = Target("≤", 1.05, "x the time of a step that is not durable")
DURABLE_BYTES = Target("≤", 1.01, "x the bytes of a step that is not durable, on NVMe-resident state")
CHECKED_DISK = Target("≤", 1.03, "x the time of a step without checksums, the disk being the limit")
CHECKED = Target("≤", 1.10, "x the time of a step without checksums")
WAITING = 0.5
"""The disk is the limit where computing waits for it for this part of a step."""


def bytes_over(one: Round) -> float:
    """Return the bytes of a durable step over those of one that is not, without what lies in host memory."""
    durable, plain = one["durable"], one["as it is"]
    nbytes = durable.bytes_per_parameter * durable.parameters - float(durable.engine["host_nbytes"])
    return nbytes / (plain.bytes_per_parameter * plain.parameters)


def waiting(run: Measured) -> float:
    """Return the part of a run's steps in which computing waited for the disk."""
    return float(run.engine["stall_s"]) / sum(run.all_seconds)


def verdicts(tokens: int, rounds: Sequence[Round]) -> list[str]:
    """Hold the ratios within the rounds against what they may be."""
    lines = []
    if "durable" in rounds[0]:
        durable = [one["durable"].seconds / one["as it is"].seconds for one in rounds]
        lines += [
            f"{tokens} tokens, durable: {DURABLE_TIME.verdict(durable)}",
            f"{tokens} tokens, durable: {DURABLE_BYTES.verdict(list(map(bytes_over, rounds)))}",
        ]
    if "unchecked" in rounds[0]:
        checked = [one["as it is"].seconds / one["unchecked"].seconds for one in rounds]
        waits = statistics.median(waiting(one["unchecked"]) for one in rounds)
        limit = CHECKED_DISK if waits >= WAITING else CHECKED
        lines.append(f"{tokens} tokens, checksums: {limit.verdict(checked)}")
    return lines


def row_of(tokens: int, number: int, way: str, run: Measured) -> dict[str, Any]:
    """Return one run as a row."""
    return {
        "tokens": tokens,
        "round": number,
        "way": way,
        "seconds": run.seconds,
        "read_per_parameter": run.read_per_parameter,
        "written_per_parameter": run.written_per_parameter,
        "host_nbytes": run.engine["host_nbytes"],
        "waiting": waiting(run),
        "loss": run.loss,
        "all_seconds": run.all_seconds,
        "load": run.load,
    }


def findings_of(found: dict[int, list[Round]], options: argparse.Namespace) -> Findings:
    """Lay all runs side by side."""
    return Findings(
        title="What durable runs and checksums cost",
        rows=[
            row_of(tokens, number, way, run)
            for tokens, rounds in found.items()
            for number, one in enumerate(rounds, 1)
            for way, run in one.items()
        ],
        columns=[
            Column("tokens", "tokens"),
            Column("round", "round"),
            Column("way", "setting"),
            Column("seconds", "s per step", "{:.3f}".format),
            Column("read_per_parameter", "read, B per parameter", "{:.2f}".format),
            Column("written_per_parameter", "written", "{:.2f}".format),
            Column("host_nbytes", "kept in host memory", format_size),
            Column("waiting", "of it waiting for the disk", "{:.0%}".format),
            Column("loss", "loss", "{:.6f}".format),
        ],
        verdicts=[line for tokens, rounds in found.items() for line in verdicts(tokens, rounds)],
        options=asked(options),
    )


def main(arguments: list[str] | None = None) -> None:
    """Run every setting in turn; print the table, write the record."""
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
    add_outputs(parser, plots=False)
    options = parser.parse_args(arguments)
    console = Console()
    settings = settings_of(options.host_memory, options.update) | {"dtype": options.dtype}
    found: dict[int, list[Round]] = {tokens: [] for tokens in options.tokens}
    ways = [(way, more) for way, more in WAYS.items() if way == "as it is" or way in options.beside]
    orders = list(itertools.permutations(ways))
    try:
        check_outputs(options)
        with folder_on(options.nvme) as folder:
            for number in range(options.rounds):
                for tokens, rounds in found.items():
                    model = Model(options.model, tokens, options.steps)
                    one: Round = {}
                    for way, more in orders[number % len(orders)]:
                        with console.status(f"{tokens} tokens, {way}"):
                            one[way] = measure(OWN, "infinity", model, folder, {**settings, **more})
                    rounds.append(one)
            findings = findings_of(found, options)
            show(findings, console, folder)
            write(findings, options, folder)
    except InfinityError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()

"""Steps whose updates are made at different times, by turns, and the ratios of their seconds.

    python -m infinity.bench.engine.alternating --nvme DIR --tokens 64 256 512 --update backward foreseen \
        --json bench/results/alternating.json

One training runs with several of `runs.UPDATES`, each in a process that stays while the others train. They
take turns of a few steps, in changing order, since a drive's speed drifts by half within minutes, and is
another one behind a run than before it. The result is the median of the ratios within turns.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.arguments import positive, size_of
from infinity.bench.engine.runs import OWN, SHAPES, UPDATES, Measured, Model, measure, settings_of
from infinity.bench.engine.step import spread
from infinity.bench.engine.turns import seconds_of_turns, take_turns
from infinity.bench.findings import Column, Findings, asked, command, run_command, write_unfinished
from infinity.bench.targets import Target
from infinity.sizes import format_size

TARGETS = {
    ("foreseen", "backward"): Target("≤", 1.05, 'times update="backward", no norm exceeds its bound'),
    ("exceeding", "clipped"): Target("≤", 1.02, "times a step without speculation, all norms exceed"),
}
"""By the update that is measured, and the one beside which it is."""
TURN = 4
"""Steps of a turn, of which the first is not counted."""


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, measure, print and write."""
    parser = command("engine.alternating", "Ways to update, by turns, and the ratios of their steps.")
    add = parser.add_argument
    add("--model", choices=SHAPES, default="269m", metavar="NAME", help=f"{', '.join(SHAPES)}; 269m")
    add("--host-memory", type=size_of, default=512 << 20, metavar="SIZE", help="Infinity's budget; 512MiB")
    add("--tokens", nargs="+", type=positive, default=[64, 256, 512], metavar="N", help="of a sequence")
    ways = "the first is what the others are held against; backward foreseen"
    add("--update", nargs="+", choices=UPDATES, default=["backward", "foreseen"], help=ways)
    add("--rounds", type=positive, default=5, metavar="N", help="turns of each that count; 5")
    run_command(parser, arguments, compare_all)


def compare_all(options: argparse.Namespace, folder: Path, console: Console) -> Findings:
    """Compare the ways for each number of tokens."""
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens:
        with console.status(f"{tokens} tokens, {options.rounds} rounds"):
            rows += compare(tokens, options, folder)
        write_unfinished(findings_of(rows, options), options, folder)
    return findings_of(rows, options)


def compare(tokens: int, options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Let all train in turns, after one turn that settles; return a row for each."""
    ways = dict.fromkeys(options.update)
    model = Model(options.model, tokens, (1 + options.rounds) * TURN, turn=TURN)

    def run(update: str, baton: int) -> Measured:
        settings = settings_of(options.host_memory, update)
        return measure(OWN, "infinity", model, folder, settings, baton=baton)

    orders = list(itertools.islice(itertools.cycle(itertools.permutations(ways)), options.rounds))
    runs = take_turns({way: partial(run, way) for way in ways}, [orders[0], *orders], lambda: None)
    return rows_of(tokens, runs)


def rows_of(tokens: int, runs: Mapping[str, Measured]) -> Iterator[dict[str, Any]]:
    """Return a row for each way, held against the first."""
    seconds = {way: seconds_of_turns(one, TURN) for way, one in runs.items()}
    first = next(iter(seconds))
    for way, one in runs.items():
        yield {
            "tokens": tokens,
            "update": way,
            "beside": first,
            "seconds": statistics.median(seconds[way]),
            "all_seconds": seconds[way],
            "ratios": [mine / its for mine, its in zip(seconds[way], seconds[first], strict=True)],
            "bytes_per_parameter": one.bytes_per_parameter,
            "peak_rss": one.peak_nbytes,
            "loss": one.loss,
            "run": asdict(one),
        }


def findings_of(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> Findings:
    """Show them, and hold them against their limits."""
    verdicts = []
    for row in rows:
        target = TARGETS.get((row["update"], row["beside"]))
        if target is not None:
            verdicts.append(f"{row['tokens']} tokens: {target.verdict(row['ratios'])}")
    return Findings(
        title="A training step by turns; medians of the turns, and their range",
        rows=rows,
        columns=[
            Column("tokens", "tokens"),
            Column("update", "update"),
            Column("all_seconds", "seconds", spread),
            Column("ratios", "times the first's", spread),
            Column("bytes_per_parameter", "B per parameter", "{:.1f}".format),
            Column("peak_rss", "peak memory", format_size),
            Column("loss", "loss", "{:.6f}".format),
        ],
        verdicts=verdicts,
        options=asked(options),
    )


if __name__ == "__main__":
    main()

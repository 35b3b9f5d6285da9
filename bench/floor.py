"""Infinity against the floor of a step, T* = max(compute, R/B_read, W/B_write, (R+W)/B_mixed).

    python -m infinity.bench.floor --nvme DIR --json bench/results/floor-269m.json

compute is the same model's forward and backward alone, in memory, at the same tokens: *the update's kernel is
not counted in it*, nor is anything else that offloading does. R and W are the bytes that the Infinity run
itself read and wrote per step, by /proc/self/io. B is fio's, right before and right after that run, averaged:
reading alone, writing alone, and mixed as the run mixes them (before a contestant's first run: as the design
does). A disk's speed drifts, so rounds alternate, and what counts is the median of the ratios of rounds.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infinity.bench.fio import Bandwidth, Fio, mean, read_percent
from infinity.bench.runs import (
    OWN,
    SETTLING,
    SHAPES,
    STATE_DTYPES,
    UPDATES,
    Measured,
    Model,
    RunError,
    folder_on,
    here,
    machine,
    measure,
    save,
    settings_of,
    words,
)
from infinity.bench.targets import Target
from infinity.sizes import format_size, parse_size

LIMIT = 0.85


@dataclass(frozen=True, slots=True)
class Terms:
    """The seconds that each part of a step takes at least, were it alone."""

    compute: float
    read: float
    write: float
    mixed: float

    @property
    def floor_s(self) -> float:
        """T*: with perfect overlap the slowest part is all that shows."""
        return max(self.compute, self.read, self.write, self.mixed)

    @property
    def binding(self) -> str:
        """The name of the slowest part."""
        parts = asdict(self)
        return max(parts, key=lambda name: float(parts[name]))


def terms(compute_s: float, read_nbytes: float, written_nbytes: float, disk: Bandwidth) -> Terms:
    """Return the terms of T* for a step that computes so long and moves so many bytes."""
    return Terms(
        compute=compute_s,
        read=read_nbytes / disk.read,
        write=written_nbytes / disk.write,
        mixed=(read_nbytes + written_nbytes) / disk.mixed,
    )


@dataclass(frozen=True, slots=True)
class Case:
    """What is held against the floor."""

    tokens: int
    update: str
    state_dtype: str

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.update}, {self.state_dtype} state"


@dataclass(frozen=True, slots=True)
class Round:
    """One run of a case, and what fio and the computing alone took around it."""

    run: Measured
    compute_s: float
    before: Bandwidth
    after: Bandwidth

    @property
    def disk(self) -> Bandwidth:
        """The bandwidths that count for this run."""
        return mean(self.before, self.after)

    @property
    def terms(self) -> Terms:
        """The terms of this round's floor."""
        run = self.run
        read, written = run.read_per_parameter, run.written_per_parameter
        return terms(self.compute_s, read * run.parameters, written * run.parameters, self.disk)

    @property
    def ratio(self) -> float:
        """The floor over the step: 1 where nothing is left to gain but fewer bytes."""
        return self.terms.floor_s / self.run.seconds

    def record(self) -> dict[str, Any]:
        """Return all of it for the JSON."""
        found = {"terms_s": self.terms, "floor_s": self.terms.floor_s, "binding": self.terms.binding}
        return {**found, "ratio": self.ratio, **asdict(self)}


def one_round(
    options: argparse.Namespace, fio: Fio, folder: Path, console: Console, found: dict[Case, list[Round]]
) -> None:
    """Run every case once, and the computing alone once for each number of tokens."""
    for tokens in options.tokens:
        model = Model(options.model, tokens, options.steps)
        with console.status(f"{tokens} tokens: forward and backward alone"):
            compute = measure(OWN, "forward_backward", model, folder, {})
        for case in (Case(tokens, way, state) for way in UPDATES for state in options.state_dtype):
            rounds = found.setdefault(case, [])
            before = rounds[-1].run if rounds else None
            title = f"round {len(rounds) + 1} of {options.rounds}: {case}"
            settings = settings_of(options.host_memory, case.update, case.state_dtype)
            with console.status(title):
                first = fio.measure(mix(before))
                run = measure(OWN, "infinity", model, folder, settings)
                second = fio.measure(mix(run))
            rounds.append(Round(run, compute.seconds, first, second))
            now = rounds[-1]
            console.print(f"{title}: {run.seconds:.2f} s per step, floor {now.terms.floor_s:.2f} s")


def mix(run: Measured | None) -> int:
    """Return fio's percentage of reads for a run; None: as the design has it."""
    return (
        read_percent(0, 0) if run is None else read_percent(run.read_per_parameter, run.written_per_parameter)
    )


def table(found: dict[Case, list[Round]]) -> Table:
    """Lay the cases beside their floors, each the median of its rounds."""
    lines = Table(title="Per step; medians of the rounds")
    lines.add_column("tokens", justify="right")
    for heading in ("update", "state"):
        lines.add_column(heading)
    for heading in (
        "seconds",
        "T*, seconds",
        "bound by",
        "T* / step",
        "B per parameter",
        "fio r / w / mixed, GB/s",
    ):
        lines.add_column(heading, justify="right")
    for case, rounds in found.items():
        runs = [one.run for one in rounds]
        disk = [
            statistics.median(getattr(one.disk, part) for one in rounds)
            for part in ("read", "write", "mixed")
        ]
        ratios = [one.ratio for one in rounds]
        lines.add_row(
            str(case.tokens),
            case.update,
            case.state_dtype,
            f"{statistics.median(run.seconds for run in runs):.2f}",
            f"{statistics.median(one.terms.floor_s for one in rounds):.2f}",
            statistics.mode(one.terms.binding for one in rounds),
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            f"{statistics.median(run.bytes_per_parameter for run in runs):.1f}",
            " / ".join(f"{rate / 1e9:.2f}" for rate in disk),
        )
    return lines


def verdicts(found: dict[Case, list[Round]]) -> list[str]:
    """Return a line per case: is the step as close to its floor as it has to be."""
    return [
        Target("≥", LIMIT, f"T* / step, {case}").verdict([one.ratio for one in rounds])
        for case, rounds in found.items()
    ]


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m infinity.bench.floor", description="Infinity against the floor of a step"
    )
    parser.add_argument(
        "--nvme", type=Path, required=True, metavar="DIR", help="a folder on the disk to measure"
    )
    parser.add_argument("--model", choices=SHAPES, default="269m")
    parser.add_argument("--host-memory", default="512MiB", metavar="SIZE")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[64, 512], help="of the one sequence in a step"
    )
    parser.add_argument("--state-dtype", nargs="+", choices=STATE_DTYPES, default=["fp32"])
    parser.add_argument("--steps", type=int, default=6, help=f"per run; the first {SETTLING} are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fio-seconds", type=int, default=4, help="of each of fio's three measurements")
    parser.add_argument("--fio-size", type=parse_size, default="2GiB", metavar="SIZE", help="of fio's file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    options = parser.parse_args(arguments)
    if options.steps <= SETTLING or options.rounds < 1 or options.fio_seconds < 1:
        parser.error(f"--steps has to exceed {SETTLING}, --rounds and --fio-seconds have to be at least 1")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run the rounds; print table and verdicts, write the record."""
    options = options_of(arguments)
    console = Console()
    found: dict[Case, list[Round]] = {}
    with folder_on(options.nvme) as folder:
        facts, about = machine(folder), here()
        try:
            fio = Fio.on(folder, options.fio_size, options.fio_seconds)
            for _ in range(options.rounds):
                one_round(options, fio, folder, console, found)
        except RunError as error:
            raise SystemExit(str(error)) from error
    console.print(table(found))
    console.print("\n".join(verdicts(found)), highlight=False)
    console.print(
        "T* counts the computing of forward and backward alone, not the update's. "
        f"fio: {fio.engine}, {format_size(fio.nbytes)}"
    )
    console.print(words(facts))
    console.print(words(about))
    if options.json:
        chosen = {key: value for key, value in vars(options).items() if key not in ("nvme", "json")}
        cases = [
            {**asdict(case), "rounds": [one.record() for one in rounds]} for case, rounds in found.items()
        ]
        record = {"about": about, "machine": facts, "options": chosen, "fio_engine": fio.engine}
        save(options.json, {**record, "verdicts": verdicts(found), "cases": cases})


if __name__ == "__main__":
    main()

"""`infinity bench tiles`: memory and time of operators in tiles, beside whole operators and DeepSpeed's
tiles.

    infinity bench tiles --kind loss --hidden 1024 --tokens 4096 --vocabulary 128256 --tiles 16
    infinity bench tiles --kind mlp --sweep tokens=512,2048,8192 --venv DIR --json mlp.json --plot mlp.png

Each contestant is a process that stays alive; in each round every contestant takes one step, in turn. Seconds
are medians; the peak is the largest growth of the process's memory in a step, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from rich.console import Console

from infinity.bench.arguments import size_of
from infinity.bench.engine.runs import Environment, RunError
from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, report
from infinity.bench.tiling import tile_worker
from infinity.errors import ConfigError
from infinity.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HELP = "peak memory and time of operators in tiles, beside the whole ones and DeepSpeed's"
KEYS = ("tiles", "hidden", "tokens", "vocabulary")
_DEEPSPEED = ("linear", "mlp", "loss")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinity bench tiles`."""
    add = parser.add_argument
    what = "weight tiles of a linear layer, sequence tiles of an MLP, the loss, or micro-batches (mlp)"
    add("--kind", choices=tuple(tile_worker.KINDS), default="mlp", help=what)
    for name, default, told in (
        ("tiles", 8, "tiles, or micro-batches"),
        ("hidden", 512, "width of the input"),
        ("tokens", 2048, "in the sequence, or, of micro-batches, in each"),
        ("vocabulary", 32000, "of the loss"),
        ("rounds", 5, "steps of each contestant"),
    ):
        add(f"--{name}", type=int, default=default, metavar="N", help=f"{told} ({default})")
    add("--dtype", choices=tuple(tile_worker.DTYPES), default="bf16", help="of weights and inputs")
    add("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="of torch")
    sweep = f"measure for each value: {', '.join(KEYS)}"
    add("--sweep", type=_sweep, default=("tiles", ()), metavar="KEY=A,B,...", help=sweep)
    add("--venv", type=Path, metavar="DIR", help="a virtual environment with DeepSpeed, to race against")
    budget = "show each contestant's largest value of the sweep whose peak fits"
    add("--within", type=size_of, metavar="SIZE", help=budget)
    add_outputs(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure and report.

    Raises: ConfigError for numbers below 1; RunError for a contestant that fails.
    """
    check_outputs(options)
    least = min(*(getattr(options, key) for key in KEYS), options.rounds, options.threads)
    if least < 1:
        raise ConfigError(
            f"--tiles, --hidden, --tokens, --vocabulary, --rounds, --threads: {least}, expected 1 or more"
        )
    rows: list[dict[str, Any]] = []
    for case in cases(options):
        with console.status(f"{case['kind']}, {', '.join(f'{key} {case[key]}' for key in KEYS)}"):
            rows += race(case, contestants(options), options.rounds)
    findings = findings_of(rows, options)
    report(findings, options, console)
    return 0


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the cases to measure."""
    name, values = options.sweep
    for value in values or (getattr(options, name),):
        case = {key: getattr(options, key) for key in (*KEYS, "kind", "dtype", "threads")}
        yield case | {name: value}


def contestants(options: argparse.Namespace) -> dict[str, Environment]:
    """Return the contestants' names and environments."""
    here = Environment(sys.executable)
    found = {"plain": here, "infinity": here}
    if options.venv is not None:
        if options.kind not in _DEEPSPEED:
            raise ConfigError(f"--venv: DeepSpeed has no tiles of the kind {options.kind}; leave it out")
        found["deepspeed"] = Environment.of_venv(options.venv)
    return found


def race(case: Mapping[str, Any], who: Mapping[str, Environment], rounds: int) -> list[dict[str, Any]]:
    """Let every contestant take one step per round; return a row for each."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in who}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker({**case, "who": name}, one)) for name, one in who.items()}
        for number in range(rounds):
            order = list(workers) if number % 2 == 0 else list(workers)[::-1]
            for name in order:
                taken[name].append(workers[name].step())
    plain = statistics.median(one["seconds"] for one in taken["plain"])
    rows = []
    for name, steps in taken.items():
        seconds = statistics.median(one["seconds"] for one in steps)
        peak = max(one["peak_nbytes"] for one in steps)
        rows.append(
            {**case, "who": name, "seconds": seconds, "peak_nbytes": peak, "of_plain": seconds / plain}
            | {"all_seconds": [one["seconds"] for one in steps]}
        )
    return rows


class Worker:
    """A contestant's process."""

    def __init__(self, case: Mapping[str, Any], environment: Environment) -> None:
        self._case = case
        self._process = subprocess.Popen(  # noqa: S603 - the caller's own Python
            [environment.python, *environment.options, str(Path(tile_worker.__file__)), json.dumps(case)],
            env={**os.environ, **environment.variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Worker:  # noqa: PYI034 - Self is of Python 3.11
        """Wait until the process is ready."""
        while self._line() != "ready\n":  # libraries may print first
            pass
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()

    def step(self) -> dict[str, float]:
        """Let it take a step; return its figures."""
        stdin: IO[str] = self._process.stdin  # type: ignore[assignment]
        with suppress(BrokenPipeError):  # it has exited: _line says why
            stdin.write("step\n")
            stdin.flush()
        found: dict[str, float] = json.loads(self._line())
        return found

    def _line(self) -> str:
        stdout: IO[str] = self._process.stdout  # type: ignore[assignment]
        line = stdout.readline()
        if not line:
            _, said = self._process.communicate()
            why = (said.strip().splitlines() or [_end(self._process.returncode)])[-1]
            raise RunError(f"{self._case['who']} of {dict(self._case)}: {why}")
        return line


def _end(code: int) -> str:
    """Describe the end of a process that printed no error."""
    if code == -signal.SIGKILL:
        return "killed (SIGKILL); likely memory ran out: all contestants hold theirs at the same time"
    return f"it ended with exit code {code} and printed no reason"


# Results


def findings_of(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> Findings:
    """Return the findings."""
    swept, _ = options.sweep
    keys = [key for key in KEYS if key != "vocabulary" or options.kind == "loss"]
    return Findings(
        title=f"{options.kind} in tiles, {options.dtype}, {options.threads} threads",
        rows=rows,
        columns=[
            *(Column(key, key) for key in keys),
            Column("who", "who"),
            Column("seconds", "seconds", "{:.3f}".format),
            Column("of_plain", "of plain", "{:.2f}".format),
            Column("peak_nbytes", "peak", format_size),
        ],
        verdicts=[*_limits(rows, options), *_within(rows, swept, options.within)],
        options=asked(options),
        draw=lambda axes: draw(axes, rows, swept),
    )


def _limits(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> Iterator[str]:
    """Yield the loss's memory and time beside their limits."""
    if options.kind != "loss":
        return
    for row in rows:
        if row["who"] == "infinity":
            itemsize = tile_worker.DTYPES[row["dtype"]].itemsize
            results = itemsize * (row["vocabulary"] + row["tokens"]) * row["hidden"]  # the gradients
            extra = max(0, row["peak_nbytes"] - results)
            logits = 4 * row["tokens"] * row["vocabulary"]
            yield (
                f"beyond its gradients {format_size(extra)}, {extra / logits:.3f} of the fp32 logits "
                f"(set for 128,256 words: {1 / 16:.3f}); {row['of_plain']:.2f} times plain (1.15)"
            )


def _within(rows: Sequence[Mapping[str, Any]], swept: str, most: int | None) -> Iterator[str]:
    if most is None:
        return
    for who, own in itertools.groupby(sorted(rows, key=lambda row: row["who"]), lambda row: row["who"]):
        fits = [row[swept] for row in own if row["peak_nbytes"] <= most]
        yield f"{who}: {swept} up to {max(fits) if fits else 'none of these'} within {format_size(most)}"


def draw(axes: Axes, rows: Sequence[Mapping[str, Any]], swept: str) -> None:
    """Draw peaks over the swept key, a line per contestant, and seconds, dashed, on an axis of their own."""
    beside = axes.twinx()
    for number, who in enumerate(dict.fromkeys(row["who"] for row in rows)):
        own = [row for row in rows if row["who"] == who]
        x = [row[swept] for row in own]
        axes.plot(x, [row["peak_nbytes"] / 2**20 for row in own], marker="o", color=f"C{number}", label=who)
        beside.plot(x, [row["seconds"] for row in own], "--", marker=".", color=f"C{number}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel=swept, ylabel="peak of a step, MiB")
    beside.set(ylabel="seconds (dashed)")
    beside.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7)


# Types of arguments


def _sweep(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, values = text.partition("=")
    numbers = values.split(",")
    if name not in KEYS or not all(one.isdecimal() and int(one) > 0 for one in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=A,B,... with a KEY of {', '.join(KEYS)}")
    return name, tuple(map(int, numbers))

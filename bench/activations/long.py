"""`infinity bench long`: the longest sequence that trains within so much memory, beside plain PyTorch.

    infinity bench long --nvme DIR --within 2GiB --most 16384 --json long.json --plot long.png
    infinity bench long --nvme DIR --who infinity --model 25m --vocabulary 256 --tokens 65536 --steps 1

For each contestant the length is doubled until the peak of its process is above the budget, and what is
between is halved twice; the longest that was seen to fit is told. Each length has a process of its own, one
after another; see long_worker.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from infinity.bench.activations import long_worker
from infinity.bench.arguments import positive, some_size
from infinity.bench.engine.runs import SHAPES, Environment, RunError, folder_on
from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, report
from infinity.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HELP = "the longest sequence within a budget of memory, beside plain PyTorch and its checkpoints"
GOAL = 8
"""Times as long as with plain checkpoints, at least."""
_REFINED = 2
"""Halvings of the last doubling."""
_NOT_HERE = (
    "deepspeed: not measured, as it is not installed here: --venv DIR names an environment that has it"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinity bench long`."""
    add = parser.add_argument
    folder = "a folder on the drive that our contestant streams from"
    add("--nvme", type=Path, required=True, metavar="DIR", help=folder)
    add("--within", type=some_size, default=2 << 30, metavar="SIZE", help="of each contestant (2GiB)")
    add("--model", choices=tuple(SHAPES), default="1m", help="a shape of Llama (1m)")
    words = "words of the model's vocabulary (128256, as Llama 3's)"
    add("--vocabulary", type=positive, default=128_256, metavar="N", help=words)
    who = f"of {', '.join(long_worker.CONTESTANTS)} (all)"
    add("--who", type=_names, default=tuple(long_worker.CONTESTANTS), metavar="A,B,...", help=who)
    add("--tokens", type=positive, metavar="N", help="measure this length alone")
    add("--least", type=positive, default=256, metavar="N", help="tokens to begin with (256)")
    add("--most", type=positive, default=16_384, metavar="N", help="tokens to end with, if they fit (16384)")
    add("--steps", type=positive, default=2, metavar="N", help="of each length (2)")
    add("--threads", type=positive, default=os.cpu_count() or 1, metavar="N", help="of torch (all)")
    add("--venv", type=Path, metavar="DIR", help="a virtual environment with DeepSpeed, for its contestant")
    add_outputs(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure and report; returns 1 where ours is less than GOAL times as long as checkpoints alone.

    Raises: ConfigError for a folder that cannot be used; RunError for a contestant that fails.
    """
    check_outputs(options)
    rows: list[dict[str, Any]] = []
    for who in options.who:
        if who == "deepspeed" and options.venv is None:
            continue

        def measure(tokens: int, who: str = who) -> dict[str, Any]:
            with console.status(f"{who}, {tokens:,} tokens"):
                row = measured(who, tokens, options)
            if not console.is_terminal:
                said = f"{who}, {tokens:,} tokens: {_peak(row['peak_nbytes'])}"
                console.print(said, highlight=False)
            return row

        if options.tokens:
            rows.append(measure(options.tokens))
        else:
            rows += search(measure, options.least, options.most)
    report(findings_of(rows, options), options, console)
    times = times_as_long(rows)
    return 0 if times is None or times >= GOAL else 1


def search(measure: Callable[[int], dict[str, Any]], least: int, most: int) -> Iterator[dict[str, Any]]:
    """Yield what is measured of lengths from `least` on, doubled until one does not fit, or is `most`; and of
    lengths between the longest that fits and the shortest that does not.
    """
    fits, tokens = 0, least
    while tokens <= most:
        row = measure(tokens)
        yield row
        if not row["fits"]:
            break
        fits, tokens = tokens, 2 * tokens
    if tokens > most or not fits:
        return
    for _ in range(_REFINED):
        middle = (fits + tokens) // 2
        row = measure(middle)
        yield row
        fits, tokens = (middle, tokens) if row["fits"] else (fits, middle)


def measured(who: str, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what one length of one contestant took; of a peer that fails, what it said.

    Raises: RunError where ours fails, with what it said.
    """
    environment = Environment.of_venv(options.venv) if who == "deepspeed" else Environment(sys.executable)
    shape = {**SHAPES[options.model], "vocab_size": options.vocabulary}
    with folder_on(options.nvme) as folder:
        case = {
            "who": who,
            "shape": shape,
            "tokens": tokens,
            "steps": options.steps,
            "within": options.within,
            "threads": options.threads,
            "nvme": str(folder),
        }
        code, said = environment.run([str(Path(long_worker.__file__)), json.dumps(case)])
    lines = said.strip().splitlines() or ["it printed nothing"]
    if code:
        said = f"{who} with {tokens:,} tokens ended with exit code {code}: {lines[-1]}"
        if who == "infinity":
            raise RunError(said)
        nothing: dict[str, Any] = {"losses": [], "seconds": [], "peak_nbytes": None, "step_s": None}
        return {"who": who, "tokens": tokens, "fits": False, "refused": said, **nothing}
    found: dict[str, Any] = json.loads(lines[-1])
    fits = found["refused"] is None and found["peak_nbytes"] <= options.within
    seconds = found["seconds"][-1] if found["seconds"] else None
    return {"who": who, "tokens": tokens, "fits": fits, **found, "step_s": seconds}


# Results


def longest(rows: Sequence[Mapping[str, Any]], who: str) -> int:
    """Return the tokens of a contestant's longest sequence that fits; 0 for none."""
    return max((row["tokens"] for row in rows if row["who"] == who and row["fits"]), default=0)


def times_as_long(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return how many times as long ours is as that of checkpoints alone; None where one of them lacks."""
    ours, theirs = longest(rows, "infinity"), longest(rows, "checkpointed")
    return ours / theirs if ours and theirs else None


def findings_of(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> Findings:
    """Return the findings."""
    shown = [{**row, "fits_word": "yes" if row["fits"] else "no"} for row in rows]
    within = format_size(options.within)
    verdicts = []
    for who in dict.fromkeys(row["who"] for row in rows):
        tokens = longest(rows, who)
        own = [row for row in rows if row["who"] == who]
        all_fit = all(row["fits"] for row in own)
        failed = None if who == "infinity" or tokens else own[-1].get("refused")
        if failed is not None:
            verdicts.append(failed)
            continue
        verdicts.append(
            f"{who}: {tokens:,} tokens within {within}{', and no more were tried' if all_fit else ''}"
        )
    if "deepspeed" in options.who and options.venv is None:
        verdicts.append(_NOT_HERE)
    times = times_as_long(rows)
    if times is not None:
        mark = "at least " if all(row["fits"] for row in rows if row["who"] == "infinity") else ""
        verdicts.append(f"infinity: {mark}{times:.1f} times as long as checkpointed (goal: {GOAL})")
    return Findings(
        title=f"Llama {options.model}, {options.vocabulary:,} words, bf16, one sequence",
        rows=shown,
        columns=[
            Column("who", "who"),
            Column("tokens", "tokens", "{:,}".format),
            Column("peak_nbytes", "peak", _peak),
            Column("fits_word", f"within {within}"),
            Column("step_s", "seconds a step", lambda value: "" if value is None else f"{value:.1f}"),
        ],
        verdicts=verdicts,
        options=asked(options),
        draw=lambda axes: draw(axes, rows, options.within),
    )


def draw(axes: Axes, rows: Sequence[Mapping[str, Any]], within: int) -> None:
    """Draw peaks over lengths, a line per contestant, and the budget."""
    for who in dict.fromkeys(row["who"] for row in rows):
        own = sorted(
            (row["tokens"], row["peak_nbytes"] / 2**20)
            for row in rows
            if row["who"] == who and row["peak_nbytes"]
        )
        axes.plot([at for at, _ in own], [peak for _, peak in own], marker="o", label=who)
    axes.axhline(within / 2**20, linestyle="--", color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="tokens of a sequence", ylabel="peak of the process, MiB")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7)


def _peak(nbytes: int | None) -> str:
    return "it failed" if nbytes is None else format_size(nbytes)


# Types of arguments


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(long_worker.CONTESTANTS):
        known = ", ".join(long_worker.CONTESTANTS)
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {known}")
    return names

"""`infinity bench step`: whole training steps of a Llama, beside the floor T* and other frameworks.

    infinity bench step --nvme DIR --model 269m --host-memory 512MiB 2GiB all --state-dtype fp32 int8 \
        --tokens 64 512 --peer torch --peer deepspeed --venv DIR --json step.json

Every contestant trains in a new process. Contestants run in turn, in rounds, because a disk's speed drifts by
half within minutes: results are medians of the ratios within rounds. Ways to update differ by less than the
disk does from one run to the next: engine/alternating.py compares those, by turns of a few steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from infinity.bench.arguments import positive, size_of
from infinity.bench.engine import rival
from infinity.bench.engine.cases import ALL, EQUAL, PEERS, Case, cases, chosen
from infinity.bench.engine.floor import Gauge, Round, gauge_on, mix
from infinity.bench.engine.runs import (
    OWN,
    SETTLING,
    SHAPES,
    STATE_DTYPES,
    UPDATES,
    Environment,
    Model,
    folder_on,
    measure,
    parameter_count,
)
from infinity.bench.findings import (
    Column,
    Findings,
    add_outputs,
    asked,
    check_outputs,
    report,
    write_unfinished,
)
from infinity.bench.planning import cores
from infinity.bench.targets import Target
from infinity.errors import ConfigError
from infinity.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HELP = "whole training steps beside their floor, DeepSpeed and plain PyTorch"
NEAR = 0.9
"""Of the floor, that a step reaches at least."""
Found = dict[Case, list[Round]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinity bench step`."""
    add = parser.add_argument
    add("--nvme", type=Path, default=Path(), metavar="DIR", help="a folder on the disk to measure (this one)")
    add("--model", choices=SHAPES, default="269m", metavar="NAME", help=f"{', '.join(SHAPES)}; 269m")
    budget = f'budgets of Infinity: sizes, "{ALL}", "{EQUAL}" (its run\'s memory); 512MiB'
    add("--host-memory", nargs="+", type=_budget, default=["512MiB"], metavar="SIZE", help=budget)
    add("--state-dtype", nargs="+", choices=STATE_DTYPES, default=["fp32"], help="of moments; fp32")
    add("--update", nargs="+", choices=UPDATES, default=["backward"], help="when weights change; backward")
    add("--tokens", nargs="+", type=positive, default=[256], metavar="N", help="of a sequence; 256")
    peer = "run beside: deepspeed, torch (in memory; with its own step and with our kernels); may be repeated"
    add("--peer", action="append", choices=PEERS, default=[], help=peer)
    add("--venv", type=Path, metavar="DIR", help="the virtual environment that has DeepSpeed")
    add_outputs(parser)
    add = parser.add_argument_group("advanced").add_argument
    batches = "sequences in a step, each a micro-batch: tiles of ours, accumulated by the others; 1"
    add("--micro-batches", type=positive, default=1, metavar="N", help=batches)
    steps = f"per run, of which the first {SETTLING} are not counted; 6"
    add("--steps", type=positive, default=6, metavar="N", help=steps)
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each, in turn; 3")
    only = "run the contestants whose names contain one of these, ignoring case; all"
    add("--only", nargs="+", default=[], metavar="TEXT", help=only)
    seconds = "of each of the measurements of the disk around a run; 4"
    add("--disk-seconds", type=positive, default=4, metavar="N", help=seconds)
    size = "of the file to measure with, at most a quarter of what is free; 2GiB"
    add("--disk-size", type=size_of, default=2 << 30, metavar="SIZE", help=size)


def run(options: argparse.Namespace, console: Console) -> int:
    """Check the options, run the cases, and report.

    Raises: ConfigError; RunError if a contestant fails; OSError, of a full disk for example.
    """
    check_outputs(options)
    if options.steps <= SETTLING:
        raise ConfigError(f"--steps {options.steps}: the first {SETTLING} are not counted. Ask for more.")
    of_ours = options.host_memory, options.update, options.state_dtype
    every = cases(options.tokens, *of_ours, options.peer, options.micro_batches)
    entries = chosen(every, options.only)
    beside = any(one.kind == "deepspeed" for one in entries)
    environment = rival.environment_of(options.venv, console) if beside else OWN
    with folder_on(options.nvme) as folder:
        with console.status("the disk"):
            gauge = gauge_on(folder, options.disk_size, options.disk_seconds)
        for found in race(options, entries, environment, gauge, folder, console):
            findings = findings_of(found, options, gauge.source)
            write_unfinished(findings, options, folder)
        report(findings, options, console, folder)
    return 0


def _budget(text: str) -> str:
    if text not in (ALL, EQUAL):
        size_of(text)
    return text


# Measuring


def race(
    options: argparse.Namespace,
    entries: Sequence[Case],
    environment: Environment,
    gauge: Gauge,
    folder: Path,
    console: Console,
) -> Iterator[Found]:
    """Run every case once per round; return what was found so far, after each of them. environment:
    DeepSpeed's.
    """
    found: Found = {one: [] for one in entries}
    runs = options.rounds * len(entries)
    for number in range(runs):
        case = entries[number % len(entries)]
        title = f"run {number + 1} of {runs}: {case.name}, {case.tokens} tokens"
        with console.status(title):
            found[case].append(one_run(options, case, found, environment, gauge, folder))
        seconds, took = found[case][-1].run.seconds, found[case][-1].run.peak_nbytes
        console.print(
            f"{title}: {seconds:.2f} s per step, {format_size(took)}", highlight=False, soft_wrap=True
        )
        if case is entries[-1]:
            yield found


def one_run(
    options: argparse.Namespace,
    case: Case,
    found: Found,
    environment: Environment,
    gauge: Gauge,
    folder: Path,
) -> Round:
    """Run one case. found: the rounds before it, and the earlier cases of this round."""
    model = Model(options.model, case.tokens, options.steps, options.micro_batches)
    peers = found.get(Case("deepspeed", case.tokens))
    rival_nbytes = peers[-1].run.peak_nbytes if peers else None
    settings = case.settings(options.model, rival_nbytes, options.micro_batches)
    if case.kind != "infinity":
        own = environment if case.kind == "deepspeed" else OWN
        result = measure(own, case.kind, model, folder, settings)
        if case.kind == "forward_backward":
            return Round(result, result.seconds)
        return Round(result, _computing(found, case))
    speed, before = _cores(found, case), gauge.measure(mix(found[case]))
    result = measure(OWN, case.kind, model, folder, settings)
    one = Round(result, _computing(found, case), before, cores=speed)
    return replace(one, after=gauge.measure(mix([one])))


def _computing(found: Found, case: Case) -> float:
    """Return the seconds of forward and backward alone, in this round."""
    return found[Case("forward_backward", case.tokens)][-1].run.seconds


def _cores(found: Found, case: Case) -> cores.Cores | None:
    """Measure the cores, with this round's figures of computing beside updates; None if that was not run."""
    if Case("beside_updates", case.tokens) not in found:
        return None
    beside = found[Case("beside_updates", case.tokens)][-1]
    computing = min(1.0, beside.compute_s / beside.run.seconds)
    seen = {name: beside.run.engine[name] for name in ("request_s", "asking", "computing_asked", "use_s")}
    working = min(1.0, beside.run.engine["working"])
    return replace(cores.cores(case.state_dtype), computing=computing, working=working, **seen)


# What was found


def quotients(found: Found, over: Case, under: Case) -> list[float]:
    """Return the seconds of `over` divided by those of `under`, by round; empty if either was not run."""
    if over not in found or under not in found:
        return []
    return [one.run.seconds / other.run.seconds for one, other in zip(found[over], found[under], strict=True)]


def base_of(found: Found, tokens: int) -> Case | None:
    """Return the case to compare with: DeepSpeed, else plain PyTorch, else None."""
    peers = (Case(kind, tokens) for kind in ("deepspeed", "plain"))
    return next((one for one in peers if one in found), None)


def row_of(model: str, case: Case, rounds: Sequence[Round], faster: Sequence[float]) -> dict[str, Any]:
    """Return a case's row: medians of its rounds, and the rounds themselves.

    faster: its speed relative to `base_of`, by round.
    """
    runs = [one.run for one in rounds]

    def median(values: Iterable[float]) -> float:
        return float(statistics.median(values))

    row: dict[str, Any] = {
        "contestant": case.name,
        "kind": case.kind,
        "model": model,
        "parameters": runs[0].parameters,
        "tokens": case.tokens,
        "seconds": median(one.seconds for one in runs),
        "all_seconds": [one.seconds for one in runs],
        "parts_s": [
            median(getattr(one, key) for one in runs) for key in ("forward_s", "backward_s", "step_s")
        ],
        "compute_s": median(one.compute_s for one in rounds),
        "read_nbytes": median(one.read_nbytes for one in runs),
        "written_nbytes": median(one.written_nbytes for one in runs),
        "bytes_per_parameter": median(one.bytes_per_parameter for one in runs),
        "peak_rss": median(one.peak_nbytes for one in runs),
        "loss": runs[-1].loss,
        "times_as_fast": list(faster) or None,
        "rounds": [asdict(one) for one in rounds],
    }
    if case.kind == "infinity":
        row |= {
            "budget": case.budget,
            "host_memory": median(one.engine["budget_nbytes"] for one in runs),
            "state_dtype": case.state_dtype,
            "max_norm": UPDATES[case.update].get("max_norm"),
            "update": UPDATES[case.update]["update"],
            "embeddings": "rows",
            "resident": all(one.engine["nvme_nbytes"] == 0 for one in runs),
            "io_engine": runs[-1].engine["io_engine"],
            "floor_s": median(one.terms.floor_s for one in rounds),
            "binding": statistics.mode(one.terms.binding for one in rounds),
            "ratio": median(one.ratio for one in rounds),
            "ratios": [one.ratio for one in rounds],
            "own_floor_s": median(one.own_floor_s for one in rounds),
            "own_ratios": [one.own_ratio for one in rounds],
            "disk": _medians([one.disk for one in rounds]),
            "own_disk": _medians([one.own_disk for one in rounds]),
            "cores": _medians([one.cores for one in rounds]),
        }
    return row


def _medians(rates: Sequence[Any]) -> dict[str, float] | None:
    """Return the medians of the figures around the runs; None if there are none."""
    known = [asdict(one) for one in rates if one is not None]
    if not known:
        return None
    return {part: statistics.median(one[part] for one in known) for part in known[0]}


def spread(values: Sequence[float]) -> str:
    """Format the median and, for several values, the range."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def findings_of(found: Found, options: argparse.Namespace, source: str) -> Findings:
    """Return the findings. source: how the disk was measured."""
    rows = []
    for case, rounds in found.items():
        base = base_of(found, case.tokens)
        faster = [] if base is None or base == case else quotients(found, base, case)
        rows.append(row_of(options.model, case, rounds, faster))
    columns = [
        Column("contestant", "contestant"),
        Column("tokens", "tokens"),
        Column("all_seconds", "seconds", spread),
        Column("floor_s", "T*, seconds", "{:.2f}".format),
        Column("binding", "bound by"),
        Column("ratios", "T* / step", spread),
        Column("own_ratios", "the same by our engine", spread),
        Column("bytes_per_parameter", "B per parameter", "{:.1f}".format),
        Column("disk", "disk, GB/s: r / w / mixed", _rates),
        Column("own_disk", "by our engine", _rates),
        Column("peak_rss", "peak memory", format_size),
        Column("loss", "loss", "{:.3f}".format),
    ]
    base = base_of(found, options.tokens[0])
    if base is not None:
        columns.append(Column("times_as_fast", f"times as fast as {base.name}", spread))
    if not any(row.get("disk") for row in rows):
        columns = [one for one in columns if one.key not in ("disk", "own_disk", "own_ratios")]
    micro_batches = f"one sequence in each of {options.micro_batches} micro-batches, recomputed"
    said = [
        *verdicts(found, options),
        f"Llama of {parameter_count(options.model) / 1e6:.1f} M parameters, bf16, {micro_batches}",
        f"disk: {source}. T* counts the computing of forward and backward alone, not the update's.",
    ]
    settings: dict[str, Any] = {}
    if "deepspeed" in options.peer:
        settings["deepspeed_settings"] = rival.settings(options.model, options.micro_batches)
    return Findings(
        title="A training step; medians of the rounds, and their range",
        rows=rows,
        columns=columns,
        verdicts=said,
        options={**asked(options), **settings, "disk_measured_by": source},
        draw=lambda axes: draw(axes, rows),
    )


def _rates(disk: Mapping[str, float]) -> str:
    return " / ".join(f"{disk[part] / 1e9:.2f}" for part in ("read", "write", "mixed"))


def verdicts(found: Found, options: argparse.Namespace) -> list[str]:
    """Return a line per measured target; the targets beside peers were set for 269m at 512 MiB."""
    lines = []
    for tokens in options.tokens:
        lines += [f"{tokens} tokens: {line}" for line in _beside_others(found, options, tokens)]
    for case, rounds in found.items():
        if case.kind == "infinity" and case.budget not in (ALL, EQUAL):
            what = f"T* / step, {case.name}, {case.tokens} tokens"
            lines.append(Target("≥", NEAR, what).verdict([one.ratio for one in rounds]))
    return lines


def _beside_others(found: Found, options: argparse.Namespace, tokens: int) -> list[str]:
    peer, plain, kernels = (Case(kind, tokens) for kind in ("deepspeed", "plain", "plain_kernels"))

    def ours(budget: str, state_dtype: str = "fp32", update: str = "backward") -> Case:
        return Case("infinity", tokens, budget, update, state_dtype)

    small = next((one for one in options.host_memory if one not in (ALL, EQUAL)), "")
    within = ours(small, update="foreseen")
    rows = [
        (Target("≥", 1.4, f"times as fast as DeepSpeed, {small}, exact state"), peer, ours(small)),
        (Target("≥", 2.5, f"times as fast as DeepSpeed, {small}, int8 state"), peer, ours(small, "int8")),
        (Target("≥", 4, "times as fast as DeepSpeed in its memory"), peer, ours(EQUAL)),
        (Target("≤", 1.15, "times PyTorch's step in DeepSpeed's memory"), ours(EQUAL), plain),
        (Target("≤", 1.05, "times PyTorch's step, same kernels, all in memory"), ours(ALL), kernels),
        (Target("≥", 2, f"times as fast as DeepSpeed, {small}, no norm exceeds its bound"), peer, within),
    ]
    if options.micro_batches > 1:
        many = f"times as fast as DeepSpeed, {small}, exact state, {options.micro_batches} micro-batches"
        rows = [(Target("≥", 2.3, many), peer, ours(small))]
    measured = ((target, quotients(found, over, under)) for target, over, under in rows)
    return [target.verdict(values) for target, values in measured if values]


def draw(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw each case's seconds as a bar, with a mark at its floor."""
    names = [f"{row['contestant']}, {row['tokens']} tokens" for row in rows]
    axes.barh(names, [row["seconds"] for row in rows], color="C0", alpha=0.7)
    floors = [(row["floor_s"], name) for row, name in zip(rows, names, strict=True) if "floor_s" in row]
    if floors:
        axes.plot(*zip(*floors, strict=True), "k|", markersize=16, markeredgewidth=2, label="T*")
        axes.legend()
    axes.invert_yaxis()
    axes.set_xlabel("seconds per step")

"""`infinity bench experts`: which experts stay in memory, by Infinity's placement and by other policies; and
the bytes that steps of a small Mixtral move, with its experts one by one and whole.

    infinity bench experts --nvme DIR --json experts.json

Traces are drawn with a stated skew and drift; see routing. Belady's optimum, which knows the future, is the
limit of all policies, "odds known" in the mean that of those which do not know it, and "learnt" that of those
which have to learn how popular each expert is. Where libcachesim is installed, its Belady is shown, too.
--recorded adds traces of a model that was trained on text: see recorded.
The Mixtral is real: random weights, few tokens, everything on NVMe that the budget does not hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.arguments import positive, some_size
from infinity.bench.engine.runs import folder_on
from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, report
from infinity.bench.planning.caches import CACHES, followed
from infinity.bench.planning.library_caches import cached_by, is_installed
from infinity.bench.planning.recorded import recorded_runs
from infinity.bench.planning.routing import POLICIES, TRACES, PolicyResult, Run, compared

HELP = "which experts stay in memory, beside LRU, LFU and Belady's optimum; the bytes of a small Mixtral"
_SHARES = (8, 4, 2)
_LIBRARYS = "Belady, libcachesim"
_BOUND = "odds known"
_LEARNT = "learnt"
_ON_LINE = ("LRU", "LFU", *CACHES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinity bench experts`."""
    add = parser.add_argument
    add(
        "--nvme", type=Path, default=Path(), metavar="DIR", help="a folder for the Mixtral's state (this one)"
    )
    add("--experts", type=positive, default=128, metavar="N", help="in a trace; 128")
    add("--tokens", type=positive, default=32, metavar="N", help="that a step of a trace routes; 32")
    add("--steps", type=positive, default=240, metavar="N", help="of a trace; 240")
    add(
        "--seeds",
        type=positive,
        default=3,
        metavar="N",
        help="traces of each kind, of which means are shown; 3",
    )
    what = "traces that `python -m infinity.bench.planning.recorded --json FILE` has written"
    add("--recorded", type=Path, metavar="FILE", help=what)
    budget = "host_memory of the Mixtral; 2MiB"
    add("--host-memory", type=some_size, default=2 << 20, metavar="SIZE", help=budget)
    add_outputs(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Simulate, train, and report.

    Raises: OSError, of a full disk for example; ConfigError for a file that holds no traces.
    """
    check_outputs(options)
    with folder_on(options.nvme) as folder:
        with console.status("routing"):
            rows = list(simulated(options))
            if options.recorded is not None:
                rows += of_recorded(options.recorded)
        with console.status("training"):
            moved = {how: trained(how, folder, options.host_memory) for how in ("slices", "whole")}
        report(findings_of(rows, moved, options), options, console, folder)
    return 0


def simulated(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of trace and room: means over the seeds."""
    rooms = [max(options.experts // share, 1) for share in _SHARES]
    for kind in TRACES:
        runs = [
            kind.run(seed, options.steps, options.experts, options.tokens) for seed in range(options.seeds)
        ]
        for of_room in zip(*(compared(one, rooms, _policies()) for one in runs), strict=True):
            means = {key: sum(float(row[key]) for row in of_room) / len(of_room) for key in of_room[0]}
            room = int(means["room"])
            bounds = {f"{_BOUND} hits": kind.most_hits(options.experts, options.tokens, room)}
            if not kind.drift:
                sizes = options.steps, options.experts, options.tokens, room
                learnt = [kind.most_learnt(seed, *sizes) for seed in range(options.seeds)]
                bounds[f"{_LEARNT} hits"] = sum(learnt) / len(learnt)
            yield {"trace": kind.name, **means, **bounds}


def of_recorded(file: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each recorded trace and room.

    Raises: ConfigError for a file that holds none; OSError.
    """
    for name, run in recorded_runs(file).items():
        slices = len({one for step in run for one in step})
        for row in compared(run, [max(slices // share, 1) for share in _SHARES], _policies()):
            yield {"trace": name, "recorded": True, **row}


def _policies() -> Mapping[str, Callable[[Run, int], PolicyResult]]:
    librarys = {_LIBRARYS: partial(cached_by, "Belady")} if is_installed() else {}
    return {**POLICIES, **{name: partial(followed, name) for name in CACHES}, **librarys}


def trained(how: str, folder: str | Path, host_nbytes: int) -> dict[str, float]:
    """Train a Mixtral of 32 experts a layer on two tokens; return NVMe bytes per parameter and step, the
    share of the parameters that a step uses, and how many there are.
    """
    import torch
    import transformers

    import infinity

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, **heads, num_local_experts=32, num_experts_per_tok=1)
    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), host_memory=host_nbytes, experts=how):
        model = transformers.MixtralForCausalLM(config)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
    ids = torch.tensor([[3, 3]])
    steps, before = 4, infinity.stats(model)
    for step in range(2 * steps):
        if step == steps:
            before = infinity.stats(model)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    done = infinity.stats(model).since(before)
    used = sum(unit.numel for unit in done.units if unit.uses)
    return {
        "bytes": (done.nvme_read_nbytes + done.nvme_written_nbytes) / done.parameters / steps,
        "used": used / sum(unit.numel for unit in done.units),
        "parameters": done.parameters,
    }


def findings_of(
    rows: list[dict[str, Any]], moved: Mapping[str, Mapping[str, float]], options: argparse.Namespace
) -> Findings:
    """Return what was found, as a table and as lines below it."""

    def percent(value: Any) -> str:
        return f"{100 * value:.1f} %"

    drawn = [row for row in rows if f"{_BOUND} hits" in row]
    skewed = [row for row in drawn if row["trace"] != "even"]
    least, most = (
        min((row[f"{name} hits"] / row["Belady hits"] for row in skewed), default=0.0)
        for name in ("Infinity", _BOUND)
    )
    of_bound = min((row["Infinity hits"] / row[f"{_BOUND} hits"] for row in skewed), default=0.0)
    online = [max(row[f"{name} hits"] for name in _ON_LINE) - row["Infinity hits"] for row in rows]
    learnt = [
        f"{row['trace']}, room {row['room']:.0f}: {percent(row[f'{_LEARNT} hits'] / row['Belady hits'])}, "
        f"Infinity {percent(row['Infinity hits'] / row['Belady hits'])}"
        for row in skewed
        if f"{_LEARNT} hits" in row
    ]
    best = f"of the best that does not know what is drawn {percent(most)}, of which {percent(of_bound)}"
    lines = [
        f"hits beside Belady's, on skewed traces: at least {percent(least)}; {best}",
        f"hits below the best of {', '.join(_ON_LINE)}: at most {percent(max(0.0, *online))} of the uses",
        f"the most of Belady's hits that can be learnt, in the mean: {'; '.join(learnt)}",
    ]
    for how, of in moved.items():
        lines.append(
            f'a Mixtral of {of["parameters"] / 1e6:.1f} M parameters, experts="{how}": a step uses '
            f"{percent(of['used'])} of them and moves {of['bytes']:.2f} B per parameter"
        )
    return Findings(
        title=f"which of {options.experts} experts stay in memory, {options.tokens} tokens a step",
        rows=[*rows, *({"trace": f"Mixtral, {how}", "mixtral": dict(of)} for how, of in moved.items())],
        columns=[
            Column("trace", "routing"),
            Column("room", "room", lambda value: f"{value:.0f}"),
            *(Column(f"{name} hits", name, percent) for name in (*_policies(), _BOUND, _LEARNT)),
        ],
        verdicts=lines,
        options=asked(options),
    )

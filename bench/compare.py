"""Infinity against DeepSpeed's NVMe offload and plain PyTorch: one model, side by side in one run.

    python -m infinity.bench.compare --deepspeed-venv DIR --nvme DIR --json bench/results/compare-269m.json
    python -m infinity.bench.compare --nvme DIR --only "everything resident" "plain PyTorch"

DeepSpeed lives in a virtual environment of its own (torch, transformers, deepspeed and ninja; libaio's
headers and a compiler for what it compiles), with settings tuned for this model: see DEEPSPEED. Without it,
the others run and are held against plain PyTorch. Every contestant trains in a fresh process; rounds
alternate, because a disk's speed drifts by half within minutes, and what counts is the median of the ratios
within rounds. One Infinity contestant gets as budget what DeepSpeed's run took, in the same round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infinity.bench.runs import (
    OWN,
    SETTLING,
    SHAPES,
    Environment,
    Measured,
    Model,
    RunError,
    folder_on,
    here,
    machine,
    measure,
    parameter_count,
    save,
    settings_of,
    words,
)
from infinity.bench.targets import Target
from infinity.sizes import format_size

RIVAL, PLAIN, KERNELS, BOUND = (
    "DeepSpeed NVMe",
    "plain PyTorch",
    "plain PyTorch, same kernels",
    "forward and backward alone",
)
EQUAL, RESIDENT = "Infinity, DeepSpeed's memory", "Infinity, everything resident"
STATE_AND_GRADIENTS = 16
"""Bytes per parameter: 12 of exact state, and gradients at their widest."""
ROOM = 1 << 30
"""Bytes for transfers beside everything else: a budget with it can hold whatever asks for memory."""

DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "steps_per_print": 1_000_000,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "buffer_count": 40, "max_in_cpu": 0, "pin_memory": True},
        "offload_optimizer": {
            "device": "nvme",
            "buffer_count": 12,
            "pipeline_read": True,
            "pipeline_write": True,
            "pin_memory": True,
        },
        "sub_group_size": 10_000_000,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_max_live_parameters": 100_000_000,
        "reduce_bucket_size": 10_000_000,
    },
    "aio": {
        "block_size": 1 << 20,
        "queue_depth": 32,
        "single_submit": False,
        "overlap_events": True,
        "intra_op_parallelism": 1,
    },
}
"""Tuned here. `max_in_cpu` 0: by default a model of this size never reaches NVMe. Parameter buffers of the
largest parameter's size, and no reuse distance: with the defaults DeepSpeed 0.19 runs out of buffers in the
second step. With fewer than twelve optimizer buffers its pipelined step runs out of them. Larger groups than
these were no faster and took more memory; a block size above 1 MiB keeps what is smaller out of NVMe.
"""


def deepspeed_settings(shape: str) -> dict[str, Any]:
    """Return DEEPSPEED with buffers that hold the largest parameter of `shape`."""
    sizes = SHAPES[shape]
    widest = max(sizes["intermediate_size"], sizes["vocab_size"])
    zero = DEEPSPEED["zero_optimization"]
    parameters = {**zero["offload_param"], "buffer_size": widest * sizes["hidden_size"] + (1 << 18)}
    return {**DEEPSPEED, "zero_optimization": {**zero, "offload_param": parameters}}


@dataclass(frozen=True, slots=True)
class Contestant:
    """One line of the comparison: its name, the kind in contestant.py, and that kind's settings."""

    name: str
    kind: str
    settings: Mapping[str, Any]


def contestants(model: str, budget: str) -> list[Contestant]:
    """List all of them in the order of a round; EQUAL's budget is DeepSpeed's peak, known only then."""
    resident = STATE_AND_GRADIENTS * parameter_count(model) + ROOM
    return [
        Contestant(RIVAL, "deepspeed", deepspeed_settings(model)),
        Contestant(exact(budget), "infinity", settings_of(budget)),
        Contestant(
            f"Infinity, {budget}, forward, clipped", "infinity", settings_of(budget, "forward, clipped")
        ),
        Contestant(with_state(budget, "bf16"), "infinity", settings_of(budget, state_dtype="bf16")),
        Contestant(with_state(budget, "int8"), "infinity", settings_of(budget, state_dtype="int8")),
        Contestant(EQUAL, "infinity", settings_of(0)),
        Contestant(RESIDENT, "infinity", settings_of(resident)),
        Contestant(PLAIN, "plain", {}),
        Contestant(KERNELS, "plain_kernels", {}),
        Contestant(BOUND, "forward_backward", {}),
    ]


def exact(budget: str) -> str:
    """Name the contestant with exact state at the small budget."""
    return f"Infinity, {budget}, backward"


def with_state(budget: str, state_dtype: str) -> str:
    """Name the contestant with smaller moments at the small budget."""
    return f"Infinity, {budget}, {state_dtype} state"


def chosen(entries: Sequence[Contestant], only: Sequence[str], *, rival: bool) -> list[Contestant]:
    """Return the contestants whose names contain one of `only` (all, if it is empty).

    Without a `rival`, DeepSpeed and the contestant with its budget are left out, unless they are asked for.

    Raises: SystemExit for a text that no name contains, and for a contestant that cannot run as asked.
    """
    for text in only:
        if not any(text.lower() in one.name.lower() for one in entries):
            names = ", ".join(f'"{one.name}"' for one in entries)
            raise SystemExit(f"--only {text!r} is in no contestant's name. They are: {names}")
    if only:
        taken = [one for one in entries if any(text.lower() in one.name.lower() for text in only)]
    else:
        taken = [one for one in entries if rival or one.name not in (RIVAL, EQUAL)]
    names_taken = {one.name for one in taken}
    if RIVAL in names_taken and not rival:
        raise SystemExit(f'"{RIVAL}" needs --deepspeed-venv: a virtual environment with DeepSpeed')
    if EQUAL in names_taken and RIVAL not in names_taken:
        raise SystemExit(f'"{EQUAL}" gets the budget that DeepSpeed took: add "{RIVAL}" to --only')
    return taken


def race(
    options: argparse.Namespace,
    entries: Sequence[Contestant],
    rival: Environment | None,
    folder: Path,
    console: Console,
) -> dict[str, list[Measured]]:
    """Run every contestant once per round, in turn."""
    found: dict[str, list[Measured]] = {one.name: [] for one in entries}
    model = Model(options.model, options.tokens, options.steps)
    for number in range(options.rounds):
        for one in entries:
            settings = dict(one.settings)
            if one.name == EQUAL:
                settings["host_memory"] = found[RIVAL][-1].peak_nbytes
            environment = rival if one.name == RIVAL and rival is not None else OWN
            title = f"round {number + 1} of {options.rounds}: {one.name}"
            with console.status(title):
                run = measure(environment, one.kind, model, folder, settings)
            found[one.name].append(run)
            console.print(
                f"{title}: {run.seconds:.2f} s per step, {run.bytes_per_parameter:.1f} B per parameter"
            )
    return found


def quotients(found: dict[str, list[Measured]], over: str, under: str) -> list[float]:
    """Return the seconds of `over` divided by those of `under`, by round; empty if either was not run."""
    if over not in found or under not in found:
        return []
    return [one.seconds / other.seconds for one, other in zip(found[over], found[under], strict=True)]


def verdicts(found: dict[str, list[Measured]], budget: str) -> list[str]:
    """Return a line per target: they were set for 269m at 512 MiB."""
    small, int8 = exact(budget), with_state(budget, "int8")
    rows = [
        (Target("≥", 1.4, f"times as fast as DeepSpeed at {budget}, exact state"), RIVAL, small),
        (Target("≥", 2.5, f"times as fast as DeepSpeed at {budget}, int8 state"), RIVAL, int8),
        (Target("≥", 4, "times as fast as DeepSpeed in DeepSpeed's memory"), RIVAL, EQUAL),
        (Target("≤", 1.15, "times plain PyTorch's step in DeepSpeed's memory"), EQUAL, PLAIN),
        (
            Target("≤", 1.05, "times plain PyTorch's step, same kernels, everything resident"),
            RESIDENT,
            KERNELS,
        ),
    ]
    return [target.verdict(quotients(found, over, under)) for target, over, under in rows]


def ratios(found: dict[str, list[Measured]], of: str) -> dict[str, list[float]]:
    """Return for each contestant how many times as fast as `of` it was, by round; {} if `of` was not run."""
    return {name: quotients(found, of, name) for name in found if name != of and of in found}


def base_of(found: dict[str, list[Measured]]) -> str:
    """Return whom the table holds the others against: DeepSpeed, else plain PyTorch, else who came first."""
    return next((name for name in (RIVAL, PLAIN) if name in found), next(iter(found)))


def table(found: dict[str, list[Measured]]) -> Table:
    """Lay the contestants side by side, each the median of its rounds."""
    lines = Table(title="Per step; medians of the rounds, and their range")
    lines.add_column("contestant")
    for heading in ("seconds", "fwd / bwd / step", "read + written, B per parameter"):
        lines.add_column(heading, justify="right")
    base = base_of(found)
    for heading in ("GB/s", "peak memory", "loss", f"times as fast as {base}"):
        lines.add_column(heading, justify="right")
    faster = ratios(found, base)
    for name, runs in found.items():

        def median(key: str, runs: list[Measured] = runs) -> float:
            return float(statistics.median(getattr(run, key) for run in runs))

        parts = (f"{median(key):.2f}" for key in ("forward_s", "backward_s", "step_s"))
        read, written = median("read_per_parameter"), median("written_per_parameter")
        lines.add_row(
            name,
            spread([run.seconds for run in runs]),
            " / ".join(parts),
            f"{read:.1f} + {written:.1f} = {median('bytes_per_parameter'):.1f}",
            f"{median('bytes_per_s') / 1e9:.2f}",
            format_size(median("peak_nbytes")),
            f"{runs[-1].loss:.3f}",
            spread(faster[name]) if name in faster else "",
        )
    return lines


def spread(values: list[float]) -> str:
    """Return the median and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def check_rival(environment: Environment) -> None:
    """Stop, saying what to install, where DeepSpeed cannot be imported.

    Raises: SystemExit.
    """
    try:
        code, said = environment.run(["-c", "import deepspeed, transformers, ninja"])
    except OSError as error:
        code, said = 1, str(error)
    if code:
        why = (said.strip().splitlines() or ["no reason given"])[-1]
        raise SystemExit(
            f"{environment.python} cannot import deepspeed, transformers and ninja ({why}). "
            "Give --deepspeed-venv a virtual environment with them: in it, pip install torch numpy ninja "
            "transformers, and then pip install --no-build-isolation deepspeed"
        )


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m infinity.bench.compare", description="Infinity against DeepSpeed and plain PyTorch"
    )
    venv = "a virtual environment with deepspeed; without one, all but DeepSpeed run"
    parser.add_argument("--deepspeed-venv", type=Path, metavar="DIR", help=venv)
    parser.add_argument(
        "--nvme", type=Path, required=True, metavar="DIR", help="a folder on the disk to measure"
    )
    only = "contestants whose names contain one of these, whatever the case (default: all)"
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=only)
    parser.add_argument("--model", choices=SHAPES, default="269m")
    parser.add_argument("--host-memory", default="512MiB", metavar="SIZE", help="Infinity's small budget")
    parser.add_argument("--tokens", type=int, default=256, help="of the one sequence in a step")
    parser.add_argument("--steps", type=int, default=6, help=f"per run; the first {SETTLING} are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    options = parser.parse_args(arguments)
    if options.steps <= SETTLING or options.rounds < 1:
        parser.error(f"--steps has to exceed {SETTLING}, --rounds has to be at least 1")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run the rounds; print table and verdicts, write the record."""
    options = options_of(arguments)
    console = Console()
    rival = None if options.deepspeed_venv is None else Environment.of_venv(options.deepspeed_venv)
    every = contestants(options.model, options.host_memory)
    entries = chosen(every, options.only, rival=rival is not None)
    if rival is not None and any(one.name == RIVAL for one in entries):
        check_rival(rival)
    with folder_on(options.nvme) as folder:
        facts, about = machine(folder), here()
        try:
            found = race(options, entries, rival, folder, console)
        except RunError as error:
            raise SystemExit(str(error)) from error
    for runs in found.values():
        about = {**about, **runs[0].versions}
    judged = verdicts(found, options.host_memory)
    console.print(table(found))
    console.print("\n".join(judged), highlight=False)
    size = f"{parameter_count(options.model) / 1e6:.1f} M parameters"
    console.print(f"Llama of {size}, bf16, 1x{options.tokens} tokens, checkpointed")
    console.print(words(facts))
    console.print(words(about))
    if options.json:
        keys = ("model", "host_memory", "tokens", "steps", "rounds", "only")
        record = {
            "about": about,
            "machine": facts,
            "options": {key: getattr(options, key) for key in keys},
            "deepspeed_settings": deepspeed_settings(options.model),
            "times_as_fast_as_deepspeed": ratios(found, RIVAL),
            "times_as_fast_as_plain": ratios(found, PLAIN),
            "verdicts": judged,
            "runs": found,
        }
        save(options.json, record)


if __name__ == "__main__":
    main()

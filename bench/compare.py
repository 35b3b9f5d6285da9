"""Infinity against DeepSpeed's NVMe offload and plain PyTorch: one model, side by side in one run.

    python -m infinity.bench.compare --deepspeed-venv DIR --nvme DIR --json bench/results/compare-269m.json

DeepSpeed lives in a virtual environment of its own (torch, transformers, deepspeed and ninja; libaio's
headers and a compiler for what it compiles), with settings tuned for this model: see DEEPSPEED. Every
contestant trains in a fresh process; rounds alternate, because a disk's speed drifts by half within minutes,
and what counts is the median of the ratios within rounds. The last Infinity contestant gets as budget what
DeepSpeed's run took, in the same round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
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
    save,
    words,
)
from infinity.sizes import format_size

RIVAL, PLAIN, BOUND, EQUAL = (
    "DeepSpeed NVMe",
    "plain PyTorch",
    "forward and backward alone",
    "Infinity, DeepSpeed's memory",
)
MAX_NORM = 1.0

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


def contestants(options: argparse.Namespace, rival_nbytes: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name, kind, settings) of all but DeepSpeed, which ran first and took `rival_nbytes`."""
    budget = options.host_memory
    yield f"Infinity, {budget}, backward", "infinity", {"host_memory": budget, "update": "backward"}
    yield (
        f"Infinity, {budget}, forward, clipped",
        "infinity",
        {"host_memory": budget, "update": "forward", "max_norm": MAX_NORM},
    )
    yield EQUAL, "infinity", {"host_memory": rival_nbytes, "update": "backward"}
    yield PLAIN, "plain", {}
    yield BOUND, "forward_backward", {}


def race(
    options: argparse.Namespace, rival: Environment, folder: Path, console: Console
) -> dict[str, list[Measured]]:
    """Run every contestant once per round, in turn."""
    found: dict[str, list[Measured]] = {}

    def run(name: str, environment: Environment, kind: str, settings: dict[str, Any]) -> Measured:
        runs = found.setdefault(name, [])
        title = f"round {len(runs) + 1} of {options.rounds}: {name}"
        model = Model(options.model, options.tokens, options.steps)
        with console.status(title):
            one = measure(environment, kind, model, folder, settings)
        runs.append(one)
        console.print(f"{title}: {one.seconds:.2f} s per step, {one.bytes_per_parameter:.1f} B per parameter")
        return one

    for _ in range(options.rounds):
        first = run(RIVAL, rival, "deepspeed", deepspeed_settings(options.model))
        for name, kind, settings in contestants(options, first.peak_nbytes):
            run(name, OWN, kind, settings)
    return found


def ratios(found: dict[str, list[Measured]], of: str) -> dict[str, list[float]]:
    """Return for each contestant how many times as fast as `of` it was, by round."""
    return {
        name: [base.seconds / one.seconds for base, one in zip(found[of], runs, strict=True)]
        for name, runs in found.items()
        if name != of
    }


def table(found: dict[str, list[Measured]]) -> Table:
    """Lay the contestants side by side, each the median of its rounds."""
    lines = Table(title="Per step; medians of the rounds, and their range")
    lines.add_column("contestant")
    for heading in ("seconds", "fwd / bwd / step", "read + written, B per parameter"):
        lines.add_column(heading, justify="right")
    for heading in ("GB/s", "peak memory", "loss", "times as fast as DeepSpeed"):
        lines.add_column(heading, justify="right")
    faster = ratios(found, RIVAL)
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
    folder: dict[str, Any] = {"type": Path, "required": True, "metavar": "DIR"}
    parser.add_argument("--deepspeed-venv", **folder, help="a virtual environment with deepspeed")
    parser.add_argument("--nvme", **folder, help="a folder on the disk to measure")
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
    """Run the rounds; print the table, write the record."""
    options = options_of(arguments)
    console = Console()
    rival = Environment.of_venv(options.deepspeed_venv)
    check_rival(rival)
    with folder_on(options.nvme) as folder:
        facts = machine(folder)
        try:
            found = race(options, rival, folder, console)
        except RunError as error:
            raise SystemExit(str(error)) from error
    runs = found[RIVAL]
    about = {**here(), **runs[0].versions}
    console.print(table(found))
    size = f"{runs[0].parameters / 1e6:.1f} M parameters"
    console.print(f"Llama of {size}, bf16, 1x{options.tokens} tokens, checkpointed")
    console.print(words(facts))
    console.print(words(about))
    if options.json:
        chosen = {key: getattr(options, key) for key in ("model", "host_memory", "tokens", "steps", "rounds")}
        record = {
            "about": about,
            "machine": facts,
            "options": chosen,
            "deepspeed_settings": deepspeed_settings(options.model),
            "times_as_fast_as_deepspeed": ratios(found, RIVAL),
            "times_as_fast_as_plain": ratios(found, PLAIN),
            "runs": found,
        }
        save(options.json, record)


if __name__ == "__main__":
    main()

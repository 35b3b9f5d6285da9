"""Infinity against DeepSpeed's NVMe offload and plain PyTorch: the same model and tokens, side by side in one run.

    python -m infinity.bench.compare --deepspeed-venv DIR --nvme DIR --json bench/results/compare-269m.json

DeepSpeed lives in a virtual environment of its own (torch, transformers, deepspeed and ninja; libaio's headers and a compiler
for what it compiles), with settings tuned for this model: see DEEPSPEED. Every contestant trains in a fresh process; rounds
alternate, because a disk's speed drifts by half within minutes, and what counts is the median of the ratios within rounds. The
last Infinity contestant gets as budget what DeepSpeed's run took, in the same round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infinity.bench.runs import OWN, SETTLING, SHAPES, Environment, Measured, RunError, folder_on, here, machine, measure, save, words
from infinity.sizes import format_size

RIVAL, PLAIN, BOUND, EQUAL = "DeepSpeed NVMe", "plain PyTorch", "forward and backward alone", "Infinity, DeepSpeed's memory"
MAX_NORM = 1.0

DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "steps_per_print": 1_000_000,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "buffer_count": 12, "max_in_cpu": 0, "pin_memory": True},
        "offload_optimizer": {
            "device": "nvme",
            "buffer_count": 12,
            "pipeline_read": True,
            "pipeline_write": True,
            "pin_memory": True,
        },
        "sub_group_size": 20_000_000,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 100_000_000,
        "reduce_bucket_size": 10_000_000,
    },
    "aio": {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True, "intra_op_parallelism": 1},
}
"""Tuned here. `max_in_cpu` 0: by default a model of this size never reaches NVMe. Buffers of the largest parameter, and
no reuse or prefetch distance: with its defaults DeepSpeed 0.19 runs out of buffers in the second step, with more it asks for
one parameter twice. Twelve optimizer buffers are the fewest that read, update and write at the same time.
"""


def deepspeed_settings(shape: str) -> dict[str, Any]:
    """Return DEEPSPEED with buffers that hold the largest parameter of `shape`."""
    sizes = SHAPES[shape]
    largest = sizes["hidden_size"] * max(sizes["intermediate_size"], sizes["vocab_size"], sizes["hidden_size"])
    zero = DEEPSPEED["zero_optimization"]
    parameters = {**zero["offload_param"], "buffer_size": largest + (1 << 18)}
    return {**DEEPSPEED, "zero_optimization": {**zero, "offload_param": parameters}}


def contestants(options: argparse.Namespace, rival_nbytes: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name, kind, settings) of all but DeepSpeed, which ran first and took `rival_nbytes`."""
    budget = options.host_memory
    yield f"Infinity, {budget}, backward", "infinity", {"host_memory": budget, "update": "backward"}
    yield f"Infinity, {budget}, forward, clipped", "infinity", {"host_memory": budget, "update": "forward", "max_norm": MAX_NORM}
    yield EQUAL, "infinity", {"host_memory": rival_nbytes, "update": "backward"}
    yield PLAIN, "plain", {}
    yield BOUND, "forward_backward", {}


def race(options: argparse.Namespace, rival: Environment, folder: Path, console: Console) -> dict[str, list[Measured]]:
    """Run every contestant once per round, in turn."""
    found: dict[str, list[Measured]] = {}

    def run(name: str, environment: Environment, kind: str, settings: dict[str, Any]) -> Measured:
        with console.status(f"round {number} of {options.rounds}: {name}"):
            one = measure(
                environment, kind, options.model, folder, steps=options.steps, tokens=options.tokens, settings=settings
            )
        found.setdefault(name, []).append(one)
        console.print(f"round {number}: {name}: {one.seconds:.2f} s per step, {one.bytes_per_parameter:.1f} B per parameter")
        return one

    for number in range(1, options.rounds + 1):
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
    for heading in ("contestant", "seconds", "fwd / bwd / step", "read", "written", "B per parameter", "peak memory", "loss", "× DeepSpeed"):
        lines.add_column(heading, justify="left" if heading == "contestant" else "right")
    faster = ratios(found, RIVAL)
    for name, runs in found.items():
        seconds = [run.seconds for run in runs]
        parts = (statistics.median(getattr(run, key) for run in runs) for key in ("forward_s", "backward_s", "step_s"))
        moved = [run.bytes_per_parameter for run in runs]
        lines.add_row(
            name,
            f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})",
            " / ".join(f"{part:.2f}" for part in parts),
            f"{statistics.median(run.read_per_parameter for run in runs):.1f}",
            f"{statistics.median(run.written_per_parameter for run in runs):.1f}",
            f"{statistics.median(moved):.1f}",
            format_size(statistics.median(run.peak_nbytes for run in runs)),
            f"{runs[-1].loss:.3f}",
            f"{statistics.median(faster[name]):.2f} ({min(faster[name]):.2f}-{max(faster[name]):.2f})" if name in faster else "1",
        )
    return lines


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
            f"{environment.python} cannot import deepspeed, transformers and ninja ({why}). Give --deepspeed-venv a virtual environment "
            "with them: pip install torch, then pip install --no-build-isolation deepspeed transformers ninja"
        )


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m infinity.bench.compare", description="Infinity against DeepSpeed and plain PyTorch")
    parser.add_argument("--deepspeed-venv", type=Path, required=True, metavar="DIR", help="a virtual environment with deepspeed")
    parser.add_argument("--nvme", type=Path, required=True, metavar="DIR", help="a folder on the disk to measure")
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
    about = {**here(), "deepspeed": runs[0].versions["deepspeed"], "transformers": runs[0].versions["transformers"]}
    console.print(table(found))
    console.print(f"{options.model} Llama of {runs[0].parameters / 1e6:.1f} M parameters, 1x{options.tokens} tokens, checkpointed, bf16")
    console.print(words(facts))
    console.print(words(about))
    if options.json:
        chosen = {key: getattr(options, key) for key in ("model", "host_memory", "tokens", "steps", "rounds")}
        record = {"about": about, "machine": facts, "options": chosen, "deepspeed_settings": deepspeed_settings(options.model)}
        times = {"times_as_fast_as_deepspeed": ratios(found, RIVAL), "times_as_fast_as_plain": ratios(found, PLAIN)}
        save(options.json, {**record, **times, "runs": found})


if __name__ == "__main__":
    main()

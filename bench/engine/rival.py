"""DeepSpeed's NVMe offload as a peer: its settings, tuned for a model, and its environment.

The environment is a virtual one of its own, without infinity: torch, transformers, deepspeed and ninja, with
libaio's headers and a compiler for the extensions that DeepSpeed compiles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.engine.runs import SHAPES, Environment
from infinity.errors import ConfigError

SETTINGS: dict[str, Any] = {
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
"""Tuned on our machines. `max_in_cpu` is 0 because by default a model of this size never reaches NVMe.
Parameter buffers have the largest parameter's size, and the reuse distance is 0, because DeepSpeed 0.19
otherwise runs out of buffers in the second step. With fewer than twelve optimizer buffers its pipelined step
runs out of them. Larger
groups were no faster and took more memory; a block size above 1 MiB keeps smaller tensors out of NVMe."""


def settings(shape: str, micro_batches: int = 1) -> dict[str, Any]:
    """Return SETTINGS with buffers for the largest parameter of `shape`, and this number of micro-batches."""
    sizes = SHAPES[shape]
    widest = max(sizes["intermediate_size"], sizes["vocab_size"])
    zero = SETTINGS["zero_optimization"]
    parameters = {**zero["offload_param"], "buffer_size": widest * sizes["hidden_size"] + (1 << 18)}
    batches = {"gradient_accumulation_steps": micro_batches}
    return {**SETTINGS, **batches, "zero_optimization": {**zero, "offload_param": parameters}}


def environment_of(venv: Path | None, console: Console) -> Environment:
    """Return DeepSpeed's environment. Raises: ConfigError without one in which DeepSpeed can be imported."""
    if venv is None:
        raise ConfigError("--peer deepspeed needs --venv: a virtual environment with DeepSpeed")
    environment = Environment.of_venv(venv)
    with console.status("importing DeepSpeed"):
        check(environment)
    return environment


def check(environment: Environment) -> None:
    """Check that DeepSpeed can be imported. Raises: ConfigError that says what to install."""
    try:
        code, said = environment.run(["-c", "import deepspeed, transformers, ninja"])
    except OSError as error:
        code, said = 1, str(error)
    if code:
        why = (said.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(
            f"{environment.python} cannot import deepspeed, transformers and ninja ({why}). "
            "Give --venv a virtual environment with them: in it, pip install torch numpy ninja "
            "transformers, and then pip install --no-build-isolation deepspeed"
        )

"""DeepSpeed's ZeRO-3 offload on one GPU as a peer, in this Python: DeepSpeed has to be importable here, with
a compiler for the extensions that it compiles, and for NVMe libaio's headers.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.bench.engine import rival
from infinity.bench.ports import free_port

CASES = {"DeepSpeed in host memory": "cpu", "DeepSpeed on NVMe": "nvme"}
"""What is measured beside ours, and what DeepSpeed calls the place."""


def settings(place: str, folder: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return DeepSpeed's configuration. In host memory it is the documented one for offload, with its default
    sizes of buckets, pinned memory and overlap; on NVMe it has the buffers of our CPU bench besides, for the
    largest parameter of a Llama of `sizes`, and groups of 10^8 parameters in place of 10^7.
    """
    parameters: dict[str, Any] = {"device": place, "pin_memory": True}
    states = dict(parameters)
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "steps_per_print": 1_000_000,
    }
    if place == "nvme":
        tuned = rival.SETTINGS["zero_optimization"]
        largest = max(sizes["intermediate_size"], sizes["vocab_size"]) * sizes["hidden_size"]
        own = {"nvme_path": folder, "buffer_size": largest + (1 << 18)}
        parameters = {**tuned["offload_param"], **own}
        states = {**tuned["offload_optimizer"], "nvme_path": folder}
        zero |= {
            "sub_group_size": 100_000_000,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        }
        found["aio"] = rival.SETTINGS["aio"]
    return {**found, "zero_optimization": {**zero, "offload_param": parameters, "offload_optimizer": states}}


def initialized(
    make: Callable[[], Any], name: str, sizes: Mapping[str, int], folder: str
) -> tuple[Any, Callable[[torch.Tensor], Any], Callable[[], Any]]:
    """Return DeepSpeed's engine for a model that `make` builds in this process, its backward and its step."""
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for key, value in (alone | {"MASTER_PORT": free_port()}).items():
        os.environ.setdefault(key, str(value))
    deepspeed = importlib.import_module("deepspeed")
    adam = importlib.import_module("deepspeed.ops.adam")
    model = make().bfloat16()
    parameters = list(model.parameters())
    optimizer = adam.DeepSpeedCPUAdam(parameters, lr=1e-4, adamw_mode=True)
    Path(folder).mkdir(parents=True, exist_ok=True)
    config = settings(CASES[name], folder, sizes)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, optimizer=optimizer, config=config
    )
    return engine, engine.backward, engine.step

"""One training whose peak memory is measured: builds a model of transformers, trains five steps in a process
of its own, and prints the figures as JSON.

    python -m infinity.bench.planning.peak_worker '{"config": {...}, "tokens": [2, 256], ...}'

Started by infinity.bench.planning.peaks. With "plain", the model is one of plain PyTorch, and what is counted
is its activations, tensor by tensor; without, it is trained by Infinity, and the kernel's high-water mark of
the resident set counts.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import torch
from torch import nn

import infinity
from infinity import tiling
from infinity.bench.engine.contestant import checkpointed, reset_peak, resident
from infinity.bench.planning.live_tensors import LiveTensors
from infinity.bench.planning.process import warm_up

STEPS = 5


def built(spec: dict[str, Any]) -> nn.Module:
    """Build the model, in the type that computes."""
    import transformers

    content = dict(spec["config"])
    config = transformers.AutoConfig.for_model(content.pop("model_type"), **content, use_cache=False)
    torch.manual_seed(0)
    build: Any = transformers.AutoModelForCausalLM.from_config
    model: nn.Module = build(config, dtype=torch.float32)
    return model


def in_its_method(spec: dict[str, Any], model: nn.Module) -> None:
    """Recompute blocks, and compute in tiles, as asked."""
    model.train()
    if spec["batch_tile"]:
        tiling.tile_batch_(model, spec["batch_tile"])  # recomputes blocks by itself
    elif spec["checkpointing"]:
        checkpointed(model)
    if spec["loss_tiles"]:
        tiling.tile_loss_(model)


def batch(spec: dict[str, Any]) -> torch.Tensor:
    """Return token ids."""
    return torch.randint(0, spec["config"]["vocab_size"], tuple(spec["tokens"]))


def trained(spec: dict[str, Any]) -> dict[str, int]:
    """Train in Infinity; return the peak of five steps, and of building, beyond the process."""
    warm_up()
    baseline = resident()
    reset_peak()
    with infinity.Init(nvme=spec["nvme"], device="cpu", **spec["settings"]):
        model = built(spec)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-4, update=spec["update"], speculate=False)
    in_its_method(spec, model)
    building = resident("VmHWM") - baseline
    reset_peak()
    for _ in range(STEPS):
        ids = batch(spec)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"rss_nbytes": resident("VmHWM") - baseline, "building_nbytes": building}


def counted(spec: dict[str, Any]) -> dict[str, int]:
    """Count the activations of the second of two steps in plain PyTorch."""
    model = built(spec)
    model.to(getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[spec["settings"]["dtype"]]))
    in_its_method(spec, model)

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    for _ in range(2):
        ids = batch(spec)
        live = LiveTensors([*model.parameters(), *model.buffers(), ids])
        with live:
            model(input_ids=ids, labels=ids).loss.backward()
    return {"activations_nbytes": live.peak_nbytes}


def main() -> None:
    """Run the spec in the only argument; the last line of the output is the JSON."""
    spec = json.loads(sys.argv[1])
    os.environ["INFINITY_MALLOC"] = spec["malloc"]
    warnings.simplefilter("ignore")
    sys.stdout.write(json.dumps(counted(spec) if spec["plain"] else trained(spec)) + "\n")


if __name__ == "__main__":
    main()

"""The peers of `infinity bench lora`, each in a process of its own: PEFT's LoRA on a base in memory, and
under DeepSpeed's ZeRO-3 with parameters on NVMe.

Started by infinity.bench.engine.lora, with the arguments of contestant.py. This file also runs in DeepSpeed's
environment, where infinity is not installed: the two files beside it that it shares code with are loaded by
their paths.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import torch
from transformers.models.llama.modeling_llama import LlamaForCausalLM


def _beside(name: str) -> ModuleType:
    """Import a file of this folder without the package that it is in."""
    spec = importlib.util.spec_from_file_location(f"beside_{name}", Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"{name}.py is not beside {__file__}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for the types of their fields
    spec.loader.exec_module(module)
    return module


contestant: Any = _beside("contestant")
watching: Any = _beside("generation_worker")


def _base(spec: Any) -> Any:
    """Return the base in bf16: from its files, or with drawn weights."""
    files = spec.settings.get("files")
    if files is None:
        return contestant.llama(spec).bfloat16()
    base: Any = LlamaForCausalLM.from_pretrained(files, dtype=torch.bfloat16)
    base.config.use_cache = False
    return base


def adapted(spec: Any, base: Any) -> Any:
    """Put adapters on the attention's queries and values, the same as the contestant "lora" has."""
    rank = spec.settings["rank"]
    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(spec.seed)
    return peft.get_peft_model(base, config)


def _torch(spec: Any) -> Any:
    """The base in memory; torch's AdamW trains the adapters."""
    model = contestant.checkpointed(adapted(spec, _base(spec)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **contestant.RATES)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return contestant.Contestant(model, contestant.count(model), torch.Tensor.backward, step)


def _deepspeed(spec: Any) -> Any:
    """ZeRO-3 with parameters on NVMe; the adapters' optimizer is in memory."""
    engine = importlib.import_module("deepspeed")
    settings = spec.settings["deepspeed"]
    settings["zero_optimization"]["offload_param"]["nvme_path"] = spec.nvme
    engine.init_distributed(dist_backend="gloo", verbose=False)
    if spec.settings.get("files") is None:
        with engine.zero.Init(config_dict_or_path=settings):
            base = contestant.llama(spec)
    else:
        known: Any = importlib.import_module("transformers.integrations").HfDeepSpeedConfig
        spec.settings["kept"] = known(settings)  # from_pretrained looks at it for as long as it lives
        base = _base(spec)
    model = contestant.checkpointed(adapted(spec, base))
    parameters = sum(int(getattr(one, "ds_numel", one.numel())) for one in model.parameters())
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, **contestant.RATES)
    runner, *_ = engine.initialize(model=model, optimizer=optimizer, config=settings)
    return contestant.Contestant(runner, parameters, runner.backward, runner.step, counting=True)


def _watched(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Also report the peak of the memory that is the process's alone: pages of mapped files are not."""

    def built(spec: Any) -> Any:
        resident = watching.Resident()
        found = build(spec)
        return replace(found, report=lambda: {"own_peak_nbytes": resident.peak_nbytes})

    return built


KINDS = {"torch": _torch, "deepspeed": _deepspeed}

if __name__ == "__main__":
    contestant.KINDS.update({kind: _watched(build) for kind, build in KINDS.items()})
    contestant.main()

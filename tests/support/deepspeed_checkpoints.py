"""Writes checkpoints as DeepSpeed 0.19 does, with stand-ins for its own classes."""

import enum
import math
import sys
import types

import pytest
import torch
from torch import nn

FROZEN = "frozen.weight"


def build():
    model = nn.Module()
    model.emb = nn.Embedding(40, 16)
    model.a = nn.Linear(16, 33)
    model.frozen = nn.Linear(16, 16, bias=False).requires_grad_(requires_grad=False)
    model.head = nn.Linear(16, 40, bias=False)
    model.head.weight = model.emb.weight
    model.register_buffer("count", torch.tensor([3.0, 4.0]))
    return model


@pytest.fixture
def classes(monkeypatch):
    """The classes that DeepSpeed's files name, while they are written."""
    scaler, config = (
        types.ModuleType(f"deepspeed.runtime.{name}") for name in ("fp16.loss_scaler", "zero.config")
    )

    class LossScaler:
        def __init__(self):
            self.cur_scale = 1.0

    class ZeroStageEnum(int, enum.Enum):
        weights = 3

    for module, one in ((scaler, LossScaler), (config, ZeroStageEnum)):
        one.__module__, one.__qualname__ = module.__name__, one.__name__
        setattr(module, one.__name__, one)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.runtime.zero"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return LossScaler, ZeroStageEnum


def split(tensor, ranks):
    """Return each rank's part of a parameter, the last padded."""
    numel = math.ceil(tensor.numel() / ranks)
    flat = torch.cat([tensor.reshape(-1), torch.full((numel * ranks - tensor.numel(),), 99.0)])
    return flat.split(numel)


def flat_groups(values, groups, rank, ranks, cut):
    """Return one rank's flat sub-groups, of `cut` parameters of a group each."""
    found = []
    for group in groups:
        parts = [split(values[name], ranks)[rank] for name in group]
        found += [torch.cat(parts[at : at + cut]) for at in range(0, len(parts), cut)]
    return found


def write(folder, ranks, classes, *, cut=2, moments=True):
    """Write a checkpoint as so many ranks of DeepSpeed do; return masters and moments by name."""
    scaler, stage = classes
    torch.manual_seed(5)
    shapes = {name: one.shape for name, one in build().named_parameters()}
    masters, m, v = ({name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(3))
    groups = [["emb.weight", "a.weight"], ["a.bias"]]
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    for rank in range(ranks):
        model = {
            "module": {"count": torch.tensor([7.0, 8.0]), "emb.weight": torch.empty(0).bfloat16()},
            "buffer_names": ["count"],
            "param_shapes": [{name: shapes[name] for name in group} for group in groups],
            "frozen_param_shapes": {FROZEN: shapes[FROZEN]},
            "shared_params": {"head.weight": "emb.weight"},
            "frozen_param_fragments": {FROZEN: split(masters[FROZEN], ranks)[rank].bfloat16()},
            "global_steps": 3,
            "ds_version": "0.19.8",
        }
        of_m, of_v = (flat_groups(one, groups, rank, ranks, cut) for one in (m, v))
        state = {
            index: {"step": torch.tensor(3.0), "exp_avg": one, "exp_avg_sq": other}
            for index, (one, other) in enumerate(zip(of_m, of_v, strict=True))
        }
        inner = {
            "zero_stage": stage.weights,
            "loss_scaler": scaler(),
            "partition_count": ranks,
            "optimizer_state_dict": {"state": state if moments else {}, "param_groups": []},
            "fp32_flat_groups": flat_groups(masters, groups, rank, ranks, cut),
        }
        torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save(
            {"optimizer_state_dict": inner}, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )
    masters[FROZEN] = masters[FROZEN].bfloat16().float()
    return masters, m, v

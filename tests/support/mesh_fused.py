"""Fused weights in checkpoints, of whose chunks each rank has a part: a case of mesh_run.py."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import infinity
from answers import error_of
from infinity.engine.engine import engine_of
from infinity.tensors import local
from mesh_kinds import of_kind

SHAPES = {"rows": ((8, 6), 0), "stack": ((3, 12, 5), 1), "columns": ((4, 8), 1)}
"""Of each weight, with the dimension along which two are fused."""
FIELDS = "master", "m", "v"


class FusedModel(nn.Module):
    """Has weights, and a loss of what this rank has of them."""

    def __init__(self, weights):
        super().__init__()
        for name, one in weights.items():
            self.register_parameter(name, nn.Parameter(one))

    def forward(self):
        mine = (one.to_local() if hasattr(one, "to_local") else one for one in self.parameters())
        return sum((one**3).sum() for one in mine)


def wholes():
    drawn = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=drawn) for name, (shape, _) in SHAPES.items()}


def divided(place, whole, dim):
    return distribute_tensor(whole, place.tensor, [_StridedShard(dim, split_factor=2)], src_data_rank=None)


def parts(place):
    return {name: divided(place, one, SHAPES[name][1]) for name, one in wholes().items()}


def of_all(place, mine, dim):
    """Put a tensor together of what the ranks of a row have."""
    parts = [None] * place.tensor.size()
    dist.all_gather_object(parts, mine, group=place.tensor.get_group())
    chunks = zip(*(one.chunk(2, dim) for one in parts), strict=True)
    return torch.cat([torch.cat(one, dim) for one in chunks], dim)


def fused(place, mesh_run):
    """Save, and load on the same mesh, without one, and back; return what is wrong."""
    settings = {"nvme": place.folder, "host_memory": mesh_run.WIDE, "dtype": "bf16"}
    folder, wrong = Path(place.folder, "fused"), []

    def start():
        with infinity.Init(mesh=place.mesh, data="dp", **settings):
            model = FusedModel(parts(place))
        return model, infinity.AdamW(model.parameters(), lr=0.01)

    def start_alone():
        with infinity.Init(process_group=place.data, **settings):
            model = FusedModel({name: torch.zeros_like(one) for name, one in wholes().items()})
        return model, infinity.AdamW(model.parameters(), lr=0.01)

    def state(model):
        found = {}
        for name, one in model.named_parameters():
            for field, values in zip(FIELDS, engine_of(one).parameters.read(one, FIELDS), strict=True):
                whole = local(values)
                if hasattr(values, "placements"):
                    whole = of_all(place, whole, SHAPES[name][1])
                found[f"{field} of {name}"] = whole
        return found

    def check(what, found, expected):
        wrong.extend(f"{name} {what}" for name, one in expected.items() if not torch.equal(one, found[name]))

    model, optimizer = start()
    drawn = {name: of_all(place, local(one), SHAPES[name][1]) for name, one in parts(place).items()}
    check("as drawn", drawn, wholes())
    for _ in range(2):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = state(model)
    infinity.save(model, optimizer, folder)
    infinity.save_pretrained(model, f"{folder}-hub")
    again, other = start()
    infinity.load(again, other, folder)
    check("on the mesh", state(again), expected)
    alone, own = start_alone()
    infinity.load(alone, own, folder)
    check("without it", state(alone), expected)
    back = f"{folder}-{place.tensor.get_local_rank()}"
    infinity.save(alone, own, back)
    infinity.save_pretrained(alone, f"{back}-hub")
    dist.barrier()
    again, other = start()
    infinity.load(again, other, f"{folder}-0")
    check("from without it", state(again), expected)
    exports = [load_file(f"{one}-hub/model.safetensors") for one in (folder, f"{folder}-0")]
    check("in an export", *exports)
    read = {name: torch.zeros(shape) for name, (shape, _) in SHAPES.items()}
    dcp.load(read, storage_reader=infinity.CheckpointReader(folder), no_dist=True)
    masters = {name: expected[f"master of {name}"] for name in SHAPES}
    check("by DCP", read, masters)
    with infinity.Init(mesh=place.mesh, data="dp", **settings):
        uneven = FusedModel({"uneven": divided(place, torch.zeros(6, 4), 0)})
    wrong += of_experts(place, mesh_run, settings)
    answer = {
        "wrong": wrong,
        "uneven": error_of(lambda: infinity.save(uneven, None, f"{folder}-uneven")),
        "load_dcp": error_of(lambda: infinity.load_dcp(model, None, f"{folder}-dcp")),
    }
    dist.barrier()
    return answer


def of_experts(place, mesh_run, settings):
    """Save, and export, a Mixtral that is divided by transformers' plan; return what is wrong of it."""
    settings = {**settings, "dtype": "fp32", "experts": "whole"}
    folder, mine = Path(place.folder, "planned"), place.tensor.get_local_rank()
    kind, config = of_kind("Mixtral")
    torch.manual_seed(3)
    drawn = kind(config).state_dict()
    model = mesh_run.offloaded(place, "Mixtral", "planned", **settings)
    placed = [str(getattr(one, "placements", "")) for one in model.parameters()]
    infinity.save(model, None, folder)
    infinity.save_pretrained(model, f"{folder}-hub")
    with infinity.Init(process_group=place.data, **settings):
        alone = kind(config)
    infinity.load(alone, None, folder)
    infinity.save_pretrained(alone, f"{folder}-{mine}-hub")
    state = alone.state_dict()
    wrong = [f"{name} without the plan" for name, one in drawn.items() if not torch.equal(one, state[name])]
    for one in Path(f"{folder}-hub").iterdir():
        same = one.read_bytes() == Path(f"{folder}-{mine}-hub", one.name).read_bytes()
        wrong += [] if same else [f"{one.name} of the plan"]
    return wrong if any("_StridedShard" in one for one in placed) else [*wrong, "nothing is fused"]

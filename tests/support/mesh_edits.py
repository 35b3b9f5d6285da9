"""What a user edits by hand of a model on a mesh: a case of mesh_run.py."""

from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import infinity
from answers import error_of


def edits(place):
    """Return what becomes of edits; `wrong` has those that did not do what they should."""
    settings = {
        "mesh": place.mesh,
        "data": "dp",
        "nvme": place.folder,
        "dtype": "fp32",
        "host_memory": "64MiB",
    }

    def cut():
        with infinity.Init(tile_above="1KiB", **settings):
            nn.Linear(64, 64)

    with infinity.Init(**settings):
        torch.manual_seed(5)
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 5))
        parallelize_module(model, place.tensor, {"1": ColwiseParallel(output_layouts=Replicate())})
    norm, weight = model[0].weight, model[1].weight
    ordinary, own = nn.Parameter(torch.ones(8)), float(place.tensor.get_local_rank())
    wrong = []

    def check(what, holds):
        wrong.extend([] if holds else [what])

    def apart(edited):
        with infinity.gathered(model, write=True), torch.no_grad():
            (edited.to_local() if isinstance(edited, DTensor) else edited).fill_(own)

    def same(values, expected):
        return torch.equal(values.to_local() if isinstance(values, DTensor) else values, expected)

    model.to("cpu")
    model.float()
    like = torch.zeros_like(weight)
    check("zeros_like", isinstance(like, DTensor) and like.placements == weight.placements)
    before = model.state_dict()["1.weight"].to_local().clone()
    with infinity.gathered(model, write=True):
        weight.data = weight.data * 2
    check("data", same(model.state_dict()["1.weight"], before * 2))

    def assign_local():
        with infinity.gathered(model, write=True):
            weight.data = weight.data.to_local() + 1

    answer = {"local as data": error_of(assign_local), "copies apart": error_of(lambda: apart(norm))}
    check("nothing is written", same(model.state_dict()["0.weight"], torch.ones(8)))
    check("shards apart", error_of(lambda: apart(weight)) == "no error")
    check("shards written", same(model.state_dict()["1.weight"], torch.full_like(before, own)))

    optimizer = infinity.AdamW(model.parameters())
    model(torch.ones(3, 8).cumsum(1)).square().sum().backward()
    answer["gradients apart"] = error_of(lambda: norm.grad.fill_(own))
    whole = weight.grad.full_tensor()
    found = torch.nn.utils.clip_grad_norm_([weight], 0.5, norm_type=1.0)
    check("norm of order 1", torch.allclose(found.full_tensor(), whole.abs().sum()))
    check("clipped", torch.allclose(weight.grad.full_tensor().abs().sum(), torch.tensor(0.5)))
    optimizer.step()

    def as_state(parameter, value):
        optimizer.state[parameter]["exp_avg"] = value

    answer["released as state"] = error_of(lambda: as_state(weight, weight))
    answer["ordinary as state"] = error_of(lambda: as_state(weight, nn.Parameter(torch.ones(5, 8))))
    as_state(norm, ordinary)
    check("state", same(optimizer.state[norm]["exp_avg"], torch.ones(8)))
    answer["in slices"] = error_of(cut)
    kept = [error_of(partial(late, place, settings, grads=grads)) for grads in (True, False)]
    return answer | {"wrong": wrong, "kept": kept}


def late(place, settings, *, grads):
    """Change a local tensor that was kept, and use its layer."""
    with infinity.Init(**settings):
        layers = nn.Sequential(nn.Linear(8, 5))
        parallelize_module(layers, place.tensor, {"0": ColwiseParallel(output_layouts=Replicate())})
    kept = []
    layers[0].register_forward_pre_hook(lambda module, _: kept.append(module.weight.to_local()))
    with torch.set_grad_enabled(grads):
        layers(torch.ones(3, 8))
        layers(torch.ones(3, 8))
    with torch.no_grad():
        kept[0].add_(1)
    layers(torch.ones(3, 8))

"""Ranks of a mesh whose models take different paths, and one that dies: cases of mesh_run.py."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import infinity
from answers import error_of


class PathsModel(nn.Module):
    """Three layers of one size, ordinary ones, which are used in whatever order it is told."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, hidden, order):
        for name in order:
            hidden = getattr(self, name)(hidden)
        return hidden


def paths(place):
    """Return the error where the last rank along a dimension uses its layers in another order in the second
    step.
    """
    answers = {}
    for name, mine in (("tensor", place.tensor), ("data", place.data)):
        if mine.size() > 1:
            other = mine.get_local_rank() == mine.size() - 1
            answers[name] = error_of(lambda other=other: two_steps(place, other=other))
    return answers


def two_steps(place, *, other):
    """Make a step in which all do the same, and one in which some do something else."""
    settings = {"mesh": place.mesh, "data": "dp", "nvme": place.folder, "host_memory": "64MiB"}
    with infinity.Init(dtype="fp32", timeout_s=30, **settings):
        model = PathsModel()
    optimizer = infinity.AdamW(model.parameters())
    for order in (("first", "second", "third"), ("first", "third", "second")):
        chosen = order if other else ("first", "second", "third")
        model(torch.ones(2, 8), chosen).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def dying(place):
    """The last rank of a tensor dimension ends before the norm of a step; return the others' error."""
    settings = {"mesh": place.mesh, "data": "dp", "nvme": place.folder, "host_memory": "64MiB"}
    with infinity.Init(dtype="fp32", timeout_s=20, **settings):
        model = nn.Sequential(nn.Linear(8, 8))
        parallelize_module(model, place.tensor, {"0": ColwiseParallel(output_layouts=Replicate())})
    optimizer = infinity.AdamW(model.parameters(), max_norm=1.0)
    model(torch.ones(2, 8)).sum().backward()
    through = Path(place.folder, "through")  # the backward, in which torch's error would name nobody
    if place.tensor.get_local_rank() < place.tensor.size() - 1:
        through.touch()
        return {"error": error_of(optimizer.step)}
    while not through.exists():
        time.sleep(0.01)
    os._exit(0)

"""Ranks of a mesh whose models take different paths: a case of mesh_run.py."""

import torch
from torch import nn

import infinity
from mesh_edits import error_of


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

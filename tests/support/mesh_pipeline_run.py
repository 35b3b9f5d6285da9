"""What ranks of a mesh of stages, data and tensor dimensions do in the tests: cases, an answer as JSON each.

    torchrun --nproc-per-node 8 tests/support/mesh_pipeline_run.py FOLDER DATA TENSOR CASE [CASE ...]

Rank R writes FOLDER/R.json. The stages are those ranks that are left. The reference is the same pipeline of
the same DTensors, in memory, whose local tensors the reference recipe steps.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

import infinity
from answers import answer_all
from mesh_run import (
    COMPUTES,
    IN_BLOCK,
    OUTSIDE,
    TIGHT,
    VOCABULARY,
    WIDE,
    WIDTH,
    MeshBlock,
    ParallelReference,
    Place,
    local,
)

PARTS, ROWS, TOKENS = 2, 4, 7


class StagePlace(Place):
    """Where this process is in the mesh of stages, data and parts of layers."""

    def __init__(self, folder, data, tensor):
        self.folder = folder
        shape = (dist.get_world_size() // (data * tensor), data, tensor)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
        self.data, self.tensor, self.stages = self.mesh["dp"], self.mesh["tp"], self.mesh["pp"]
        self.number, self.count = self.stages.get_local_rank(), self.stages.size()

    def batch(self, step):
        drawn = torch.Generator().manual_seed(100 + step + 1000 * self.data.get_local_rank())
        return torch.randint(VOCABULARY, (ROWS, TOKENS), generator=drawn)

    def sum_of_parts(self, own):
        mine = super().sum_of_parts(own)
        rows = [torch.zeros((), dtype=torch.float64) for _ in range(self.count)]
        dist.all_gather(rows, torch.tensor(mine, dtype=torch.float64), group=self.stages.get_group())
        return sum(map(float, rows), 0.0)


class MeshStage(nn.Module):
    """A block; the first stage has the embedding, and the last the head, as well."""

    def __init__(self, place):
        super().__init__()
        torch.manual_seed(place.number)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if place.number == 0 else None
        self.block = MeshBlock()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if place.number == place.count - 1 else None

    def forward(self, hidden):
        hidden = self.block(hidden if self.embedding is None else self.embedding(hidden))
        return hidden if self.head is None else self.head(hidden)


def built(place):
    model = MeshStage(place)
    outside = {name: one for name, one in OUTSIDE.items() if getattr(model, name) is not None}
    if outside:
        parallelize_module(model, place.tensor, outside)
    parallelize_module(model.block, place.tensor, IN_BLOCK)
    return model


def train(place, model, optimizer, clip=None):
    """Train; return the losses that the last stage has seen, and the norms."""

    def loss_of(logits, labels):
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / PARTS

    stage = pipelining.PipelineStage(
        model, place.number, place.count, torch.device("cpu"), group=place.stages.get_group()
    )
    schedule = pipelining.Schedule1F1B(stage, PARTS, loss_fn=loss_of, scale_grads=False)
    losses, norms = [], []
    for step in range(3):
        ids, seen = place.batch(step), []
        last = {"target": ids.roll(-1, 1), "losses": seen} if place.number == place.count - 1 else {}
        schedule.step(*([ids] if place.number == 0 else []), **last)
        losses += [float(one) for one in seen]
        if clip is not None:
            norms.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def compare(place, *options):
    """Train the stages in memory, and the same offloaded; return what differs."""
    dtype = "bf16" if "bf16" in options else "fp32"
    clips = 0.5 if "clip_grad_norm_" in options else None
    settings = {"lr": 0.01, "weight_decay": 0.1, "max_norm": 0.5 if "max_norm" in options else None}
    plain = built(place)
    other = ParallelReference(place, plain, COMPUTES[dtype], **settings)
    losses, norms = train(place, plain, other, clips and partial(other.clip, clips))
    with infinity.Init(
        mesh=place.mesh["dp", "tp"],
        data="dp",
        pipeline_group=place.stages.get_group(),
        dtype=dtype,
        nvme=place.folder,
        host_memory=TIGHT if "tight" in options else WIDE,
    ):
        model = built(place)
    mine = infinity.AdamW(model.parameters(), **settings)
    clip = clips and partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), clips)
    ours, own = train(place, model, mine, clip)
    actual, moments = model.state_dict(), mine.state_dict()["state"]
    different = [
        name for name, one in plain.named_parameters() if not torch.equal(local(one), local(actual[name]))
    ]
    different += [
        f"{key} of {number}"
        for number, part in enumerate(other.param_groups[0]["params"])
        for key in ("exp_avg", "exp_avg_sq")
        if not torch.equal(other.state[part][key], local(moments[number][key]))
    ]
    return {
        "different": different + [f"losses {losses} {ours}"] * (losses != ours),
        "norms differ": max((abs(one / two - 1) for one, two in zip(own, norms, strict=True)), default=0),
        "norm": mine.grad_norm if settings["max_norm"] else (own or [None])[-1],
        "nvme": infinity.stats(model).nvme_written_nbytes,
    }


def main(folder, data, tensor, *names):
    """Do cases. data: ranks with different data; tensor: those that divide layers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = StagePlace(folder, int(data), int(tensor))
    answer_all(folder, names, lambda name: compare(place, *name.split(", ")))


if __name__ == "__main__":
    main(*sys.argv[1:])

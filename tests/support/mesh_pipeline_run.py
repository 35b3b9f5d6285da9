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

PARTS, ROWS, TOKENS, BLOCKS = 2, 4, 7, 2


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
    """A block; the first stage has the embedding, and the last the head, as well. Names are the whole's."""

    def __init__(self, place):
        super().__init__()
        torch.manual_seed(place.number)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if place.number == 0 else None
        numbers = range(BLOCKS) if place.count == 1 else [place.number]
        self.blocks = nn.ModuleDict({str(number): MeshBlock() for number in numbers})
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if place.number == place.count - 1 else None

    def forward(self, hidden):
        hidden = hidden if self.embedding is None else self.embedding(hidden)
        for block in self.blocks.values():
            hidden = block(hidden)
        return hidden if self.head is None else self.head(hidden)


def built(place):
    model = MeshStage(place)
    outside = {name: one for name, one in OUTSIDE.items() if getattr(model, name) is not None}
    if outside:
        parallelize_module(model, place.tensor, outside)
    for block in model.blocks.values():
        parallelize_module(block, place.tensor, IN_BLOCK)
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
    model = offloaded(place, dtype=dtype, host_memory=TIGHT if "tight" in options else WIDE)
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


def offloaded(place, **settings):
    groups = {"mesh": place.mesh["dp", "tp"], "data": "dp", "pipeline_group": place.stages.get_group()}
    with infinity.Init(**{"dtype": "fp32", "nvme": place.folder, "host_memory": TIGHT, **groups, **settings}):
        return built(place)


def all_of(model, optimizer):
    """Return weights and moments by name, whole: every rank of the model's mesh calls it."""

    def whole(one):
        return (one.full_tensor() if hasattr(one, "full_tensor") else one).clone()

    found = {name: whole(one) for name, one in model.state_dict().items()}
    state = optimizer.state_dict()["state"]
    for number, (name, _) in enumerate(model.named_parameters()):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            found[f"{key} of {name}"] = whole(torch.as_tensor(state[number][key]))
    return found


def checkpoints(place):
    """Save on one mesh, load on others, with stages and without, and back; return what differs."""
    import torch.distributed.checkpoint as dcp

    ranks, folder = dist.get_world_size(), place.folder
    wide, stages = StagePlace(folder, ranks // 2, 2), StagePlace(folder, ranks // 2, 1)
    tall, long = StagePlace(folder, 1, ranks), StagePlace(folder, 1, 1)
    first = offloaded(wide)
    optimizer = infinity.AdamW(first.parameters(), lr=0.01)
    for step in range(2):
        hidden = first(wide.batch(step))
        functional.cross_entropy(hidden.flatten(0, 1), wide.batch(step).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected, wrong = all_of(first, optimizer), []
    infinity.save(first, optimizer, f"{folder}/a", extra={"rank": dist.get_rank()})
    before = "a"
    for name, at in (("b", stages), ("c", tall), ("d", stages), ("e", wide)):
        model = offloaded(at, host_memory=WIDE if name == "d" else TIGHT)
        mine = infinity.AdamW(model.parameters(), lr=0.5)
        infinity.load(model, mine, f"{folder}/{before}")
        actual = all_of(model, mine)
        wrong += [f"{one} in {before}" for one in actual if not torch.equal(actual[one], expected[one])]
        wrong += [f"rate of {before}"] * (mine.param_groups[0]["lr"] != 0.01)
        infinity.save(model, mine, f"{folder}/{name}")
        before = name
    dist.barrier()
    alone = {name: torch.zeros_like(one) for name, one in expected.items() if " " not in name}
    dcp.load(alone, storage_reader=infinity.CheckpointReader(f"{folder}/b"), no_dist=True)
    wrong += [f"{name} by DCP" for name, one in alone.items() if not torch.equal(one, expected[name])]
    refused = []
    for model in (offloaded(stages), offloaded(long)):
        try:
            infinity.load(model, None, f"{folder}/a")
            missing = stages if len(refused) == 0 else long
            refused.append("" if missing is stages else "no error")
        except Exception as error:  # noqa: BLE001 - of many kinds
            refused.append(f"{type(error).__name__}: {error}")
    return {"wrong": wrong, "refused": refused}


def main(folder, data, tensor, *names):
    """Do cases. data: ranks with different data; tensor: those that divide layers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = StagePlace(folder, int(data), int(tensor))
    answer_all(
        folder,
        names,
        lambda name: checkpoints(place) if name == "checkpoints" else compare(place, *name.split(", ")),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

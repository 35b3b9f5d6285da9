"""What the ranks of a pipeline do in the tests of them: cases by name, an answer as JSON each.

    torchrun --nproc-per-node 2 tests/support/pipeline_run.py FOLDER CASE [CASE ...]  # or launches.forked

Rank R writes FOLDER/R.json: {case: answer, or {"error": text}}. The reference is the same pipeline, of the
same
torch, run in memory: plain stages that infinity.reference has prepared, and its optimizer. Schedules without
bubbles add gradients of 16 bits up in 16 bits there, and in fp32 here, as the recipe says: the reference of
theirs is another schedule of the same stages, whose backwards are whole.
"""

import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity
from answers import answer_all, refused
from infinity.engine.engine import engine_of_model
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference import recipe as reference
from pipeline_evals import evaluated, other_paths
from stages_together import together_unlike

VOCABULARY, WIDTH, TOKENS, BATCH, PARTS = 61, 64, 7, 8, 4
COMPUTES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCHEDULES = {
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "looped": (pipelining.ScheduleLoopedBFS, 2),
    "zero bubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "zbv": (pipelining.ScheduleZBVZeroBubble, 2),
    "dual pipe": (pipelining.ScheduleDualPipeV, 2),
}
APART = ("zero bubble", "zbv", "dual pipe")
"""Those that compute gradients of weights apart from those of inputs."""
TIGHT, WIDE = "2MiB", "64MiB"


class PipelineBlock(nn.Module):
    """As Llama's: attention and a gated network, each after a norm of its own."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        heads = self.qkv(self.norms[0](hidden)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norms[1](hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class PipelineStageModel(nn.Module):
    """One of `stages` stages, of one block each; the first has the embedding, the last the head."""

    def __init__(self, number, stages, *, checkpointed=False):
        super().__init__()
        torch.manual_seed(number)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if number == 0 else None
        self.block = PipelineBlock()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if number == stages - 1 else None
        self.checkpointed = checkpointed

    def forward(self, hidden):
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        if self.checkpointed:
            hidden = checkpoint(self.block, hidden, use_reentrant=False)
        else:
            hidden = self.block(hidden)
        return hidden if self.head is None else self.head(hidden)


def cross_entropy(logits, labels):
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@dataclass
class Place:
    """Where this process is: the groups of its data and its pipeline, and its part of the batches."""

    folder: str
    data: Any
    pipeline: Any

    @property
    def rank(self):
        return dist.get_rank(self.pipeline)

    @property
    def ranks(self):
        return dist.get_world_size(self.pipeline)

    def numbers(self, kind):
        """Return the numbers of the stages on this rank, and of all."""
        chunks = SCHEDULES[kind][1]
        count = chunks * self.ranks
        if kind in ("zbv", "dual pipe"):
            return [self.rank, count - 1 - self.rank], count
        return list(range(self.rank, count, self.ranks)), count

    def schedule(self, kind, stages, numbers, count, **options):
        """Return the schedule of modules that are the stages `numbers`."""
        make, chunks = SCHEDULES[kind]
        staged = [
            pipelining.PipelineStage(module, number, count, torch.device("cpu"), group=self.pipeline)
            for module, number in zip(stages, numbers, strict=True)
        ]
        return make(staged if chunks > 1 else staged[0], PARTS, loss_fn=cross_entropy, **options)

    def batch(self, step):
        drawn = torch.Generator().manual_seed(100 + step + 1000 * dist.get_rank(self.data))
        return torch.randint(VOCABULARY, (BATCH, TOKENS), generator=drawn)

    def of_all(self, value):
        """Return what the ranks of the pipeline give, in their order."""
        found = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.pipeline)
        return found

    def sum_of_stages(self, own):
        rows = [torch.zeros((), dtype=torch.float64) for _ in range(self.ranks)]
        dist.all_gather(rows, torch.tensor(own, dtype=torch.float64), group=self.pipeline)
        return sum(map(float, rows), 0.0)

    def mean_of_data(self, grad):
        rows = [torch.empty_like(grad) for _ in range(dist.get_world_size(self.data))]
        dist.all_gather(rows, grad.contiguous(), group=self.data)
        total = rows[0].float()
        for row in rows[1:]:
            total += row.float()
        return (total / len(rows)).to(grad.dtype)


class ReferenceOfStages(ReferenceAdamW):
    """The recipe's AdamW, whose norms are of all stages' gradients."""

    def __init__(self, place, parameters, **options):
        super().__init__(parameters, **options)
        self.place = place

    def _clip_factor(self):
        if self.max_norm is None:
            return None
        grads = [reference._stored(one)[0] for one in self._parameters() if one.grad is not None]
        total = self.place.sum_of_stages(sum(map(reference.sum_squares, grads), 0.0))
        norm = torch.tensor(total, dtype=torch.float64).sqrt().float()
        return torch.clamp(reference.f32(self.max_norm) / (norm + reference.f32(1e-6)), max=1.0)

    def clip(self, limit):
        """Do what torch's clip_grad_norm_ does, over all stages."""
        parameters = [one for one in self._parameters() if one.grad is not None]
        stored = [reference._stored(one) for one in parameters]
        norms = [torch.linalg.vector_norm(value.double()) * factor.double() for value, factor in stored]
        total = torch.tensor(
            self.place.sum_of_stages(sum(one.item() ** 2 for one in norms)), dtype=torch.float64
        ).sqrt()
        coefficient = torch.clamp(limit / (total + 1e-6), max=1.0).float()
        for parameter, (value, factor) in zip(parameters, stored, strict=True):
            reference._store(parameter, value, factor * coefficient)
        return total


def train(place, kind, stages, optimizer, *, steps=3, first=0, clip=None, between=None, accumulated=1):
    """Train; return the losses that this rank has seen, and the norms."""
    numbers, count = place.numbers(kind)
    schedule = place.schedule(kind, stages, numbers, count)
    losses, norms = [], []
    for step in range(first, first + steps):
        ids, seen = place.batch(step), []
        given = [ids] if 0 in numbers else []
        aim = {"target": ids.roll(-1, 1), "losses": seen} if count - 1 in numbers else {}
        for _ in range(accumulated):
            schedule.step(*given, **aim)
        losses.extend(float(loss) for loss in seen)
        if clip is not None:
            norms.append(float(clip()))
        if between is not None:
            between(step, partial(schedule.eval, *given, **aim))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def build(place, kind, *, frozen=False, checkpointed=False, tied=False):
    numbers, count = place.numbers(kind)
    stages = nn.ModuleList(PipelineStageModel(one, count, checkpointed=checkpointed) for one in numbers)
    for module in stages if frozen else ():
        module.block.qkv.requires_grad_(False)
    if tied and {0, count - 1} <= {*numbers}:
        stages[-1].head.weight = stages[0].embedding.weight
    return stages


def in_memory(place, kind, **model):
    """Build the stages of a rank, whose gradients are the mean over the ranks that share them."""
    stages = build(place, kind, **model)
    for one in trained(stages) if dist.get_world_size(place.data) > 1 else ():
        one.register_hook(place.mean_of_data)
    return stages


def offloaded(place, kind, *, dtype, model=None, **settings):
    """Build the stages of a rank in Init."""
    groups = {"process_group": place.data, "pipeline_group": place.pipeline}
    with infinity.Init(**{"dtype": dtype, "nvme": place.folder, **groups, **settings}):
        return build(place, kind, **(model or {}))


def found(place, kind, stages, optimizer):
    """Return weights and moments by stage and name, of all stages."""
    numbers, _ = place.numbers(kind)
    state = optimizer.state_dict()["state"]
    places = {id(one): number for number, one in enumerate(optimizer.param_groups[0]["params"])}
    mine = {}
    for number, module in zip(numbers, stages, strict=True):
        mine |= {f"{number}.{name}": one.clone() for name, one in module.state_dict().items()}
        for name, parameter in module.named_parameters():
            moments = state.get(places.get(id(parameter)), {})
            mine |= {
                f"{key} of {number}.{name}": moments[key].float()
                for key in moments
                if key.startswith("exp_avg")
            }
    return {key: one for part in place.of_all(mine) for key, one in part.items()}


def trained(stages):
    return [one for one in stages.parameters() if one.requires_grad]


def compare(place, kind, *options, max_norm=None, clip=None, dtype="bf16"):
    """Train a pipeline in memory, and the same offloaded; return what differs."""
    model = {one: one in options for one in ("frozen", "checkpointed", "tied")}
    accumulated = 2 if "accumulated" in options else 1
    whole = "interleaved" if kind in APART and dtype == "bf16" else kind
    plain = in_memory(place, whole, **model)
    settings = {"lr": 0.01, "weight_decay": 0.1, "max_norm": max_norm}
    other = ReferenceOfStages(place, trained(prepare(plain, COMPUTES[dtype])), **settings)
    looks = (lambda _step, evaluate: evaluate()) if "looked at" in options else None
    clips = clip and partial(other.clip, clip)
    losses, norms = train(place, whole, plain, other, clip=clips, between=looks, accumulated=accumulated)
    expected = {"losses": max(place.of_all(losses), key=len), **found(place, whole, plain, other)}

    stages = offloaded(
        place, kind, dtype=dtype, model=model, host_memory=TIGHT if "tight" in options else WIDE
    )
    optimizer = infinity.AdamW(trained(stages), **settings)
    counts = {}

    def between(step, evaluate):
        counts[step] = infinity.stats(stages)
        if "looked at" in options:
            evaluate()
            stages.state_dict()
            with torch.no_grad(), infinity.gathered(stages):
                stages[0].block.out(torch.zeros(1, WIDTH, dtype=COMPUTES[dtype]))

    clips = clip and partial(torch.nn.utils.clip_grad_norm_, list(stages.parameters()), clip)
    losses, ours = train(place, kind, stages, optimizer, clip=clips, between=between, accumulated=accumulated)
    actual = {"losses": max(place.of_all(losses), key=len), **found(place, kind, stages, optimizer)}
    assert expected.keys() == actual.keys(), expected.keys() ^ actual.keys()
    last = counts[2].since(counts[1])
    return {
        "different": [key for key, one in expected.items() if not same(one, actual[key])],
        "losses": actual["losses"],
        "norms": [optimizer.grad_norm] if max_norm else ours,
        "norms differ": max(
            (abs(one / other - 1) for one, other in zip(ours, norms, strict=True)), default=0
        ),
        "nvme": infinity.stats(stages).nvme_written_nbytes,
        "uses": last.uses,
        "hits": last.hits,
    }


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def unnamed(place):
    """Return the errors of norms where no group names the other stages."""
    answers = {}
    for what in ("max_norm", "clip_grad_norm_", "GradScaler"):
        stages = offloaded(place, "1f1b", dtype="bf16", host_memory=WIDE, pipeline_group=None)
        max_norm = 1.0 if what == "max_norm" else None
        optimizer = infinity.AdamW(stages.parameters(), max_norm=max_norm)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        call = {
            "max_norm": optimizer.step,
            "clip_grad_norm_": partial(torch.nn.utils.clip_grad_norm_, stages.parameters(), 1.0),
            "GradScaler": partial(scaler.unscale_, optimizer),
        }[what]
        numbers, count = place.numbers("1f1b")
        schedule = place.schedule("1f1b", stages, numbers, count)
        ids = place.batch(0)
        schedule.step(*([ids] if place.rank == 0 else []), **({"target": ids} if place.rank else {}))
        answers[what] = refused(call)
    return answers


def assigned(place, *, foreach):
    """Return the error of clipping where an ordinary tensor is one of the gradients."""
    stages = offloaded(place, "1f1b", dtype="fp32", host_memory=WIDE)

    def between(*_):
        first = next(stages.parameters())
        first.grad = first.grad.clone()
        torch.nn.utils.clip_grad_norm_(list(stages.parameters()), 0.5, foreach=foreach)

    optimizer = infinity.AdamW(stages.parameters())
    return {"error": refused(lambda: train(place, "1f1b", stages, optimizer, steps=1, between=between))}


def disagreeing(place):
    """Return the error where one stage clips by a norm and the other looks for overflows."""
    stages = offloaded(place, "1f1b", dtype="fp32", host_memory=WIDE, timeout_s=20)
    optimizer = infinity.AdamW(stages.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))

    def between(*_):
        if place.rank:
            torch.nn.utils.clip_grad_norm_(list(stages.parameters()), 0.5)
        else:
            scaler.unscale_(optimizer)

    return {"error": refused(lambda: train(place, "1f1b", stages, optimizer, steps=1, between=between))}


def with_default_device(place):
    """Train by a schedule without bubbles where set_default_device has entered a function mode."""
    torch.set_default_device("cpu")
    try:
        return compare(place, "zero bubble", max_norm=0.5)
    finally:
        torch.set_default_device(None)


def wrong(place):
    """Return the errors of stages, groups and folders that do not fit."""

    def empty():
        with infinity.Init(nvme=place.folder, pipeline_group=place.pipeline, process_group=place.data):
            return nn.ModuleList() if place.rank else nn.Linear(4, 4)

    def built(**groups):
        dist.barrier()  # the other rank has waited for the timeout of the last
        with infinity.Init(nvme=place.folder, timeout_s=5, **groups):
            if place.rank:
                raise KeyError("no weights")
            return nn.Linear(4, 4)

    def saved():
        stages = offloaded(place, "1f1b", dtype="bf16", host_memory=WIDE)
        infinity.save(stages, None, Path(place.folder, "one"))

    def order():
        stages = offloaded(place, "1f1b", dtype="bf16", host_memory=WIDE)
        stages.register_parameter("plain", None)
        train(
            place,
            "1f1b",
            stages,
            infinity.AdamW(stages.parameters()),
            steps=1,
            between=lambda *_: torch.nn.utils.clip_grad_norm_(stages.parameters(), 1.0, float("inf")),
        )

    return {
        "empty": refused(empty),
        "durable": refused(lambda: offloaded(place, "1f1b", dtype="bf16", durable=True)),
        "one group": refused(lambda: offloaded(place, "1f1b", dtype="bf16", process_group=place.pipeline)),
        "one folder": refused(saved),
        "other stage": refused(partial(built, process_group=place.data, pipeline_group=place.pipeline)),
        "other rank": refused(partial(built, process_group=place.pipeline)),
        "order": refused(order),
    }


def resumed(place, kind):
    """Save every stage, load it into another, and train on; return what differs from going on."""
    ends = []
    for loads in (False, True):
        stages = offloaded(place, kind, dtype="bf16", host_memory=TIGHT)
        optimizer = infinity.AdamW(stages.parameters(), lr=0.01, max_norm=1.0)
        folder = Path(place.folder, f"{kind} {place.rank}")
        if loads:
            infinity.load(stages, optimizer, folder)
        else:
            train(place, kind, stages, optimizer, steps=2)
            infinity.save(stages, optimizer, folder)
        train(place, kind, stages, optimizer, steps=2, first=2)
        ends.append(found(place, kind, stages, optimizer))
    return {"different": [key for key, one in ends[0].items() if not same(one, ends[1][key])], "losses": []}


def overflow(place):
    """Train in fp16, where the last stage overflows once; return each rank's scales, and the steps made."""
    stages = offloaded(place, "1f1b", dtype="fp16", host_memory=WIDE)
    optimizer = infinity.AdamW(stages.parameters(), lr=0.01)
    numbers, count = place.numbers("1f1b")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    scaler.scale(torch.ones(()))
    scales = []
    for step in range(4):
        scale = scaler.get_scale() * (1e6 if step == 1 else 1)
        schedule = place.schedule("1f1b", stages, numbers, count)
        schedule._loss_fn = lambda logits, labels, by=scale: cross_entropy(logits, labels) * by
        ids = place.batch(step)
        schedule.step(*([ids] if 0 in numbers else []), **({} if 0 in numbers else {"target": ids}))
        if step == 1 and 0 in numbers:  # what came to this stage is finite
            for one in stages.parameters():
                one.grad.copy_(torch.ones_like(one))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    steps = {int(one["step"]) for one in optimizer.state_dict()["state"].values()}
    return {"scales": scales, "steps": sorted(steps)}


def shared(place):
    """Return what a rank has of the machine, and where its files are."""
    stages = offloaded(place, "1f1b", dtype="bf16", host_memory=WIDE)
    engine = engine_of_model(stages)
    return {
        "budget": infinity.stats(stages).budget_nbytes,
        "local": [engine.ranks.local_rank, engine.ranks.local_size],
        "ranks": engine.ranks.size,
    }


def dying(place):
    """Rank 1 ends before the norm of a step; return the other's error."""
    stages = offloaded(place, "1f1b", dtype="bf16", host_memory=WIDE, timeout_s=20)
    optimizer = infinity.AdamW(stages.parameters(), max_norm=1.0)

    def between(*_):
        through = Path(place.folder, "through")  # its schedule, in which torch's error would name nobody
        if place.rank == 0:
            through.touch()
            return
        while not through.exists():
            time.sleep(0.01)
        os._exit(0)

    return {"error": refused(lambda: train(place, "1f1b", stages, optimizer, between=between))}


def forgotten(place):
    """Return the error where nothing says that the ranks have different stages."""
    no = {"process_group": None, "pipeline_group": None}
    return {
        "error": refused(lambda: offloaded(place, "1f1b", dtype="bf16", host_memory=WIDE, timeout_s=20, **no))
    }


def at_once(place):
    """Return the error of updates in the backward."""
    stages = offloaded(place, "gpipe", dtype="bf16", host_memory=WIDE)
    optimizer = infinity.AdamW(stages.parameters(), update="backward")
    return {"error": refused(lambda: train(place, "gpipe", stages, optimizer))}


def divided(place):
    """Return the error of a schedule without bubbles where ranks share a stage."""
    stages = offloaded(place, "zero bubble", dtype="bf16", host_memory=WIDE)
    return {
        "error": refused(lambda: train(place, "zero bubble", stages, infinity.AdamW(stages.parameters())))
    }


def frozen_stage(place, *, number):
    """Train a pipeline of which one stage is frozen, without an optimizer; return what differs from the same
    in memory, the norms that the other has seen, and the error of a frozen stage that asks for one after all.
    """
    frozen = place.rank == number
    ways, settings = [], {"lr": 0.01, "weight_decay": 0.1, "max_norm": 0.5}
    for ours in (False, True):
        stages = offloaded(place, "1f1b", dtype="bf16", host_memory=TIGHT, timeout_s=20) if ours else None
        stages = stages if ours else prepare(in_memory(place, "1f1b"), torch.bfloat16)
        if frozen:
            stages.requires_grad_(False)
            step = (lambda: None) if ours else partial(place.sum_of_stages, 0.0)
            optimizer = SimpleNamespace(step=step, zero_grad=lambda: None)
        elif ours:
            optimizer = infinity.AdamW(stages.parameters(), **settings)
        else:
            optimizer = ReferenceOfStages(place, stages.parameters(), **settings)
        losses, _ = train(place, "1f1b", stages, optimizer)
        ways.append({"losses": losses, **{name: one.clone() for name, one in stages.state_dict().items()}})
    engine = engine_of_model(stages)
    return {
        "different": [key for key, one in ways[0].items() if not same(one, ways[1][key])],
        "norm": None if frozen else optimizer.grad_norm,
        "late": refused(lambda: engine.stages.each(1.0, "a norm")) if frozen else "",
    }


def together(place):
    """Save stages, whose names are those of the whole, to one folder; return what one process lacks of it."""
    groups = {"process_group": place.data, "pipeline_group": place.pipeline}
    own = {"nvme": place.folder, "host_memory": TIGHT, "dtype": "bf16"}
    with infinity.Init(**own, **groups):
        stages = nn.ModuleDict({str(place.rank): PipelineStageModel(place.rank, place.ranks)})
    optimizer = infinity.AdamW(stages.parameters(), lr=0.01)
    train(place, "1f1b", stages.values(), optimizer, steps=2)
    folder = Path(place.folder, "together")
    infinity.save(stages, optimizer, folder)
    mine = place.of_all(stages.state_dict())
    alone = [dist.new_group([number]) for number in range(dist.get_world_size())][dist.get_rank()]
    with infinity.Init(**own, process_group=alone):
        whole = nn.ModuleDict({str(one): PipelineStageModel(one, place.ranks) for one in range(place.ranks)})
    infinity.load(whole, infinity.AdamW(whole.parameters()), folder)
    state = whole.state_dict()
    expected = {name: one for part in mine for name, one in part.items()}
    return {"different": [name for name in expected | state if not torch.equal(expected[name], state[name])]}


OTHERS = {
    "together": together,
    "together unlike": partial(together_unlike, refused=refused),
    "frozen first": partial(frozen_stage, number=0),
    "frozen last": partial(frozen_stage, number=1),
    "unnamed": unnamed,
    "wrong": wrong,
    "resumed": partial(resumed, kind="interleaved"),
    "resumed zero bubble": partial(resumed, kind="zero bubble"),
    "overflow": overflow,
    "shared": shared,
    "dying": dying,
    "divided": divided,
    "forgotten": forgotten,
    "at once": at_once,
    "assigned": partial(assigned, foreach=True),
    "assigned one by one": partial(assigned, foreach=False),
    "disagreeing": disagreeing,
    "default device": with_default_device,
    "other paths": lambda place: other_paths(place, sys.modules[__name__]),
}


def run(place, name):
    """Do a case: one of OTHERS, or KIND, DTYPE and further options, or evaluated KIND, DTYPE."""
    if name in OTHERS:
        return OTHERS[name](place)
    if name.startswith("evaluated "):
        kind, dtype = name.removeprefix("evaluated ").split(", ")
        return evaluated(place, sys.modules[__name__], kind=kind, dtype=dtype)
    kind, dtype, *options = name.split(", ")
    return compare(
        place,
        kind,
        *options,
        dtype=dtype,
        max_norm=0.5 if "max_norm" in options else None,
        clip=0.5 if "clip_grad_norm_" in options else None,
    )


def main(folder, data, *names):
    """Do cases. data: how many ranks share a stage."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh(
        "cpu", (int(data), dist.get_world_size() // int(data)), mesh_dim_names=("dp", "pp")
    )
    place = Place(folder, mesh["dp"].get_group(), mesh["pp"].get_group())
    answer_all(folder, names, partial(run, place))


if __name__ == "__main__":
    main(*sys.argv[1:])

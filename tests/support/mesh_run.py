"""What the ranks of a mesh do in the tests of DTensor parameters: cases by name, an answer as JSON each.

    torchrun --nproc-per-node 2 tests/support/mesh_run.py FOLDER DATA CASE [CASE ...]  # or launches.forked

Rank R writes FOLDER/R.json: {case: answer, or {"error": text}}. DATA: how many ranks have different data; the
others are tensor parallel. The reference is the same parallel model, of the same torch, run in memory: plain
DTensors, whose local tensors the reference recipe steps, each with the mean over data of its gradient.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity
from answers import answer_all, error_of
from infinity.engine.engine import engine_of_model
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference import recipe as reference
from infinity.reference.moments import widened
from mesh_adapters import adapted
from mesh_deepspeed import DEEPSPEED
from mesh_edits import edits
from mesh_fused import fused
from mesh_kinds import KINDS, VOCABULARY, WIDTH, by_plan, from_transformers, generated
from mesh_paths import dying, paths
from mesh_saves import durable, exported, loaded_from_dcp, saves

TOKENS, BATCH = 7, 5  # so that inputs of checkpoints, in bf16, are large enough to be divided
COMPUTES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIGHT, WIDE = "1MiB", "64MiB"


class MeshBlock(nn.Module):
    """As Llama's, whose heads are divided among the ranks."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        normed = self.norms[0](hidden)
        heads = [one(normed).unflatten(-1, (-1, 16)).transpose(1, 2) for one in (self.q, self.k, self.v)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norms[1](hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class MeshModel(nn.Module):
    """A small language model; its vocabulary is divided unevenly."""

    def __init__(self, *, checkpointed=False, tied=False):
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(MeshBlock() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return self.head(self.norm(hidden))


IN_BLOCK = {
    **{name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")},
    **{name: RowwiseParallel() for name in ("out", "down")},
}
OUTSIDE = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def parallel(model, mesh, *, replicated=False):
    """Make a model's weights DTensors, and return it."""
    parallelize_module(model, mesh, OUTSIDE)
    for block in model.blocks:
        parallelize_module(block, mesh, IN_BLOCK)
    if replicated:
        for name, one in list(model.norm.named_parameters()):
            whole = distribute_tensor(one, mesh, [Replicate()])
            model.norm.register_parameter(name, nn.Parameter(whole))
        model.norm.register_forward_pre_hook(
            lambda _, given: (DTensor.from_local(given[0], mesh, [Replicate()], run_check=False),)
        )
        model.norm.register_forward_hook(lambda _, given, result: result.to_local())
    return model


def local(tensor):
    """Return a copy of what this rank has."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Place:
    """Where this process is in the mesh."""

    def __init__(self, folder, data):
        self.folder = folder
        ranks = dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (data, ranks // data), mesh_dim_names=("dp", "tp"))
        self.data, self.tensor = self.mesh["dp"], self.mesh["tp"]

    def batch(self, step):
        drawn = torch.Generator().manual_seed(100 + step + 1000 * self.data.get_local_rank())
        return torch.randint(VOCABULARY, (BATCH, TOKENS), generator=drawn)

    def mean_of_data(self, grad):
        group = self.data.get_group()
        if dist.get_world_size(group) == 1:
            return grad
        rows = [torch.empty_like(grad) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, grad.contiguous(), group=group)
        total = rows[0].float()
        for row in rows[1:]:
            total += row.float()
        return (total / len(rows)).to(grad.dtype)

    def sum_of_parts(self, own):
        rows = [torch.zeros((), dtype=torch.float64) for _ in range(self.tensor.size())]
        dist.all_gather(rows, torch.tensor(own, dtype=torch.float64), group=self.tensor.get_group())
        return sum(map(float, rows), 0.0)


class ParallelReference(ReferenceAdamW):
    """The recipe's AdamW over the local tensors of a plain parallel model; its norms are of the whole."""

    def __init__(self, place, model, dtype, **options):
        self.place, self.model, self.counted = place, model, {}
        kept = {}
        parts = nn.ParameterList()
        for module in model.modules():
            for name, one in list(module._parameters.items()):
                if one is None:
                    continue
                if id(one) not in kept:
                    kept[id(one)] = self._twin(one, dtype, parts)
                module._parameters[name] = kept[id(one)]
        super().__init__(parts, **options)

    def _twin(self, one, dtype, parts):
        part = nn.Parameter(local(one).float(), one.requires_grad)
        prepare(nn.ParameterList([part]), dtype)
        parts.append(part)
        sharded = isinstance(one, DTensor) and not one.placements[0].is_replicate()
        self.counted[part] = sharded or self.place.tensor.get_local_rank() == 0
        twin = part.data
        if isinstance(one, DTensor):
            placed = {"shape": one.shape, "stride": one.stride(), "run_check": False}
            twin = DTensor.from_local(twin, one.device_mesh, one.placements, **placed)
        twin = nn.Parameter(twin, one.requires_grad)

        def arrived(whole):
            grad, whole.grad = whole.grad, None
            if isinstance(grad, DTensor):
                grad = grad.redistribute(whole.device_mesh, whole.placements).to_local()
            torch.autograd.backward(part, self.place.mean_of_data(grad))

        if one.requires_grad:
            twin.register_post_accumulate_grad_hook(arrived)
        return twin

    def _clip_factor(self):
        if self.max_norm is None:
            return None
        norm = torch.tensor(self.norm(), dtype=torch.float64).float()
        self.last_norm = float(norm)
        return torch.clamp(reference.f32(self.max_norm) / (norm + reference.f32(1e-6)), max=1.0)

    def norm(self):
        stored = {one: reference._stored(one)[0] for one in self._parameters() if one.grad is not None}
        own = [reference.sum_squares(grad) for one, grad in stored.items() if self.counted[one]]
        return self.place.sum_of_parts(sum(own, 0.0)) ** 0.5

    def clip(self, limit):
        """Do what torch's clip_grad_norm_ does, over all ranks."""
        total = torch.tensor(self.norm(), dtype=torch.float64)
        coefficient = torch.clamp(limit / (total + 1e-6), max=1.0).float()
        for one in self._parameters():
            if one.grad is not None:
                value, factor = reference._stored(one)
                reference._store(one, value, factor * coefficient)
        return total


def loss_of(model, ids):
    answer = model(ids)
    logits = getattr(answer, "logits", answer)
    return functional.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1, 1).flatten())


def train(place, model, optimizer, *, steps=3, first=0, clip=None, accumulated=1, between=None):
    """Train; return the losses and the norms that this rank has seen."""
    losses, norms = [], []
    for step in range(first, first + steps):
        for part in range(accumulated):
            loss = loss_of(model, place.batch(10 * step + part))
            losses.append(float(loss.detach()))
            loss.backward()
        if clip is not None:
            norms.append(float(clip()))
        if between is not None:
            between(step)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def made(place, *options):
    for kind in KINDS:
        if kind in options:
            return (by_plan if "planned" in options else from_transformers)(place, kind)
    names = ("checkpointed", "tied")
    model = MeshModel(**{one: one in options for one in names})
    if "frozen" in options:
        for block in model.blocks:
            block.q.requires_grad_(False)
    return parallel(model, place.tensor, replicated="replicated" in options)


def offloaded(place, *options, dtype="fp32", **settings):
    """Build the parallel model in Init, or before it."""
    with infinity.Init(
        **{
            "mesh": place.mesh,
            "data": "dp",
            "dtype": dtype,
            "nvme": place.folder,
            "host_memory": WIDE,
            **settings,
        }
    ) as init:
        model = made(place, *options) if "taken in" not in options else None
        if model is None:
            with torch.random.fork_rng():
                model = build_outside(place, *options)
            init.take_in(model)
    return model


def build_outside(place, *options):
    """Build a model of DTensors as it is without Init."""
    return made(place, *options)


def compare(place, *options, dtype="fp32", max_norm=None, clip=None):
    """Train the parallel model in memory, and the same offloaded; return what differs."""
    accumulated = 2 if "accumulated" in options else 1
    settings = {"lr": 0.01, "weight_decay": 0.1, "max_norm": max_norm}
    small = next((one.split()[0] for one in options if one.endswith(" moments")), "fp32")
    same = "Qwen3" in options or place.data.size() > 1  # else the reference is transformers' own
    plain = made(place, *(one for one in options if same or one != "planned"))
    other = ParallelReference(place, plain, COMPUTES[dtype], state_dtype=small, **settings)
    clips = clip and partial(other.clip, clip)
    losses, norms = train(place, plain, other, clip=clips, accumulated=accumulated)

    stage = {"stage": 1} if "stage 1" in options else {}
    stage |= {"experts": "whole"} if "Mixtral" in options else {}
    stage |= {"state_dtype": small}
    if "in parts" in options or "whole" in options:
        stage["partition_activations"] = "in parts" in options
    model = offloaded(
        place, *options, dtype=dtype, host_memory=TIGHT if "tight" in options else WIDE, **stage
    )
    mine = infinity.AdamW(
        [one for one in model.parameters() if one.requires_grad],
        update="backward" if "in the backward" in options else "forward",
        **settings,
    )
    clips = clip and partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), clip)

    def between(step):
        if "looked at" in options:
            look(place, model, grads="in the backward" not in options)

    ours, own = train(place, model, mine, clip=clips, accumulated=accumulated, between=between)
    expected, engine = {name: local(one) for name, one in plain.named_parameters()}, engine_of_model(model)
    actual = model.state_dict()
    different = [name for name, one in expected.items() if not torch.equal(one, local(actual[name]))]
    kinds = [name for name, one in plain.named_parameters() if isinstance(one, DTensor)]
    assert kinds == [name for name, one in model.named_parameters() if isinstance(one, DTensor)]
    assert all(isinstance(actual[name], DTensor) for name in kinds)
    assert {one.dtype for one in model.parameters()} == {COMPUTES[dtype]}
    moments = mine.state_dict()["state"]
    for number, part in enumerate(other.param_groups[0]["params"]) if "frozen" not in options else ():
        different += [
            f"{key} of {number}"
            for key, expected_one in zip(
                ("exp_avg", "exp_avg_sq"), widened(other.state[part], small), strict=True
            )
            if not torch.equal(expected_one, local(moments[number][key]).float())
        ]
    return {
        "different": different + [f"loss {losses} {ours}"] * (losses != ours),
        "norms": [mine.grad_norm, other.last_norm] if max_norm else own,
        "norms differ": max((abs(one / two - 1) for one, two in zip(own, norms, strict=True)), default=0),
        "in parts": engine.parts is not None and engine.parts.saved > 0,
        "held": [
            sum(one.numel for unit in engine.units for one in unit.layout.segments),
            sum(local(one).numel() for one in plain.parameters()),
        ],
        "nvme": infinity.stats(model).nvme_written_nbytes,
    }


def look(place, model, *, grads):
    """Do between steps what users do."""
    with torch.no_grad():
        model(place.batch(99))
    model.state_dict()
    weight = model.blocks[0].q.weight
    with infinity.gathered(model):
        assert weight.full_tensor().shape == weight.shape
        assert weight.to_local().shape == (WIDTH // place.tensor.size(), WIDTH)
    if not grads:
        return
    grad = model.blocks[0].down.weight.grad
    assert grad.full_tensor().shape == grad.shape
    assert torch.equal(grad.to_local(), grad.clone().to_local())


def run(place, name):
    if name in SPECIAL:
        return SPECIAL[name](place)
    options = name.split(", ")
    return compare(
        place,
        *options,
        dtype="bf16" if "bf16" in options else "fp32",
        max_norm=0.5 if "max_norm" in options else None,
        clip=0.5 if "clip_grad_norm_" in options else None,
    )


class Holder(nn.Module):
    """Has parameters that are given to it."""

    def __init__(self, *given):
        super().__init__()
        for number, one in enumerate(given):
            self.register_parameter(f"part{number}", nn.Parameter(one))


def held(place, *parts, mesh=None, **settings):
    """Build a module of DTensors, one for each of `parts`, which make them, in Init."""
    with infinity.Init(
        **{"mesh": mesh or place.mesh, "data": "dp", "nvme": place.folder, "host_memory": WIDE, **settings}
    ):
        return Holder(*(one() for one in parts))


def wrong(place):
    """Return the errors of what cannot be kept, and of what Init is told wrongly."""
    mesh, ranks = place.mesh, dist.get_world_size()
    whole = torch.ones(4, 4)
    across = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("x", "y"))
    flat = init_device_mesh("cpu", (ranks,), mesh_dim_names=("all",))

    back = DeviceMesh("cpu", [list(range(ranks))[::-1]], mesh_dim_names=("dp", "tp"))

    def partial_one():
        return DTensor.from_local(whole, place.tensor, [Partial()], run_check=False)

    def one_rank_alone():
        dist.barrier()  # within 3 s of each other
        placed = [Partial() if place.tensor.get_local_rank() else Shard(0)]
        told = error_of(
            lambda: held(place, lambda: DTensor.from_local(whole, place.tensor, placed), timeout_s=3)
        )
        dist.barrier()  # the other rank has waited for the timeout
        return told

    def sharded(on=place.tensor):
        return distribute_tensor(whole, on, [Shard(0)] * on.ndim)

    def told(**settings):
        with infinity.Init(nvme=place.folder, host_memory=WIDE, **settings):
            Holder(whole)

    def saved(how):
        model = held(place, sharded)
        optimizer = infinity.AdamW(model.parameters())
        return error_of(lambda: how(model, optimizer))

    def assign(model, optimizer):
        model.part0.grad = torch.zeros(4, 4, dtype=model.part0.dtype)
        optimizer.step()

    return {
        "partial": error_of(lambda: held(place, partial_one)),
        "one rank alone": one_rank_alone(),
        "two meshes": error_of(lambda: held(place, partial(sharded, other["x"]), mesh=across, data="dp")),
        "over data": error_of(lambda: held(place, partial(sharded, across), mesh=across, data="dp")),
        "no mesh": error_of(lambda: held_without(place, sharded)),
        "missing": error_of(lambda: told(mesh=mesh, data="dq")),
        "not said": error_of(lambda: told(mesh=mesh)),
        "twice": error_of(lambda: told(mesh=mesh, data=("dp", "dp"))),
        "without": error_of(lambda: told(data="dp")),
        "both": error_of(lambda: told(mesh=mesh, data="dp", process_group=place.data)),
        "descending": error_of(lambda: told(mesh=back, data="dp")),
        "on descending": error_of(lambda: held(place, partial(sharded, back["tp"]), mesh=across, data="dp")),
        "unnamed": error_of(lambda: told(mesh=DeviceMesh("cpu", list(range(ranks))), data=())),
        "pipeline": error_of(lambda: told(mesh=mesh, data="dp", pipeline_group=flat)),
        "assigned": saved(assign),
        "plain state": saved(lambda model, _: model.load_state_dict({"part0": whole})),
        "muon": error_of(lambda: infinity.Muon(held(place, sharded).parameters())),
        "released": saved(lambda model, _: model.part0.full_tensor()),
        "in place": saved(lambda model, _: model.part0.add_(1)),
        "parallelized later": error_of(lambda: later(place)),
    }


def held_without(place, part):
    with infinity.Init(nvme=place.folder, host_memory=WIDE, process_group=place.data):
        Holder(part())


def later(place):
    with infinity.Init(mesh=place.mesh, data="dp", nvme=place.folder, host_memory=WIDE):
        model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model, place.tensor, {"0": ColwiseParallel()})


def overflow(place):
    """Let the gradients of one rank alone overflow; return the scaler's scales, and the steps made."""
    with infinity.Init(mesh=place.mesh, data="dp", nvme=place.folder, host_memory=WIDE, dtype="bf16"):
        model = parallel(MeshModel(), place.tensor)
    optimizer = infinity.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales, alone = [], dist.get_rank() == dist.get_world_size() - 1
    for step in range(4):
        loss = loss_of(model, place.batch(step))
        if step == 1 and alone:  # of a column that no other rank has
            model.blocks[0].up.bias.register_hook(spoil)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    counts = {int(one["step"]) for one in optimizer.state.values()}
    return {"scales": scales, "steps": sorted(counts)}


def spoil(grad):
    """Let a gradient, once, have an element that is infinite."""
    if not spoiled:
        spoiled.append(True)
        grad.to_local()[0] = float("inf")


spoiled = []


def states(place):
    """Go on from state_dicts, of model and optimizer, in another engine; edit, and look at state."""
    model = offloaded(place, dtype="bf16", host_memory=TIGHT)
    optimizer = infinity.AdamW(model.parameters(), lr=0.01)
    train(place, model, optimizer, steps=2)
    saved = model.state_dict(), optimizer.state_dict()
    weight = model.blocks[0].q.weight
    state = optimizer.state[weight]
    problems = []
    if not isinstance(state["exp_avg"], DTensor) or state["exp_avg"].placements != weight.placements:
        problems.append("exp_avg is placed otherwise")
    state["exp_avg"] = state["exp_avg"].redistribute(placements=[Replicate()])
    if not torch.equal(
        local(state["exp_avg"]), local(saved[1]["state"][places_of(optimizer)[id(weight)]]["exp_avg"])
    ):
        problems.append("exp_avg was changed by being put back")
    in_place = error_of(state["exp_avg"].zero_)
    losses, _ = train(place, model, optimizer, steps=2, first=2)
    again = offloaded(place, dtype="bf16", host_memory=WIDE)
    again.load_state_dict(saved[0])
    other = infinity.AdamW(again.parameters(), lr=0.01)
    other.load_state_dict(saved[1])
    loaded = again.state_dict()
    lost = [name for name, one in saved[0].items() if not torch.equal(local(one), local(loaded[name]))]
    with infinity.gathered(again, write=True), torch.no_grad():
        again.head.weight.mul_(2)
        again.embedding.weight.to_local().add_(1)
    edited = again.state_dict()
    if not torch.equal(local(edited["head.weight"]), local(saved[0]["head.weight"]) * 2):
        problems.append("an edit of a DTensor was lost")
    if not torch.equal(local(edited["embedding.weight"]), local(saved[0]["embedding.weight"]) + 1):
        problems.append("an edit of a local tensor was lost")
    unwritten = error_of(lambda: edit_unwritten(again))
    return {"problems": problems + lost, "losses": losses, "in place": in_place, "unwritten": unwritten}


def edit_unwritten(model):
    with infinity.gathered(model), torch.no_grad():
        model.head.weight.to_local().add_(1)


def places_of(optimizer):
    return {id(one): number for number, one in enumerate(optimizer.param_groups[0]["params"])}


def reduced_by_hand(place):
    """Return the error of a model whose plan sums gradients of ordinary parameters over the ranks itself."""
    with infinity.Init(mesh=place.mesh, data="dp", nvme=place.folder, host_memory=WIDE):
        model = from_transformers(place, "Qwen3")
    return {"error": error_of(loss_of(model, place.batch(0)).backward)}


def whole_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def saved_by_dcp(place):
    """Save state_dicts with torch.distributed.checkpoint; return what one process finds in the files."""
    import torch.distributed.checkpoint as dcp

    model = offloaded(place, dtype="fp32", host_memory=TIGHT)
    optimizer = infinity.AdamW(model.parameters(), lr=0.01)
    train(place, model, optimizer, steps=2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    folder = f"{place.folder}/dcp"
    dcp.save(state, checkpoint_id=folder)
    whole = {name: whole_of(one) for name, one in state["model"].items()}
    moments = {number: whole_of(one["exp_avg"]) for number, one in state["optimizer"].items()}
    alone = {
        "model": {name: torch.zeros_like(one) for name, one in whole.items()},
        "optimizer": {number: {"exp_avg": torch.zeros_like(one)} for number, one in moments.items()},
    }
    dcp.load(alone, checkpoint_id=folder, no_dist=True)
    lost = [name for name, one in whole.items() if not torch.equal(one, alone["model"][name])]
    lost += [n for n, one in moments.items() if not torch.equal(one, alone["optimizer"][n]["exp_avg"])]
    losses, _ = train(place, model, optimizer, steps=2, first=2)
    again = offloaded(place, dtype="fp32", host_memory=WIDE)
    fresh = infinity.AdamW(again.parameters(), lr=0.01)
    train(place, again, fresh, steps=1)
    empty = {"model": again.state_dict(), "optimizer": fresh.state_dict()["state"]}
    dcp.load(empty, checkpoint_id=folder)
    again.load_state_dict(empty["model"])
    fresh.load_state_dict({"state": empty["optimizer"], "param_groups": fresh.state_dict()["param_groups"]})
    on, _ = train(place, again, fresh, steps=2, first=2)
    return {"lost": lost, "goes on": on == losses}


SPECIAL = {
    **DEEPSPEED,
    "durable": lambda place: durable(place, sys.modules[__name__]),
    "loaded from dcp": lambda place: loaded_from_dcp(place, sys.modules[__name__]),
    "exported": lambda place: exported(place, sys.modules[__name__]),
    "saves": lambda place: saves(place, sys.modules[__name__]),
    "edits": edits,
    "paths": paths,
    "dying": dying,
    "fused": lambda place: fused(place, sys.modules[__name__]),
    "adapters": lambda place: adapted(place, sys.modules[__name__]),
    "reduced by hand": reduced_by_hand,
    "generated": generated,
    "saved by dcp": saved_by_dcp,
    "wrong": wrong,
    "overflow": overflow,
    "states": states,
}


def main(folder, data, *names):
    """Do cases. data: how many ranks have different data."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = Place(folder, int(data))
    answer_all(folder, names, partial(run, place))


if __name__ == "__main__":
    main(*sys.argv[1:])

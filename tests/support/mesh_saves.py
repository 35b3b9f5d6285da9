"""What ranks of a mesh save, and load on it, on other meshes and without one: cases of mesh_run.py."""

import os
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import infinity
from answers import error_of
from infinity.checkpoint.deepspeed_files import load_deepspeed
from infinity.engine.engine import engine_of, engine_of_model
from infinity.tensors import as_bytes, local
from models import MODELS


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state(model, optimizer):
    """Return the hash of every master and moment, whole, and the steps made."""
    found = {}
    for name, one in model.named_parameters():
        fields = ["master", "m", "v"] if optimizer.state.get(one) else ["master"]
        read = engine_of(one).parameters.read(one, fields)
        found[name] = [xxhash.xxh3_64_hexdigest(as_bytes(whole(values))) for values in read]
    found["steps"] = sorted({int(one["step"]) for one in optimizer.state.values()})
    return found


def told(model, optimizer, go_on):
    """Return what a training loses and measures in its next steps."""
    losses, norms = go_on(model, optimizer)
    return [losses, norms, state(model, optimizer)]


class Saves:
    """One training, saved on its mesh, and what loads it."""

    def __init__(self, place, mesh_run, *options, **settings):
        self.place, self.mesh_run = place, mesh_run
        self.options = options
        self.settings = {"dtype": "bf16", "host_memory": mesh_run.WIDE, **settings}

    def start(self, place=None, **more):
        """Build on a mesh."""
        model = self.mesh_run.offloaded(place or self.place, *self.options, **{**self.settings, **more})
        return model, self.optimizer(model)

    def start_alone(self, **more):
        """Build on the ranks that share data, without tensor parallelism."""
        place = self.place
        with infinity.Init(**{"process_group": place.data, "nvme": place.folder, **self.settings, **more}):
            model = self.mesh_run.MeshModel()
        return model, self.optimizer(model)

    def optimizer(self, model):
        return infinity.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    def train(self, first, steps, place=None):
        def go_on(model, optimizer):
            clip = lambda: torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.5)  # noqa: E731
            return self.mesh_run.train(
                place or self.place, model, optimizer, steps=steps, first=first, clip=clip
            )

        return go_on


def saves(place, mesh_run):
    """Save, go on; load on the same mesh, on other ranks, and back; return what is not as it should be."""
    one, wrong = Saves(place, mesh_run, "replicated", "taken in"), []
    folder, rank = Path(place.folder, "mesh-saved"), dist.get_rank()

    def check(what, holds):
        wrong.extend([] if holds else [what])

    model, optimizer = one.start(host_memory=mesh_run.TIGHT)
    one.train(0, 2)(model, optimizer)
    saved = state(model, optimizer)
    torch.manual_seed(50 + rank)
    infinity.save(model, optimizer, folder, extra={"rank": torch.tensor(rank)})
    drawn = torch.rand(3)
    infinity.save_pretrained(model, f"{folder}-hub", max_shard_size="90kB")
    infinity.save_pretrained(model, f"{folder}-fp32", torch.float32)
    went_on = told(model, optimizer, one.train(2, 2))

    model, optimizer = one.start(host_memory=mesh_run.WIDE)
    one.train(0, 1)(model, optimizer)
    torch.manual_seed(9)
    extra = infinity.load(model, optimizer, folder)
    check("extra", int(extra["rank"]) == rank)
    check("generators", torch.equal(torch.rand(3), drawn))
    check("state on the same mesh", state(model, optimizer) == saved)
    check("steps on the same mesh", told(model, optimizer, one.train(2, 2)) == went_on)

    check("dcp over the mesh", not unlike_dcp(model, optimizer, folder))
    model, optimizer = one.start_alone(host_memory=mesh_run.WIDE)
    extra = infinity.load(model, optimizer, folder)
    check("state without a mesh", state(model, optimizer) == saved)
    first = int(place.mesh.mesh[place.data.get_local_rank(), 0])  # of those that had these data
    check("dcp without a mesh", not unlike_dcp(model, optimizer, folder, went_on=False))
    check("extra without a mesh", int(extra["rank"]) == first)
    back = f"{folder}-alone-{place.tensor.get_local_rank()}"
    infinity.save(model, optimizer, back)
    infinity.save_pretrained(model, f"{back}-hub", max_shard_size="90kB")
    infinity.save_pretrained(model, f"{back}-fp32", torch.float32)
    dist.barrier()
    for kind in ("hub", "fp32"):
        names = sorted(path.name for path in Path(f"{back}-{kind}").iterdir())
        check(f"names of {kind}", names == sorted(path.name for path in Path(f"{folder}-{kind}").iterdir()))
        for name in names:
            same = Path(f"{back}-{kind}", name).read_bytes() == Path(f"{folder}-{kind}", name).read_bytes()
            check(f"{kind} of {name}", same)

    if place.data.size() > 1:
        across = mesh_run.Place(place.folder, 1)  # all tensor parallel
        model, optimizer = one.start(across, nvme=place.folder)
        infinity.load(model, optimizer, folder)
        check("state on another mesh", state(model, optimizer) == saved)
        check("trains on another mesh", told(model, optimizer, one.train(2, 1, across))[2]["steps"] == [3])

    model, optimizer = one.start()
    infinity.load(model, optimizer, f"{folder}-alone-0")
    check("state from without a mesh", state(model, optimizer) == saved)
    check("steps from without a mesh", told(model, optimizer, one.train(2, 2))[2:] == went_on[2:])
    check("pieces", pieces_of(folder) == dist.get_world_size())
    return {"wrong": wrong, **refusals(one, model, optimizer, folder)}


def load_own(model, optimizer, folder):
    """Load by a name under which each rank finds a checkpoint of its own."""
    here = Path.cwd()
    own = folder.parent / f"own-{dist.get_rank()}"
    own.mkdir()
    (own / "saved").symlink_to(folder if dist.get_rank() else f"{folder}-alone-0")
    os.chdir(own)
    try:
        infinity.load(model, optimizer, "saved")
    finally:
        os.chdir(here)


def unlike_dcp(model, optimizer, folder, *, went_on=True):
    """Return the tensors that torch.distributed.checkpoint reads otherwise than infinity.load, into DTensors
    where the model has some. went_on: the model has changed since: it is loaded first.
    """
    if went_on:
        infinity.load(model, optimizer, folder)
    expected, found = {}, {}
    for name, one in model.named_parameters():
        for key, field in (("", "master"), ("exp_avg.", "m"), ("exp_avg_sq.", "v")):
            (expected[key + name],) = engine_of(one).parameters.read(one, [field])
            found[key + name] = torch.zeros_like(expected[key + name])
    dcp.load(found, storage_reader=infinity.CheckpointReader(folder))
    return [name for name, one in expected.items() if not torch.equal(local(one), local(found[name]))]


def durable(place, mesh_run):
    """Commit steps, copy the run, and go on from the copy; return what is not as in a run of one life."""
    one, wrong = Saves(place, mesh_run, dtype="fp32", host_memory=mesh_run.TIGHT), []
    model, optimizer = one.start()
    one.train(0, 2)(model, optimizer)
    expected = told(model, optimizer, one.train(2, 1))
    run = Path(place.folder, "mesh-run")
    run.mkdir(exist_ok=True)
    model, optimizer = one.start(durable=True, nvme=str(run))
    if infinity.resume(model, optimizer) != 0:
        wrong.append("a new run has steps")
    one.train(0, 2)(model, optimizer)
    infinity.commit(model)
    infinity.snapshot(model, f"{run}-copied").wait()
    model, optimizer = one.start(durable=True, nvme=f"{run}-copied")
    if infinity.resume(model, optimizer) != 2:
        wrong.append("steps of the copy")
    if told(model, optimizer, one.train(2, 1)) != expected:
        wrong.append("the copy goes on otherwise")
    return {"wrong": wrong}


def loaded_from_dcp(place, mesh_run):
    """Train in memory, and offloaded; save with torch.distributed.checkpoint, and load that on a mesh and
    without one; return what is lost.
    """
    one, lost, folder = Saves(place, mesh_run, dtype="fp32", host_memory=mesh_run.WIDE), [], place.folder
    plain = mesh_run.made(place)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    same = types.SimpleNamespace(batch=lambda step: torch.full((2, 7), 3 + step))
    mesh_run.train(same, plain, theirs, steps=2)
    weights, moments = get_state_dict(plain, theirs)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=f"{folder}/theirs")
    dist.barrier()
    expected = {name: [local(parameter)] for name, parameter in plain.named_parameters()}
    for name, of in moments["state"].items():
        expected[name] += [local(of["exp_avg"]), local(of["exp_avg_sq"])]

    def fields(model):
        return {
            name: list(map(local, engine_of(p).parameters.read(p, ["master", "m", "v"])))
            for name, p in model.named_parameters()
        }

    def different(found, wanted):
        return [
            name
            for name, values in wanted.items()
            for mine, other in zip(found[name], values, strict=True)
            if not torch.equal(mine, other)
        ]

    model, optimizer = one.start()
    infinity.load_dcp(model, optimizer, f"{folder}/theirs")
    lost += different(fields(model), expected)
    lost += ["steps"] * (state(model, optimizer)["steps"] != [2])
    one.train(2, 1)(model, optimizer)
    ours = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    dcp.save(ours, checkpoint_id=f"{folder}/ours")
    dcp.save({"model": ours["model"]}, checkpoint_id=f"{folder}/weights")
    saved = state(model, optimizer)
    alone, other = one.start_alone()
    infinity.load_dcp(alone, other, f"{folder}/ours")
    lost += ["of ours"] * (state(alone, other) != saved)
    answer = {
        "lost": lost,
        "none": error_of(lambda: infinity.load_dcp(alone, other, f"{folder}/run")),
        "no moments": error_of(lambda: infinity.load_dcp(alone, other, f"{folder}/weights")),
    }
    with infinity.Init(process_group=place.data, nvme=folder, host_memory=mesh_run.WIDE):
        another = torch.nn.ModuleDict({"embedding": torch.nn.Linear(3, 4)})
    sgd = infinity.SGD(another.parameters())
    answer["fits"] = error_of(lambda: infinity.load_dcp(another, None, f"{folder}/ours"))
    answer["kind"] = error_of(lambda: infinity.load_dcp(another, sgd, f"{folder}/ours"))
    dist.barrier()  # the store ends with its process
    return answer


def saved_in_int8(one, folder):
    model, optimizer = one.start(state_dtype="int8")
    infinity.save(model, optimizer, f"{folder}-int8")


def one_element_in_int8(one, folder):
    """Save a weight of which one rank has all, and the others have nothing."""
    with infinity.Init(
        mesh=one.place.mesh, data="dp", nvme=one.place.folder, **one.settings, state_dtype="int8"
    ) as init:
        model = torch.nn.Sequential(torch.nn.LayerNorm(1, bias=False))
        whole = distribute_tensor(model[0].weight.detach(), one.place.tensor, [Shard(0)])
        model[0].weight = torch.nn.Parameter(whole)
        init.take_in(model)
    infinity.save(model, infinity.AdamW(model.parameters()), f"{folder}-int8")


def given_distributed(one, model, folder):
    mine = distribute_tensor(torch.ones(4), one.place.tensor, [Shard(0)])
    infinity.save(model, None, f"{folder}-given", extra={"mine": mine})


def exported(place, mesh_run):
    """Export a model that transformers has divided, from its mesh, and loaded on ranks that have it whole;
    return the files that differ.
    """
    import transformers

    one = Saves(place, mesh_run, "Llama", dtype="bf16")
    model, optimizer = one.start()
    one.train(0, 1)(model, optimizer)
    folder, number = f"{place.folder}/llama", place.tensor.get_local_rank()
    infinity.save(model, optimizer, f"{folder}-saved")
    infinity.save_pretrained(model, f"{folder}-mesh")
    with infinity.Init(process_group=place.data, nvme=place.folder, **one.settings):
        kind, files = transformers.LlamaForCausalLM, f"{place.folder}/Llama"
        alone = kind.from_pretrained(files, dtype=torch.float32)
    infinity.load(alone, None, f"{folder}-saved")
    infinity.save_pretrained(alone, f"{folder}-{number}")
    ours, theirs = (
        {path.name: path.read_bytes() for path in Path(of).iterdir()}
        for of in (f"{folder}-mesh", f"{folder}-{number}")
    )
    plain = kind.from_pretrained(f"{folder}-mesh")
    names = dict(plain.named_parameters()).keys() == dict(alone.named_parameters()).keys()
    return {
        "different": [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)],
        "names": names,
        "one rank": failed_export(place, f"{folder}-failed"),
    }


def failed_export(place, folder):
    """Return the error of an export of stacks, which have another form in files, as one rank cannot read."""
    with infinity.Init(
        mesh=place.mesh, data="dp", nvme=place.folder, host_memory="64MiB", experts="whole"
    ) as init:
        model = MODELS["mixtral"]()
        for module in list(model.modules()):
            for name, one in list(module.named_parameters(recurse=False)):
                if one.ndim == 3:
                    cut = distribute_tensor(one.detach(), place.tensor, [Shard(1)])
                    setattr(module, name, torch.nn.Parameter(cut))
        init.take_in(model)
    read = engine_of_model(model).parameters.read
    if place.tensor.get_local_rank():
        engine_of_model(model).parameters.read = cannot_read
    error = error_of(lambda: infinity.save_pretrained(model, folder))
    engine_of_model(model).parameters.read = read
    return [error, Path(folder).exists()]


def cannot_read(*_):
    raise OSError("the disk of one rank")


def pieces_of(folder):
    """Return how many ranks have written weights."""
    return len({path.name.split("-")[1] for path in folder.glob("weights-*")})


def refusals(one, model, optimizer, folder):
    """Return the errors of what cannot be loaded or saved; the model stays as it is."""
    rank = dist.get_rank()
    before = state(model, optimizer)

    def other(layer):
        with infinity.Init(mesh=one.place.mesh, data="dp", nvme=one.place.folder, **one.settings) as init:
            changed = torch.nn.ModuleDict({"embedding": layer})
            init.take_in(changed)
        infinity.load(changed, None, folder)

    answer = {
        "int8 of one element": error_of(lambda: one_element_in_int8(one, folder)),
        "given": error_of(lambda: given_distributed(one, model, folder)),
        "int8": error_of(lambda: saved_in_int8(one, folder)),
        "deepspeed": error_of(lambda: load_deepspeed(model, None, folder)),
        "other folders": error_of(lambda: infinity.save(model, optimizer, f"{folder}-by-{rank}")),
        "other folder": error_of(
            lambda: infinity.load(model, optimizer, folder if rank else f"{folder}-alone-0")
        ),
        "other manifests": error_of(lambda: load_own(model, optimizer, folder)),
        "no checkpoint": error_of(lambda: infinity.load(model, optimizer, f"{folder}-none")),
        "another model": error_of(lambda: other(torch.nn.Linear(4, 4))),
        "shapes": error_of(lambda: other(torch.nn.Embedding(8, 64))),
        "folder": str(folder),
    }
    dist.barrier()
    last = max(folder.glob("moments-*"))
    if rank == 0:
        os.truncate(last, last.stat().st_size // 2)
    dist.barrier()
    answer["cut"] = error_of(lambda: infinity.load(model, optimizer, folder))
    manifest = folder / "manifest.json"
    dist.barrier()
    if rank == 0:
        manifest.write_text(manifest.read_text()[:-1000])
    dist.barrier()
    answer["cut manifest"] = error_of(lambda: infinity.load(model, optimizer, folder))
    answer["changed"] = state(model, optimizer) != before
    answer["left"] = [path.name for path in folder.parent.glob(f"{folder.name}-by-*")]
    return answer

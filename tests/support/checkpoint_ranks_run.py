"""What several ranks do in the tests of checkpoints, under torchrun: cases by name, an answer as JSON each.

    torchrun --nproc-per-node 4 --no-python python -c "checkpoint_ranks_run.main(FOLDER, CASES)"

Rank R writes FOLDER/R.json: {case: answer, or {"error": text}}. A case runs on some of the ranks, in a group
of their own; the others wait for them. So one launch sees a checkpoint go from 4 ranks to 2, 1 and 3.
"""

import contextlib
import errno
import itertools
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import xxhash
from safetensors.torch import load_file

import deepspeed_checkpoints
import infinity
import models
from infinity.checkpoint import atomic
from infinity.checkpoint.deepspeed_files import load_deepspeed
from infinity.checkpoint.save_load import read_manifest
from infinity.engine.engine import engine_of, engine_of_model
from infinity.reference import rounded
from infinity.tensors import as_bytes

SIZES = {**models.SIZES, "vocab_size": 300, "hidden_size": 96, "intermediate_size": 200}
"""Weights of which every rank has a part, most of them in the middle of a row."""
MODELS = {
    **models.MODELS,
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **{**SIZES, "num_hidden_layers": 2}, num_local_experts=4, num_experts_per_tok=2
        )
    ),
}
PLACES = {
    "memory": {"host_memory": "256MiB"},
    "disk": {"host_memory": "8MiB", "nvme": True},
    "stage1": {"host_memory": "256MiB", "stage": 1},
    "stage2": {"host_memory": "16MiB", "nvme": True, "stage": 2},
}


class Here:
    """This rank, in a group of the first ranks."""

    def __init__(self, folder, size, groups):
        self.folder, self.size, self.group = folder, size, groups[size]
        self.rank = dist.get_rank()
        self._engines = []

    def keep(self, options, build):
        """Build in an Init of this group, whose engine is closed after the case."""
        with infinity.Init(process_group=self.group, **{"timeout_s": 30, **options}):
            model = build()
        self._engines.append(engine_of_model(model))
        return model

    def close(self):
        for engine in self._engines:
            engine.close()

    def build(self, name, place="memory", seed=0, **init):
        options = {**PLACES[place], **init}
        if options.pop("nvme", False):
            nvme = self.folder / f"nvme-{self.rank}"
            nvme.mkdir(exist_ok=True)
            options["nvme"] = str(nvme)
        torch.manual_seed(seed)
        return self.keep(options, MODELS[name])

    def start(self, name, place="memory", seed=0, update="forward", **init):
        """Return a model, its optimizer with two param groups, and a scheduler."""
        model = self.build(name, place, seed, **init).train()
        parameters = list(model.parameters())
        groups = [{"params": parameters[1:]}, {"params": parameters[:1], "weight_decay": 0.5}]
        kind = infinity.Lion if init.get("state_dtype") == "int4" else infinity.AdamW
        optimizer = kind(groups, lr=1e-2, update=update)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def go_on(self, training, first, last):
        """Train steps first to last on this rank's batches; return their losses."""
        model, optimizer, scheduler = training
        steps = {"first": first, "ids_of": lambda step, _: models.batch(1000 * self.rank + step)}
        return models.train(model, optimizer, last - first, schedule=scheduler, **steps)


def digest(tensor):
    return xxhash.xxh3_64_hexdigest(as_bytes(tensor))


def state(training):
    """Return the hash of every weight and moment, whole, and all else that a training consists of."""
    model, optimizer, scheduler = training
    fields = ["master", "m", "v"]
    return {
        "stored": {
            name: [
                digest(one)
                for one in engine_of(p).parameters.read(p, fields if optimizer.state.get(p) else fields[:1])
            ]
            for name, p in model.named_parameters()
        },
        "buffers": {name: digest(one) for name, one in model.named_buffers()},
        "steps": [int(one["step"]) for one in optimizer.state.values()],
        "scheduler": scheduler.state_dict(),
    }


def parts(model):
    """Return how many parameters this rank has all, a part and nothing of."""
    engine = engine_of_model(model)
    held = [(engine.parameters.part_numel(one), one.numel()) for one in model.parameters()]
    return [
        sum(part == whole for part, whole in held),
        sum(0 < part < whole for part, whole in held),
        sum(part == 0 for part, _ in held),
    ]


# Cases: each is called with a Here, and what follows its name behind slashes.


def first(here, name, state_dtype):
    """Train and save."""
    training = here.start(name, "disk", state_dtype=state_dtype)
    losses = here.go_on(training, 0, 2)
    infinity.save(
        *training[:2],
        here.folder / f"{name}-{state_dtype}-0",
        scheduler=training[2],
        extra=[here.rank, torch.tensor(here.rank)],
    )
    return {"state": state(training), "losses": losses, "parts": parts(training[0])}


def again(here, name, state_dtype, number, place, update):
    """Load what the step before has saved, and save it."""
    training = here.start(name, place, seed=9, state_dtype=state_dtype, update=update)
    folders = [here.folder / f"{name}-{state_dtype}-{one}" for one in (int(number), int(number) + 1)]
    extra = infinity.load(*training[:2], folders[0], scheduler=training[2])
    infinity.save(*training[:2], folders[1], scheduler=training[2], extra=extra)
    return {"state": state(training), "extra": [extra[0], int(extra[1])], "parts": parts(training[0])}


def goes_on(here, name):
    """Train to the end, and the same with a save and a load between."""
    whole = here.start(name)
    torch.manual_seed(here.rank)
    expected = here.go_on(whole, 0, 4)
    one = here.start(name, "disk")
    torch.manual_seed(here.rank)
    losses = here.go_on(one, 0, 2)
    infinity.save(*one[:2], here.folder / "on", scheduler=one[2])
    other = here.start(name, "disk", seed=5)
    torch.manual_seed(77)
    infinity.load(*other[:2], here.folder / "on", scheduler=other[2])
    losses += here.go_on(other, 2, 4)
    return {"expected": expected, "losses": losses, "same": state(whole) == state(other)}


@contextlib.contextmanager
def failing(module, name, error):
    """Let a function of a module fail the second time it is called."""
    real, count = getattr(module, name), itertools.count()

    def call(*arguments, **more):
        if next(count) == 1:
            raise error
        return real(*arguments, **more)

    setattr(module, name, call)
    try:
        yield
    finally:
        setattr(module, name, real)


def attempt(here, rank, module, name, error, action):
    """Do `action` while a function fails on one rank; return what it raised."""
    try:
        with failing(module, name, error) if here.rank == rank else contextlib.nullcontext():
            action()
    except Exception as raised:  # noqa: BLE001 - it is the answer
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


def fails(here):
    """Fail on one rank, at several points of a save and of a load; go on afterwards."""
    model, optimizer, _ = training = here.start("llama", "disk")
    here.go_on(training, 0, 1)
    folder = here.folder / "fails"
    infinity.save(model, optimizer, folder, extra="old")
    here.go_on(training, 1, 2)
    full = OSError(errno.ENOSPC, "No space left on device")
    raised = {}

    def save():
        infinity.save(model, optimizer, folder, overwrite=True, extra="new")

    for rank, module, name in (
        (1, os, "posix_fallocate"),
        (2, os, "pwrite"),
        (1, os, "fsync"),
        (0, os, "fsync"),
        (0, atomic, "_exchange"),
    ):
        raised[f"{name} on rank {rank}"] = attempt(here, rank, module, name, full, save)
        dist.barrier(group=here.group)
        if here.rank == 0:
            raised["left"] = sorted(path.name for path in here.folder.glob("*fails*"))
            raised["found"] = read_manifest(folder).extra
        dist.barrier(group=here.group)
    other = here.folder / (f"elsewhere-{here.rank}" if here.rank == 2 else "elsewhere")
    other.mkdir(exist_ok=True)
    os.chdir(other)
    try:
        raised["not shared"] = attempt(here, -1, os, "", full, lambda: infinity.save(model, optimizer, "new"))
    finally:
        os.chdir(here.folder)
    raised["not plain"] = attempt(
        here,
        -1,
        os,
        "",
        full,
        lambda: infinity.save(model, optimizer, folder / "new", extra=print if here.rank == 1 else 1),
    )
    save()
    raised["preadv on rank 1"] = attempt(
        here,
        1,
        os,
        "preadv",
        OSError(errno.EIO, "Input/output error"),
        lambda: infinity.load(model, optimizer, folder),
    )
    raised["extra"] = infinity.load(model, optimizer, folder)
    losses = here.go_on(training, 2, 3)
    return {"raised": raised, "losses": losses}


def values(model, field):
    """Return a field of each parameter that the model has where no layer is cut, by name."""
    found = {}
    for key, pieces in models.named_wholes(model):
        read = [engine_of(one).parameters.read(one, [field])[0] for one in pieces]
        found[key] = read[0] if len(read) == 1 else torch.cat(read)
    return found


def exports(here, name, dtype):
    """Write Hugging Face's files in every way, and read them with what is not ours."""
    model, *_ = training = here.start(name, "disk")
    here.go_on(training, 0, 1)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    ours, theirs = (here.folder / f"{one}-{name}-{dtype}" for one in ("ours", "theirs"))
    infinity.save_pretrained(model, ours, kind, "60kB")
    expected = values(model, "master" if dtype == "fp32" else "hi")
    state = model.state_dict()
    model.save_pretrained(theirs, is_main_process=here.rank == 0)
    found = {
        "parts": parts(model),
        "state": all(
            torch.equal(state[key], one if one.dtype == torch.bfloat16 else rounded(one))
            for key, one in expected.items()
        ),
    }
    dist.barrier(group=here.group)
    plain = type(model).from_pretrained(ours)
    found["ours"] = different(expected, plain.named_parameters())
    plain = type(model).from_pretrained(theirs)
    found["theirs"] = different(state, plain.named_parameters())
    content = {}
    for path in ours.glob("*.safetensors"):
        content |= load_file(path)
    read = {key: torch.zeros_like(one) for key, one in content.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(ours)), no_dist=True)
    found["distributed checkpoint"] = different(content, read.items())
    again = here.keep({"host_memory": "64MiB"}, lambda: type(model).from_pretrained(ours))
    found["from_pretrained"] = different(
        expected, ((key, one.to(kind)) for key, one in values(again, "master").items())
    )
    other = here.build(name, "stage2", seed=3)
    other.load_state_dict(state)
    found["load_state_dict"] = different(state, other.state_dict().items())
    return found


def different(expected, found):
    """Return the names of tensors that are not as expected."""
    return [key for key, one in found if not torch.equal(expected[key], one.detach())]


def deepspeed(here):
    """Load a checkpoint of DeepSpeed for one rank of ours, and compare with the values beside it."""
    model = here.keep({"host_memory": "64MiB"}, deepspeed_checkpoints.build)
    optimizer = infinity.AdamW([one for one in model.parameters() if one.requires_grad])
    load_deepspeed(model, optimizer, here.folder / "ds")
    expected = load_file(here.folder / "expected.safetensors")
    found = {}
    for name, parameter in model.named_parameters():
        fields = ["master", "m", "v"] if parameter.requires_grad else ["master"]
        for field, one in zip(fields, engine_of(parameter).parameters.read(parameter, fields), strict=True):
            found[f"{field}.{name}"] = one
    return {"different": different(expected, found.items()), "parts": parts(model)}


CASES = {one.__name__: one for one in (first, again, goes_on, fails, exports, deepspeed)}


def _count_groups(number):
    """Let torch believe in so many groups: it names those that not all ranks are in after their number, which
    has to be the same on all of their ranks, and another each time.
    """
    names = dist.distributed_c10d._world.pg_names
    for group in [one for one in names if type(one) is object]:
        del names[group]
    while len(names) < number:
        names[object()] = f"no group {len(names)}"


def main(folder, cases):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world + 1)}
    answers = {}
    for number, case in enumerate(cases, 1):
        _count_groups(50 * number)
        size, name, *arguments = case.split("/")
        here = Here(Path(folder), int(size), groups)
        try:
            if here.rank < here.size:
                answers[case] = CASES[name](here, *arguments)
        except Exception as error:  # noqa: BLE001 - it is the answer
            answers[case] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        here.close()
        failed = torch.tensor(int("error" in answers.get(case, {})))
        dist.all_reduce(failed)
        if failed:
            break
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(answers), encoding="utf-8")
    _count_groups(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

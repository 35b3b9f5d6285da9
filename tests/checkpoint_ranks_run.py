"""What several ranks do in the tests of checkpoints, under torchrun: cases by name, an answer as JSON each.

    torchrun --nproc-per-node 4 --no-python python -c "checkpoint_ranks_run.main(FOLDER, CASES)"

Rank R writes FOLDER/R.json: {case: answer, or {"error": text}}. A case runs on some of the ranks, in a group
of their own; the others wait for them. So one launch sees a checkpoint go from 4 ranks to 2, 1 and 3.
"""

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

import infinity
import models
from infinity.engine import engine_of, engine_of_model
from infinity.imported import load_deepspeed
from infinity.tensors import as_bytes

SIZES = {**models.SIZES, "vocab_size": 300, "hidden_size": 96, "intermediate_size": 200}
"""Weights of which every rank has a part, most of them in the middle of a row."""
MODELS = {
    **models.MODELS,
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    ),
}
PLACES = {
    "memory": {"host_memory": "256MiB"},
    "disk": {"host_memory": "8MiB", "nvme": True},
    "stage 1": {"host_memory": "256MiB", "stage": 1},
    "stage 2": {"host_memory": "16MiB", "nvme": True, "stage": 2},
}


class Here:
    """This rank, in a group of the first ranks."""

    def __init__(self, folder, size, groups):
        self.folder, self.size, self.group = folder, size, groups[size]
        self.rank = dist.get_rank()

    def build(self, name, place="memory", seed=0, **init):
        options = {**PLACES[place], "timeout_s": 60, **init}
        if options.pop("nvme", False):
            nvme = self.folder / f"nvme-{self.rank}"
            nvme.mkdir(exist_ok=True)
            options["nvme"] = str(nvme)
        torch.manual_seed(seed)
        with infinity.Init(process_group=self.group, **options):
            return MODELS[name]()

    def start(self, name, place="memory", seed=0, update="forward", **init):
        """Return a model, its optimizer with two param groups, and a scheduler."""
        model = self.build(name, place, seed, **init).train()
        parameters = list(model.parameters())
        groups = [{"params": parameters[1:]}, {"params": parameters[:1], "weight_decay": 0.5}]
        optimizer = infinity.AdamW(groups, lr=1e-2, update=update)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def go_on(self, training, first, last):
        """Train steps first to last on this rank's batches; return their losses."""
        model, optimizer, scheduler = training
        losses = []
        for number in range(first, last):
            ids = models.batch(1000 * self.rank + number)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def digest(tensor):
    return xxhash.xxh3_64_hexdigest(as_bytes(tensor))


def state(training):
    """Return the hash of every weight and moment, whole, and all else that a training consists of."""
    model, optimizer, scheduler = training
    fields = ["master", "m", "v"]
    return {
        "stored": {
            name: [digest(one) for one in engine_of(p).read(p, fields if optimizer.state.get(p) else fields[:1])]
            for name, p in model.named_parameters()
        },
        "buffers": {name: digest(one) for name, one in model.named_buffers()},
        "steps": [int(one["step"]) for one in optimizer.state.values()],
        "scheduler": scheduler.state_dict(),
    }


def parts(model):
    """Return how many parameters this rank has all, a part and nothing of."""
    engine = engine_of_model(model)
    held = [(engine.part_numel(one), one.numel()) for one in model.parameters()]
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
    infinity.save(*training[:2], here.folder / f"{name}-{state_dtype}-0", scheduler=training[2], extra=[here.rank, torch.tensor(here.rank)])
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


CASES = {one.__name__: one for one in (first, again, goes_on)}


def main(folder, cases):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("gloo")
    groups = {size: dist.new_group(list(range(size))) for size in range(1, dist.get_world_size() + 1)}
    answers = {}
    for case in cases:
        size, name, *arguments = case.split("/")
        try:
            if dist.get_rank() < int(size):
                answers[case] = CASES[name](Here(Path(folder), int(size), groups), *arguments)
        except Exception as error:  # noqa: BLE001 - it is the answer
            answers[case] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        dist.barrier()
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(answers), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

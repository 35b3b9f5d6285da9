"""What ranks that share their machine's memory do in the tests: all that other ranks do, and cases of it.

    shared_run.py FOLDER CASE [CASE ...]  # launched by launches.forked

Cases of ranks_run.py run as they are there, with Config(shared_memory=True) as the default: they compare with
plain ranks in memory, which know nothing of it.
"""

import contextlib
import gc
import logging
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import infinity
import models
import parity
import ranks_run
from infinity.engine import partition
from infinity.engine.engine import engine_of_model
from infinity.gradients import early
from infinity.planning.split import HalfStep, UpdateSplit
from infinity.ranks import machine_meetings
from leftovers import held, left_since
from machine_ranks import descriptors, mappings

infinity.Config.__init__.__kwdefaults__["shared_memory"] = True


def beside_plain(**fields):
    """Train with memory in common and without: return what differs, the bytes of both, and what is left."""
    before, shown, crossed = None, [], []
    for shared in (False, True):
        model = models.build("llama", **{"host_memory": "64MiB", "shared_memory": shared, **fields})
        models.checkpointed(model, reentrant=False)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        losses = ranks_run.train(model, optimizer, micro=2)
        stats, flags = infinity.stats(model), list(mappings().values())
        shown.append({"losses": losses, **model.state_dict(), **ranks_run.state_of(optimizer, model)})
        crossed.append(stats.exchanged_nbytes.get("between machines", 0))
        del model, optimizer
        gc.collect()
        before = before or held()
    (plain, ours), (exchanged, nbytes) = shown, (stats.exchanged_nbytes, stats.shared_nbytes)
    return {
        "different": [key for key, one in plain.items() if not ranks_run.same(one, ours[key])],
        "exchanged": exchanged,
        "crossed": crossed,
        "shared": nbytes,
        "said": "in shared memory" in repr(stats),
        "flags": all({"dd", "dc"} <= one for one in flags) and bool(flags),
        "left": what_stays(before),
    }


def what_stays(before):
    """Return what is left after 30 s: gloo closes its sockets on threads of its own."""
    end_s = time.monotonic() + 30
    while True:
        left = [*left_since(before), *map(str, descriptors()), *mappings()]
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(0.05)


def by_itself():
    """Train with what Config chooses: return what the ranks share, and what they say of it."""
    model = models.build("llama", host_memory="64MiB", shared_memory=infinity.Config.shared_memory)
    ranks_run.train(model, infinity.AdamW(model.parameters(), lr=1e-2), steps=1)
    stats = infinity.stats(model)
    return {
        "shared": stats.shared_nbytes,
        "said": stats.memory_in_common,
        "exchanged": stats.exchanged_nbytes,
    }


def refused_on_one():
    """Rank 1 may not map what the model takes: return what the ranks share, say and compute."""
    shown = []
    for shared in (False, "auto"):
        with contextlib.ExitStack() as planted:
            if dist.get_rank() == 1:
                planted.enter_context(mock.patch.object(partition, "why_too_large", return_value="planted"))
            model = models.build("llama", host_memory="64MiB", shared_memory=shared)
        losses = ranks_run.train(model, infinity.AdamW(model.parameters(), lr=1e-2), steps=2)
        shown.append({"losses": losses, **model.state_dict()})
    plain, ours = shown
    gc.collect()
    return {
        "different": [key for key, one in plain.items() if not ranks_run.same(one, ours[key])],
        "shared": infinity.stats(model).shared_nbytes,
        "said": infinity.stats(model).memory_in_common,
        "left": [*map(str, descriptors()), *mappings()],
    }


def no_futexes_on_one():
    """The system of rank 1 refuses futexes: return what differs then, and what the ranks exchange and say."""
    shown, said = [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("infinity").addHandler(handler)
    logging.getLogger("infinity").setLevel(logging.INFO)
    for missing in (False, True):
        with contextlib.ExitStack() as planted:
            if missing and dist.get_rank() == 1:
                planted.enter_context(mock.patch.object(machine_meetings, "_FUTEX", -1))
            model = models.build("llama", host_memory="64MiB")
        losses = ranks_run.train(model, infinity.AdamW(model.parameters(), lr=1e-2), steps=2)
        shown.append({"losses": losses, **model.state_dict()})
    logging.getLogger("infinity").removeHandler(handler)
    plain, ours = shown
    return {
        "different": [key for key, one in plain.items() if not ranks_run.same(one, ours[key])],
        "exchanged": infinity.stats(model).exchanged_nbytes,
        "said": [one for one in said if "over gloo" in one],
    }


def kept_views():
    """Keep views of weights over later steps, and change what one rank sees of a weight: return what was
    wrong.
    """
    model, wrong, kept = models.build("llama", host_memory="64MiB"), [], []
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    layer = model.model.layers[0].self_attn.q_proj

    def keep(module, _inputs):
        kept.append((module.weight.detach()[3:], module.weight.detach()[3:].clone()))

    hook = layer.register_forward_pre_hook(keep)
    ranks_run.train(model, optimizer, steps=3)
    hook.remove()
    wrong += [f"view {number}" for number, (one, values) in enumerate(kept) if not torch.equal(one, values)]
    wrong += ["the weight is as it was"] if torch.equal(kept[0][0], kept[-1][0]) else []
    return {"wrong": wrong}


def changed_past_autograd():
    """Rank 1 changes a weight through .data in a forward: return what the ranks compute, and the errors."""
    model = models.build("llama", host_memory="64MiB")
    layer, seen = model.model.layers[0].self_attn.q_proj, []

    def change(module, _inputs):
        if dist.get_rank() == 1:
            module.weight.data.view(-1)[:7].add_(1000)
        dist.barrier()
        seen.append(module.weight.detach().float().abs().max().item())
        dist.barrier()

    hook = layer.register_forward_pre_hook(change)
    try:
        ids = models.batch(0)
        model(input_ids=ids, labels=ids).loss.backward()
        infinity.AdamW(model.parameters()).step()
    except (infinity.InfinityError, RuntimeError) as error:
        return {"error_of_rank": f"{type(error).__name__}: {error}", "most": seen[0]}
    finally:
        hook.remove()
    return {"error_of_rank": "none", "most": seen[0]}


class Masked(torch.nn.Module):
    """A layer with buffers: one as every rank has it, twice, one of each rank's own, and two of which
    something else has a view.
    """

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
        self.register_buffer("mask", torch.arange(1 << 19, dtype=torch.float32).view(1024, 512))
        self.layer.register_buffer("same_mask", self.mask, persistent=False)
        self.register_buffer("own", torch.full((1 << 20,), dist.get_rank(), dtype=torch.int8))
        self.register_buffer("viewed", torch.ones(1 << 20, dtype=torch.bool))
        self.register_buffer("as_array", torch.ones(1 << 20, dtype=torch.uint8))
        self.part, self.array = self.viewed[:3], self.as_array.numpy()

    def forward(self, inputs):
        return self.layer(inputs) * self.mask[1, :16]


class Rows(torch.utils.data.Dataset):
    """What a loader's workers have of a model: its buffers, and all but the values of its parameters."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.model.mask[-1, -1 - index], torch.tensor(self.model.layer.weight.shape)


def seen_by_workers(model):
    """Return what forked workers of a loader see."""
    loader = DataLoader(Rows(model), batch_size=2, num_workers=1, multiprocessing_context="fork")
    ((values, shapes),) = loader
    return [*values.tolist(), *shapes[0].tolist()]


def buffers():
    """Share what all have, change it on one rank, and look at it from a fork: return what was wrong."""
    wrong = []
    with infinity.Init(host_memory="64MiB"):
        model = Masked()
    rank, before = dist.get_rank(), len(mappings())
    shared = len([one for one in mappings().values() if "dc" not in one])
    wrong += [] if shared == 1 else [f"{shared} buffers are shared, of one that all have"]
    wrong += [] if model.layer.same_mask is model.mask else ["one buffer has become two"]
    wrong += [] if "layer.same_mask" not in model.state_dict() and "mask" in model.state_dict() else ["saved"]
    model.viewed[1] = False
    model.as_array[2] = 7
    wrong += [] if not model.part[1] and model.array[2] == 7 else ["a view is of another buffer"]
    wrong += [] if bool((model.own == rank).all()) else ["a rank's own buffer is another's"]
    if rank == 1:
        model.mask[0, 0] = -5
    dist.barrier()
    expected = torch.arange(1 << 19, dtype=torch.float32).view(1024, 512)
    if rank == 1:
        expected[0, 0] = -5
    wrong += [] if torch.equal(model.mask, expected) else ["what all have"]
    expected = [(1 << 19) - 1, (1 << 19) - 2, 16, 16]
    wrong += [] if seen_by_workers(model) == expected else ["forked workers do not see it"]
    model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    kept = model.mask[3]
    del model
    gc.collect()
    wrong += [] if kept[0] == 3 * 512 and len(mappings()) < before + 1 else ["a view after its buffer"]
    del kept
    gc.collect()
    return {"wrong": wrong, "left": [*map(str, descriptors()), *mappings()]}


def refused(other, **fields):
    """Return the error of ranks with these settings, of which `other` are rank 1's."""
    try:
        models.build("llama", host_memory="64MiB", **(other if dist.get_rank() == 1 else fields))
    except infinity.ConfigError as error:
        return {"said": str(error)}
    return {"said": "none"}


KILLED_S = 5
"""The seconds that a rank waits for another."""


def killed(folder, *, when):
    """Rank 1 is killed, or stops, in its third step; return what the others are told, and after how long."""
    model = models.build("llama", host_memory="64MiB", timeout_s=KILLED_S, gather_bucket=0)
    optimizer, said = infinity.AdamW(parity.nothing_waits(model).parameters(), lr=1e-2), "none"
    Path(folder, f"{when}.{dist.get_rank()}").write_text(str(os.getpid()))

    def end(*_):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP if when == "stopped" else signal.SIGKILL)

    ranks_run.train(model, optimizer, steps=2)
    layer = model.model.layers[1].mlp.up_proj
    layer.register_full_backward_hook(end) if when == "backward" else layer.register_forward_pre_hook(end)
    began = time.monotonic()
    try:
        ranks_run.train(model, optimizer, steps=2)
    except infinity.RanksError as error:
        said = str(error)
    told_s = time.monotonic() - began
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(Path(folder, f"{when}.1").read_text()), signal.SIGKILL)
    engine_of_model(model).close()
    del model, optimizer, layer
    gc.collect()
    return {"said": said, "told_s": told_s, "left": [*map(str, descriptors()), *mappings()]}


def fewer_batches(folder):
    """Rank 1 has two batches and waits elsewhere, the others have three; return what the others are told."""
    model = models.build("llama", host_memory="64MiB", timeout_s=5)
    optimizer, said = infinity.AdamW(model.parameters(), lr=1e-2), "none"
    told, until = Path(folder, "told of batches"), time.monotonic() + 30
    try:
        ranks_run.train(model, optimizer, steps=2 if dist.get_rank() == 1 else 3)
    except infinity.RanksError as error:
        said = str(error)
    if dist.get_rank() == 0:
        told.touch()
    while not told.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return {"said": said}


def stops_alone():
    """Rank 1 drops gradients whose updates the backward has made, and stops: return what each is told."""
    half = UpdateSplit((2, 0), 4, HalfStep(1.0, 0.5), HalfStep(2.0, 1.0))
    with mock.patch.object(early, "split_updates", return_value=half):
        model, said = models.build("llama", host_memory="64MiB", timeout_s=5), "none"
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, update="auto")
        ranks_run.train(model, optimizer, steps=3)
        try:
            if dist.get_rank() == 1:
                ids = models.batch(0)
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.zero_grad()
            ranks_run.train(model, optimizer, steps=2)
        except (infinity.RanksError, infinity.UnsupportedError) as error:
            said = f"{type(error).__name__}: {error}"
    return {"said": said}


CASES = {
    "beside plain": beside_plain,
    "beside plain, nvme": lambda: beside_plain(**ranks_run.NVME),
    "by itself": by_itself,
    "refused on one": refused_on_one,
    "no futexes on one": no_futexes_on_one,
    "kept views": kept_views,
    "buffers": buffers,
    "changed past autograd": changed_past_autograd,
    "other settings": partial(refused, {"shared_memory": False}),
    "other machines": partial(refused, {}),
    "killed in forward": lambda: killed(sys.argv[1], when="forward"),
    "killed in backward": lambda: killed(sys.argv[1], when="backward"),
    "stopped": lambda: killed(sys.argv[1], when="stopped"),
    "stops alone": stops_alone,
    "fewer batches": lambda: fewer_batches(sys.argv[1]),
}
ranks_run.CASES.update(CASES)
ranks_run.AT_ONCE.update({"killed in forward", "killed in backward", "stopped", "fewer batches"})
ranks_run.LAST.update({*ranks_run.AT_ONCE, "changed past autograd", "stops alone"})


if __name__ == "__main__":
    ranks_run.main(sys.argv[1], sys.argv[2:])

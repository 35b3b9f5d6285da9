"""What several ranks do in the tests of them: cases by name, an answer as JSON each.

    torchrun --nproc-per-node 2 tests/support/ranks_run.py FOLDER CASE [CASE ...]  # or launches.forked

Rank R writes FOLDER/R.json: {case: answer, or {"error": text}}. The reference of N ranks is plain, in
ranks_reference.py: each holds the whole model, and every gradient becomes the mean over the ranks, summed in
fp32 in their order, divided once and rounded once, as autograd hands it over.
"""

import gc
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cut_ranks
import infinity
import models
import parity
import plain_ranks  # noqa: F401 - most cases are about weights that are sent
import surgery
import sweep
from answers import answer_all, answer_of, is_of_ranks
from children import Child
from infinity.cli.presets import PRESETS, Preset, llama
from infinity.engine.engine import engine_of_model
from infinity.reference import ReferenceAdamW
from infinity.reference import recipe as reference
from ranks_buckets import BUCKETS
from ranks_chosen import CHOSEN
from ranks_layers import (
    alone,
    changed_by_one,
    changes,
    different_ways,
    dropped,
    edited_differently,
    evaluating,
    failing,
    fragments,
    gathered_write,
    in_files,
    node,
    rounds,
    seeds,
)
from ranks_muon import MUONS
from ranks_reference import build_reference, compare, same, state_of, train
from scaling import Beside


def joined(name, *, freeze=None):
    """Train in fp32 on all ranks, and on one with their batches as one; return how far the weights part, in
    learning rates.

    The sums of a gradient differ in order alone. eps keeps that from deciding the direction of a weight whose
    gradient is next to zero, which AdamW would move by a whole learning rate.
    """
    lr, ranks = 1e-2, range(dist.get_world_size())
    weights = []
    for ours in (False, True):
        fields = {"host_memory": "64MiB", "dtype": "fp32"} if ours else {}
        model = models.build(name, computes="fp32", **fields)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(freeze is None or freeze not in key)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = (infinity.AdamW if ours else ReferenceAdamW)(trained, lr=lr, eps=1e-4)
        for step in range(3):
            of = [dist.get_rank()] if ours else ranks
            ids = torch.cat([models.batch(1000 * rank + 10 * step) for rank in of])
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.state_dict())
    alone, together = weights
    return {"apart": max((alone[key] - together[key]).abs().max().item() / lr for key in alone)}


def through_deepspeed():
    """Train through infinity.deepspeed.initialize, beside the reference; return what differs."""
    plain = build_reference("gpt2")
    recipe = ReferenceAdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "infinity": {"host_memory": "64MiB"},
    }
    torch.manual_seed(0)
    with infinity.deepspeed.zero.Init(config_dict_or_path=config):
        model = models.MODELS["gpt2"]()
    engine, optimizer, loader, _ = infinity.deepspeed.initialize(
        model=model, config=config, training_data=list(range(12))
    )
    losses = [[], []]
    for number in range(6):
        ids = models.batch(1000 * dist.get_rank() + number)
        loss = plain(input_ids=ids, labels=ids).loss
        (loss / 2).backward()
        losses[0].append(loss.item())
        if number % 2:
            reference.clip_grad_norm_(recipe, 0.5)
            recipe.step()
            recipe.zero_grad()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses[1].append(loss.item())
    expected = {"losses": losses[0], **plain.state_dict(), **state_of(recipe)}
    actual = {"losses": losses[1], **model.state_dict(), **state_of(optimizer)}
    counts = [engine.train_batch_size(), engine.global_samples, engine.global_steps]
    engine.save_checkpoint(os.environ["RANKS_DISK"], client_state={"epoch": 1})
    further = [deepspeed_step(engine, 6), deepspeed_step(engine, 8)]
    path, said = engine.load_checkpoint(os.environ["RANKS_DISK"])
    again = [deepspeed_step(engine, 6), deepspeed_step(engine, 8)]
    return {
        "resumed": further == again and path.endswith("global_step3") and said == {"epoch": 1},
        "different": [key for key, one in expected.items() if not same(one, actual[key])],
        "losses": losses[1],
        "rows": sorted(int(row) for rows in loader for row in rows),
        "counts": counts,
    }


def overflow(**init):
    """Train in fp16 with GradScaler, one rank overflowing once; return scales, and what differs."""
    shown = []
    for ours in (False, True):
        if ours:
            model = models.build("llama", dtype="fp16", **init)
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        else:
            model = build_reference("llama", computes="fp16")
            optimizer = ReferenceAdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2), []
        stepped = optimizer if ours else Beside(model, optimizer)
        for step in range(4):
            ids = models.batch(1000 * dist.get_rank() + step)
            loss = model(input_ids=ids, labels=ids).loss
            if step == 1 and dist.get_rank() == 1:
                loss = loss * 1e6
            scaler.scale(loss).backward()
            if not ours:
                stepped.look()
                inverse = scaler._scale.double().reciprocal().float()
                scaler.unscale_(stepped)
                stepped.unscaled(inverse)
            scaler.step(stepped)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        steps = {int(one["step"]) for one in optimizer.state_dict()["state"].values()}
        shown.append({"scales": scales, "steps": steps, **model.state_dict(), **state_of(optimizer)})
    expected, actual = shown
    different = [key for key, one in expected.items() if not same(one, actual[key])]
    return {"different": different, "losses": [dist.get_rank()], "scales": actual["scales"]}


def deepspeed_step(engine, first):
    """Train one step, of two backwards; return their losses."""
    losses = []
    for number in (first, first + 1):
        ids = models.batch(1000 * dist.get_rank() + number)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def mesh():
    """Train on one dimension of a mesh of two: two pairs of ranks, each with a model of its own."""
    whole = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    return compare("llama", options={"max_norm": 0.5}, group=whole["data"])


def grid():
    """Train on the rows of a mesh at the same time, two models on one row and one on the other, then on its
    columns; then rank 1 does not come to a model of the first row.
    """
    column = init_device_mesh("cpu", (2, 2), mesh_dim_names=("down", "across"))["down"]
    gc.collect()  # torch names a group that only its ranks know by how many groups each of them has
    dist.barrier()
    ours = [[0, 1], [2, 3]][dist.get_rank() // 2]  # a group that the other row's ranks do not know
    row = DeviceMesh.from_group(dist.new_group(ours, use_local_synchronization=True), "cpu")
    trained = [compare("llama", group=row)]
    if dist.get_rank() < 2:
        trained.append(compare("gpt2", options={"max_norm": 0.5}, group=row))
    trained.append(compare("llama", options=BACKWARD, group=column, **NVME))
    absent = ""
    if dist.get_rank() == 0:
        try:
            models.build("llama", host_memory="64MiB", process_group=row, timeout_s=1)
        except infinity.RanksError as error:
            absent = str(error)
    different = [key for one in trained for key in one["different"]]
    return {"different": different, "losses": trained[-1]["losses"], "absent": absent}


def by_budget(nbytes, **settings):
    """Train on batches that are longer on each rank, and in each step, without and with a budget."""
    runs = []
    for budget in (None, nbytes):
        torch.manual_seed(5)
        with infinity.Init(activation_memory=budget, **settings):
            model = models.MODELS["llama"]()
        model.train()
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(4):
            length = 24 + 8 * dist.get_rank() + 16 * (step > 1)
            ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append({"losses": losses, **model.state_dict()})
    activations = engine_of_model(model).activations
    return {
        "different": [key for key, one in runs[0].items() if not same(one, runs[1][key])],
        "activations": activations.reason,
        "measured": len(activations.decisions),
        "losses": losses,
    }


def partitioned(**settings):
    """Train copies of one model, once with all activations on every rank, and once with a part on each."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    runs, kept = [], []
    for copies in (None, dist.group.WORLD):
        torch.manual_seed(5)
        with infinity.Init(process_group=alone, partition_activations=copies, **settings):
            model = models.MODELS["llama"]()
        model.gradient_checkpointing_enable()
        model.train()
        parts = engine_of_model(model).parts
        if parts is not None:
            save = parts.save

            def counted(tensor, save=save):
                part = save(tensor)
                kept.append(part.nbytes / tensor.nbytes)
                return part

            parts.save = counted
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            ids = torch.randint(0, 301, (2, 63), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append((losses, model.state_dict()))
        del model, optimizer, parts
    (losses, weights), (parted_losses, parted) = runs
    equal = all(same(weights[name], parted[name]) for name in weights)
    return {"equal": losses == parted_losses and equal, "kept": kept}


def traffic():
    """Return what a checkpointed step exchanges where nothing is kept between uses, and the model's size."""
    model = parity.nothing_waits(models.build("llama", host_memory="64MiB"))
    models.checkpointed(model, reentrant=False)
    optimizer = infinity.AdamW(model.parameters())
    train(model, optimizer, steps=1)
    before = infinity.stats(model)
    train(model, optimizer, steps=2)
    moved = infinity.stats(model).since(before).exchanged_nbytes
    return {**moved, "weights": sum(unit.resident_nbytes for unit in engine_of_model(model).units)}


def nvme_traffic(preset, mib):
    """Return NVMe bytes per parameter of a rank's share and step, with so many MiB of memory for each rank:
    next to nothing of the share is in them.
    """
    moved = {}
    for update in ("backward", "forward"):
        torch.manual_seed(0)
        with infinity.Init(nvme=os.environ["RANKS_DISK"], host_memory=mib * dist.get_world_size() << 20):
            model = llama(preset, 32)
        models.checkpointed(model, reentrant=False)
        optimizer = infinity.AdamW(model.parameters(), update=update)
        train(model, optimizer, steps=2)
        engine_of_model(model).lane.drain()
        before = infinity.stats(model)
        train(model, optimizer, steps=2)
        engine_of_model(model).lane.drain()
        after = infinity.stats(model)
        done, held = after.since(before), after.parameters / after.ranks
        moved[update] = (done.nvme_read_nbytes + done.nvme_written_nbytes) / (2 * held)
        moved["pinned"] = after.host_nbytes / (12 * held)
    return moved


def memory():
    """Return bytes per parameter that a rank keeps between backward and step, by stage."""
    kept = {}
    for stage in (1, 2, 3):
        with infinity.Init(host_memory="256MiB", stage=stage):
            model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(8)])
        optimizer = infinity.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(1, 512, dtype=torch.bfloat16)).sum().backward()
            engine = engine_of_model(model)
            engine.lane.drain()
            nbytes = engine.kept.held_nbytes
            if stage < 3:
                nbytes += sum(unit.flat.nbytes for unit in engine.units)
            optimizer.step()
            optimizer.zero_grad()
        kept[stage] = nbytes / (8 * 512 * 512)
    return kept


NVME = {"nvme": os.environ.get("RANKS_DISK"), "host_memory": int(os.environ["WORLD_SIZE"]) << 20}
BACKWARD = {"update": "backward"}
BY_BLOCK = {**NVME, "host_memory": int(os.environ["WORLD_SIZE"]) << 22, "units": "block"}
CASES = {
    "llama": lambda: compare("llama"),
    "gpt2": lambda: compare("gpt2"),
    "dropout": lambda: compare("gpt2-dropout"),
    "mixtral": lambda: compare("mixtral"),
    "experts": lambda: compare("experts", **NVME),
    "experts, checkpointed": lambda: compare("experts", checkpoint="not", options=BACKWARD, **NVME),
    "20 steps of experts": lambda: compare("experts", steps=20, **NVME),
    "20 steps, checkpointed": lambda: compare("experts", steps=20, checkpoint="reentrant", **NVME),
    "max_norm": lambda: compare("llama", options={"max_norm": 0.5}),
    "clip_grad_norm_": lambda: compare("gpt2", clip=0.5),
    "accumulated": lambda: compare("llama", micro=2),
    "edited": lambda: compare("llama", edits=True),
    "nvme edited": lambda: compare("llama", edits=True, micro=2, **NVME),
    "stage 1 edited": lambda: compare("llama", edits=True, micro=2, once=True, clip=0.5, stage=1),
    "edited differently": edited_differently,
    "no_sync": lambda: compare("llama", micro=3, once=True),
    "backward": lambda: compare("llama", options=BACKWARD),
    "reentrant": lambda: compare("llama", checkpoint="reentrant"),
    "checkpointed": lambda: compare("llama", checkpoint="not", options=BACKWARD),
    "frozen": lambda: compare("llama", freeze="mlp"),
    "activation memory": lambda: by_budget(950 << 10, host_memory="64MiB"),
    "cut by budget": lambda: cut_ranks.trained(activation_memory="6MiB", **NVME),
    "nvme activation memory": lambda: by_budget(950 << 10, **NVME),
    "nvme": lambda: compare("llama", **NVME),
    "nvme backward": lambda: compare("gpt2", options=BACKWARD, **NVME),
    "nvme accumulated": lambda: compare("llama", micro=2, clip=0.5, **NVME),
    "blocks": lambda: compare("llama", micro=2, clip=0.5, units="block"),
    "nvme blocks": lambda: compare("gpt2", options=BACKWARD, **BY_BLOCK),
    "stage 1": lambda: compare("llama", micro=2, once=True, stage=1),
    "stage 2": lambda: compare("llama", stage=2),
    "stage 2 backward": lambda: compare("llama", options=BACKWARD, stage=2, **NVME),
    "fp32": lambda: compare("llama", dtype="fp32", options={"max_norm": 0.5}),
    "a head in fp32": lambda: compare("llama with a head in fp32", options={"max_norm": 0.5}),
    "nvme, a head in fp32": lambda: compare("llama with a head in fp32", micro=2, **NVME),
    "nvme fp32": lambda: compare("gpt2", dtype="fp32", micro=2, **NVME),
    "overflow": lambda: overflow(host_memory="64MiB"),
    "overflow on nvme": lambda: overflow(**NVME),
    "deepspeed": through_deepspeed,
    "mesh": mesh,
    "grid": grid,
    **{f"joined {name}": partial(joined, name) for name in ("llama", "gpt2", "mixtral")},
    "joined frozen": partial(joined, "llama", freeze="mlp"),
    "partitioned": lambda: partitioned(host_memory="64MiB"),
    "partitioned nvme": lambda: partitioned(offload_activations="nvme", **NVME),
    **CHOSEN,
    **BUCKETS,
    **MUONS,
    "different ways": different_ways,
    "alone": alone,
    "dropped": dropped,
    "evaluating": evaluating,
    "rounds": rounds,
    "failing": failing,
    "changes": changes,
    "gathered": lambda: gathered_write(differently=False),
    "gathered differently": lambda: gathered_write(differently=True),
    "in files": in_files,
    "changed by one": changed_by_one,
    "fragments": fragments,
    "seeds": seeds,
    "surgery": lambda: {"wrong": surgery.on_ranks(os.environ["RANKS_DISK"], every_nth=6)},
    "whole surgery": lambda: {"wrong": surgery.on_ranks(os.environ["RANKS_DISK"])},
    "sweep": lambda: {"wrong": sweep.sweep(every_nth=72)},
    "whole sweep": lambda: {"wrong": sweep.sweep(every_nth=len(sweep.BUDGETS))},
    "traffic": traffic,
    "nvme traffic": lambda: nvme_traffic(Preset(layers=2, hidden=256, intermediate=688, heads=4), 2),
    "nvme traffic of 25m": lambda: nvme_traffic(PRESETS["25m"], 16),
    "memory": memory,
    "node": node,
}


LAST = {"different ways", "leaving", "leaving behind", "killed", "alone", "failing", "gathered differently"}
"""After these the ranks cannot go on together: each has processes of its own, forked from the others."""
AT_ONCE = {"alone", "killed"}
"""Those of them that wait more than they compute, and for which others may take the cores."""


def apart(folder, cases):
    """Run cases in forked processes on each rank, at once, each in a process group of these."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def work(case, say):
        met = Path(folder, f"{case}.met").absolute().as_uri()
        dist.init_process_group("gloo", init_method=met, rank=rank, world_size=ranks)
        say(**answer_of(CASES[case]))

    children = {case: Child(partial(work, case), limit_s=200.0) for case in cases}
    for child in children.values():
        while not child.over():
            time.sleep(0.005)
    return {case: dict(child.last) for case, child in children.items()}


def main(folder, cases):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    gc.collect()
    gc.freeze()  # else each collection, of which some cases ask for many, walks all that is imported
    answers = apart(folder, [case for case in cases if case in AT_ONCE])  # before any thread is started
    for case in (one for one in cases if one in LAST - AT_ONCE):
        answers |= apart(folder, [case])
    dist.init_process_group("gloo")
    together = [one for one in cases if one not in LAST]
    answer_all(folder, together, lambda case: CASES[case](), ends=is_of_ranks, before=answers)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

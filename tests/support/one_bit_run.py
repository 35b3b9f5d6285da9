"""What ranks do in the tests of 1-bit Adam: cases by name, a JSON answer each.

    one_bit_run.py FOLDER CASE [CASE ...]  # launched by launches.forked

Rank R writes FOLDER/R.json. The reference is one process, rank 0, that has the whole model, takes every
rank's batch in turn, and keeps the momenta and errors of all workers, by infinity.reference.one_bit: once for
all cases that differ in where what lies.
"""

import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import coded_run
import infinity
import infinity.deepspeed
from coded_run import MODELS, build, loss_of, mean, reference_of, summed, train
from infinity.engine.engine import engine_of_model
from infinity.ranks.machines import LOCAL_SIZE
from infinity.reference import ReferenceAdamW, one_bit, prepare
from infinity.reference.moments import state_key, step_stored, widened
from infinity.reference.recipe import rounded

GROUP = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.99)}


def in_one_process(name, *, steps, freeze, micro=1, frozen=None, dtype=None, state_dtype="fp32"):
    """Return the losses of each rank, the weights, and the momenta and variances in fp32."""
    torch.manual_seed(0)
    model, ranks = MODELS[name](), dist.get_world_size()
    model = prepare(model) if dtype is None else model
    machines = ranks // int(os.environ.get(LOCAL_SIZE, ranks))
    workers, near = (machines, ranks // machines) if machines > 1 else (ranks, 1)
    for key, one in model.named_parameters():
        one.requires_grad_(frozen is None or frozen not in key)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = ReferenceAdamW(trained, **GROUP, state_dtype=state_dtype)
    losses, state = [[] for _ in range(ranks)], {}
    for step in range(steps):
        rows = []
        for rank in range(ranks):
            grads = []
            for number in range(micro):
                loss = loss_of(model, 1000 * rank + 10 * step + number)
                loss.backward()
                grads.append([one.grad for one in trained])
                losses[rank].append(loss.item())
                model.zero_grad()
            rows.append([summed(of_one) if micro > 1 else of_one[0] for of_one in zip(*grads, strict=True)])
        if step < freeze:
            for one, *of_one in zip(trained, *rows, strict=True):
                coded_run.store(one, [mean(of_one, 0, machines)])
            optimizer.step()
            optimizer.zero_grad()
            continue
        with torch.no_grad():
            for number, (one, *of_one) in enumerate(zip(trained, *rows, strict=True)):
                its = optimizer.state[one]
                its["step"] += 1
                step_of = partial(frozen_step, its, one, of_one, state, workers, near, freeze)
                step_stored(its, state_key(0, number, its["step"]), state_dtype, step_of)
    moments = [dict(zip("mv", widened(optimizer.state[one], state_dtype), strict=True)) for one in trained]
    return losses, model.state_dict(), moments


def frozen_step(of_one, parameter, rows, state, workers, near, freeze, m, v):
    """Make the step of one parameter, of which `rows` has each rank's gradient, on its moments in fp32."""
    kept = state.setdefault(parameter, [(m.clone(), torch.zeros_like(m)) for _ in range(workers)])
    sent = []
    for worker, (w, e) in enumerate(kept):
        of_worker = rows[worker * near : (worker + 1) * near]
        gradient = sum(of_worker[1:], of_worker[0].float()).to(of_worker[0].dtype).float()
        sent.append(one_bit.send(w, e, gradient / near, GROUP["betas"][0]))
    m.copy_(one_bit.mean_of(sent))
    one_bit.frozen_step(of_one["master"], m, v, of_one["step"], {**GROUP, "eps": 1e-8, "freeze_step": freeze})
    parameter.copy_(rounded(of_one["master"], parameter.dtype))


def compare(name, *, steps=6, freeze=2, micro=1, once=False, frozen=None, **fields):
    """Train, and compare with the reference; and the bytes of a step before the freeze and after."""
    expected_losses, expected, moments = reference_of(
        in_one_process,
        name,
        steps=steps,
        freeze=freeze,
        micro=micro,
        frozen=frozen,
        **{key: fields[key] for key in ("dtype", "state_dtype") if key in fields},
    )
    model = build(name, frozen, **fields)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = infinity.OneBitAdam(trained, freeze_step=freeze, **GROUP)
    losses, moved = [], []
    for step in range(steps):
        before = infinity.stats(model).exchanged_nbytes
        losses += train(model, optimizer, steps=1, micro=micro, once=once, first=step)
        after = infinity.stats(model).exchanged_nbytes
        moved.append({kind: after[kind] - before[kind] for kind in after})
    state = model.state_dict()
    engine = engine_of_model(model)
    different = [key for key, one in expected.items() if not torch.equal(one, state[key])]
    for one, of_one in zip(trained, moments, strict=True):
        m, v = engine.parameters.read(one, ["m", "v"])
        name = engine.parameters.name_of(one)
        different += [] if torch.equal(m, of_one["m"]) else [f"m of {name}"]
        different += [] if torch.equal(v, of_one["v"]) else [f"v of {name}"]
    crossed = engine.partition._reduces.crossed_nbytes
    return {
        "different": different + (["losses"] if losses != expected_losses else []),
        "reduced": [one["reduce"] for one in moved],
        "crossed": crossed,
        "read": infinity.stats(model).nvme_read_nbytes,
    }


def crossed():
    """Return the bytes of gradients that go to other machines, in a step before the freeze, and after."""
    model = build("layers")
    optimizer, seen = infinity.OneBitAdam(model.parameters(), freeze_step=2, **GROUP), []
    for step in range(4):
        before = engine_of_model(model).partition._reduces.crossed_nbytes
        train(model, optimizer, steps=1, first=step)
        model.state_dict()
        dist.barrier()
        seen.append(engine_of_model(model).partition._reduces.crossed_nbytes - before)
    return {"steps": seen}


def durable(**fields):
    """Commit a run past the freeze, resume it, and compare with one that never stopped."""
    shown = []
    for stops in (False, True):
        folder = Path(os.environ["RANKS_DISK"], f"durable {stops} {fields}")
        folder.mkdir(exist_ok=True)
        losses = []
        for first, last in ((0, 4), (4, 7)) if stops else ((0, 7),):
            model = build("layers", nvme=str(folder), host_memory="64MiB", durable=True, **fields)
            optimizer = infinity.OneBitAdam(model.parameters(), freeze_step=2, **GROUP)
            begun = infinity.resume(model, optimizer)
            assert begun == first
            losses += train(model, optimizer, steps=last - first, first=first)
            infinity.commit(model)
            state = model.state_dict()
            engine_of_model(model).close()
            del model, optimizer
        shown.append((losses, state))
    (losses, state), (resumed_losses, resumed) = shown
    different = [key for key, one in state.items() if not torch.equal(one, resumed[key])]
    return {"different": different + (["losses"] if losses != resumed_losses else [])}


def loaded():
    """Save past the freeze, load into another model, and go on; return how far losses are apart."""
    folder = Path(os.environ["RANKS_DISK"], "saved")
    model = build("layers")
    optimizer = infinity.OneBitAdam(model.parameters(), freeze_step=2, **GROUP)
    train(model, optimizer, steps=4)
    infinity.save(model, optimizer, folder)
    losses = train(model, optimizer, steps=3, first=4)
    other = build("layers")
    its = infinity.OneBitAdam(other.parameters(), freeze_step=2, **GROUP)
    infinity.load(other, its, folder)
    again = train(other, its, steps=3, first=4)
    apart = max(abs(one / two - 1) for one, two in zip(losses, again, strict=True))
    return {"first": losses[0] == again[0], "apart": apart}


def twice():
    """Run a second backward before step(), after the freeze."""
    model = build("layers")
    optimizer = infinity.OneBitAdam(model.parameters(), freeze_step=1, **GROUP)
    train(model, optimizer, steps=1)
    try:
        train(model, optimizer, steps=1, micro=2, first=1)
    except infinity.UnsupportedError as error:
        return {"error": str(error)}
    return {"error": "none"}


def dropped():
    """Drop gradients that are not finite, without a step, after the freeze; and assign the common momentum,
    with which momenta begin anew, too. Return the losses that follow both, and whether weights are finite.
    """
    shown, finite = [], True
    for drops in (True, False):
        model = build("llama")
        optimizer = infinity.OneBitAdam(model.parameters(), freeze_step=2, **GROUP)
        train(model, optimizer, steps=4)
        if drops:
            (loss_of(model, dist.get_rank()) * float("inf")).backward()
            optimizer.zero_grad()
        for one in () if drops else model.parameters():
            optimizer.state[one]["exp_avg"] = optimizer.state[one]["exp_avg"]
        shown.append(train(model, optimizer, steps=2, first=4))
        finite &= all(one.isfinite().all().item() for one in model.state_dict().values())
    return {"different": [] if shown[0] == shown[1] and finite else shown}


def thawed():
    """Let the variance be free again for a step, after the freeze: momenta begin with the common one then."""
    shown = []
    for writes in (False, True):
        model = build("layers")
        optimizer = infinity.OneBitAdam(model.parameters(), freeze_step=2, **GROUP)
        train(model, optimizer, steps=4)
        optimizer.param_groups[0]["freeze_step"] = 5
        train(model, optimizer, steps=1, first=4)
        if writes:  # the same values: momenta begin anew in any case
            with infinity.gathered(model, write=True):
                pass
        shown.append(train(model, optimizer, steps=2, first=5))
    return {"different": [] if shown[0] == shown[1] else shown}


def resumed_and_loaded():
    """Resume a run past the freeze, then load a checkpoint: momenta begin with the loaded one, as they do in
    a model that has resumed nothing.
    """
    folder, shown = Path(os.environ["RANKS_DISK"]), []
    saved = build("layers")
    optimizer = infinity.OneBitAdam(saved.parameters(), freeze_step=2, **GROUP)
    train(saved, optimizer, steps=3, first=20)
    infinity.save(saved, optimizer, folder / "of another run")
    for name, runs in (("resumed", 2), ("begun", 1)):
        (folder / name).mkdir(exist_ok=True)
        for run in range(runs):
            model = build("layers", nvme=str(folder / name), host_memory="64MiB", durable=True)
            optimizer = infinity.OneBitAdam(model.parameters(), freeze_step=2, **GROUP)
            infinity.resume(model, optimizer)
            if run < runs - 1:
                train(model, optimizer, steps=3)
                infinity.commit(model)
                engine_of_model(model).close()
        infinity.load(model, optimizer, folder / "of another run")
        shown.append(train(model, optimizer, steps=2, first=5))
        engine_of_model(model).close()
    return {"different": [] if shown[0] == shown[1] else shown}


def beside_one_rank():
    """Train a model of this rank alone and one of all ranks, by an optimizer each, and by one of both: return
    what differs.
    """
    shown = []
    for together in (False, True):
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        several, own = build("layers"), build("layers", process_group=alone)
        groups = [[own, several]] if together else [[own], [several]]
        optimizers = [
            infinity.OneBitAdam([p for one in some for p in one.parameters()], freeze_step=2, **GROUP)
            for some in groups
        ]
        for step in range(5):
            for one in (own, several):
                loss_of(one, 1000 * dist.get_rank() + 10 * step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        shown.append(
            {
                f"{name}.{key}": value
                for name, one in (("own", own), ("several", several))
                for key, value in one.state_dict().items()
            }
        )
    plain, ours = shown
    return {"different": [key for key, one in plain.items() if not torch.equal(one, ours[key])]}


def accumulated_by_json(stage):
    """Train by DeepSpeed's JSON with two backwards in a step, past the freeze."""
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}},
    }
    with infinity.deepspeed.zero.Init(config_dict_or_path=content):
        model = coded_run.Layers()
    try:
        engine, *_ = infinity.deepspeed.initialize(model=model, config=content)
        for number in range(6):
            engine.backward(loss_of(engine.module, number))
            engine.step()
    except infinity.ConfigError as error:
        return {"error": str(error)}
    return {"error": "none", "steps": engine.global_steps}


def clipped():
    """Clip gradients by hand, after the freeze."""
    model = build("layers")
    optimizer = infinity.OneBitAdam(model.parameters(), freeze_step=1, **GROUP)
    train(model, optimizer, steps=1)
    loss_of(model, dist.get_rank()).backward()
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    except infinity.UnsupportedError as error:
        return {"error": str(error)}
    return {"error": "none"}


NVME = {"nvme": os.environ.get("RANKS_DISK"), "host_memory": int(os.environ["WORLD_SIZE"]) << 20}
CASES = {
    "layers": lambda: compare("layers"),
    "one by one": lambda: compare("layers", reduce_bucket=0),
    "llama": lambda: compare("llama"),
    "nvme": lambda: compare("llama", **NVME),
    "no_sync": lambda: compare("layers", micro=3, once=True),
    "frozen": lambda: compare("llama", frozen="mlp"),
    "blocks": lambda: compare("llama", units="block"),
    "fp32": lambda: compare("llama", dtype="fp32"),
    "qwZ and second parts": lambda: compare("layers", secondary_shard="machine"),
    "crossed": crossed,
    "durable": durable,
    "bf16": lambda: compare("layers", state_dtype="bf16"),
    "int8": lambda: compare("layers", state_dtype="int8"),
    "int8 on nvme": lambda: compare("llama", state_dtype="int8", **NVME),
    "int4": lambda: compare("layers", state_dtype="int4"),
    "int8, durable": lambda: durable(state_dtype="int8"),
    "loaded": loaded,
    "beside one rank": beside_one_rank,
    "twice": twice,
    "clipped": clipped,
    "json": lambda: [accumulated_by_json(stage) for stage in (1, 2)],
    "dropped": dropped,
    "thawed": thawed,
    "resumed and loaded": resumed_and_loaded,
    "stage 1": lambda: compare("layers", stage=1, micro=2, once=True),
    "stage 2": lambda: compare("layers", stage=2),
}


if __name__ == "__main__":
    coded_run.main(sys.argv[1], sys.argv[2:], CASES)

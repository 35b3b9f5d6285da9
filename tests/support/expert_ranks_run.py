"""What ranks that divide experts among them do in the tests: cases by name, an answer as JSON each.

    torchrun --nproc-per-node 2 tests/support/expert_ranks_run.py FOLDER CASE [CASE ...]  # or launches.forked

Rank R writes FOLDER/R.json: {case: answer, or {"error": text}}. The reference is in expert_emulation.py.
"""

import contextlib
import gc
import math
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import infinity
import models
from answers import answer_all, is_of_ranks
from expert_emulation import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    OPTIONS,
    TOP,
    batches,
    emulate,
    experts_of,
    frozen,
    mixtral,
)
from infinity.bench.planning.cuts import in_slices
from infinity.bench.planning.sketch import outline_of_content
from infinity.engine.engine import engine_of_model
from infinity.planning.activations import Method
from infinity.planning.demand import demand
from infinity.planning.expert_tokens import token_traffic
from infinity.planning.setting import Setting
from infinity.sequences.parallel import sequences_of
from infinity.tensors import digest

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
NVME = {"nvme": os.environ.get("RANKS_DISK"), "host_memory": WORLD << 20}


def lopsided(model):
    """Have every token go to the first half of the experts, which the first rank has."""
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _a, out: (*out[:2], out[2] % (EXPERTS // 2)))
    return model


def build(size, how="eager", change=lambda model: model, changes=None, **init):
    torch.manual_seed(0)
    with infinity.Init(**{"host_memory": "64MiB", "timeout_s": 60, "expert_parallel": size, **init}):
        return change(mixtral(how, **(changes or {})))


def moments_of(model, optimizer):
    engine, found = engine_of_model(model), {}
    for name, pieces in models.named_wholes(model):
        if id(pieces[0]) in optimizer.mine and optimizer.counts.get(pieces[0]):
            for key, field in (("exp_avg", "m"), ("exp_avg_sq", "v")):
                read = [engine.parameters.read(one, [field])[0].float() for one in pieces]
                found[f"{key} of {name}"] = read[0] if len(read) == 1 else torch.cat(read)
    return found


def compare(
    size=2,
    *,
    how="eager",
    dtype="bf16",
    steps=3,
    micro=1,
    once=False,
    clip=None,
    freeze=None,
    change=lambda model: model,
    max_norm=None,
    checkpoint=None,
    options=None,
    changes=None,
    **init,
):
    """Train ours, and on the first rank the emulation; return what differs, and what ours has moved."""
    emulation = partial(
        emulate,
        WORLD,
        size,
        how=how,
        dtype=dtype,
        steps=steps,
        micro=micro,
        once=once,
        clip=clip,
        freeze=freeze,
        change=change,
        max_norm=max_norm,
        checkpoint=checkpoint,
        **(changes or {}),
    )
    every, mine = (emulation() if RANK == 0 else None), [None]
    dist.scatter_object_list(mine, every, src=0)
    (expected,) = mine
    model = build(size, how, change, changes, dtype=dtype, **init)
    frozen(model, freeze)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = infinity.AdamW(trained, **OPTIONS, max_norm=max_norm, **(options or {}))
    if checkpoint:
        models.checkpointed(model, reentrant=checkpoint == "reentrant")
    losses = []
    for step in range(steps):
        for one in range(micro):
            ids = batches(RANK, step, one)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        ids = batches(RANK, 99)
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    found = {**model.state_dict(), **moments_of(model, optimizer)}
    stats = infinity.stats(model)
    return {
        "different": [key for key, one in expected[1].items() if not torch.equal(one, found[key])],
        "more": sorted({*found} - {*expected[1]}),
        "losses": losses,
        "expected": expected[0],
        "tokens": stats.exchanged_nbytes["tokens"],
        "slices": len(stats.slices),
        "used": sum(unit.uses > 0 for unit in stats.slices),
        "nvme": stats.nvme_nbytes,
    }


def state_of(model, optimizer):
    """Return digests of all weights, masters and moments, whole, and the steps."""
    engine = engine_of_model(model)
    stored = {}
    for name, pieces in models.named_wholes(model):
        fields = ["hi", "master", *(("m", "v") if optimizer.counts.get(pieces[0]) else ())]
        read = [engine.parameters.read(one, fields) for one in pieces]
        stored[name] = [digest(*(one[field] for one in read)) for field in range(len(fields))]
    steps = sorted({int(one["step"]) for one in optimizer.counts.values()})
    return {"stored": stored, "steps": steps}


def step_of(model, optimizer, number):
    ids = batches(RANK, number)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(size=2, **init):
    model = build(size, **init)
    return model, infinity.AdamW(model.parameters(), **OPTIONS)


def saved():
    """Save what ranks that divide experts have trained; load it on one rank, save that, and load it again on
    all: with experts divided, and not. Train on from each.
    """
    folder = Path(os.environ["RANKS_DISK"])
    ours = trained(**NVME)
    losses = [step_of(*ours, number) for number in range(2)]
    infinity.save(*ours, folder / "divided", extra=RANK)
    state = state_of(*ours)
    alone = [dist.new_group([rank]) for rank in range(WORLD)][RANK]
    single = trained(1, process_group=alone)
    infinity.load(*single, folder / "divided")
    found = {"one rank": state_of(*single) == state}
    if RANK == 0:
        infinity.save(*single, folder / "single")
    dist.barrier()
    loaded = {"again": trained(), "not divided": trained(1), "back": trained()}
    for name, one in loaded.items():
        infinity.load(*one, folder / ("divided" if name == "again" else "single"))
        found[name] = state_of(*one) == state
    expected = step_of(*ours, 2)
    found["goes on"] = step_of(*loaded["again"], 2) == expected == step_of(*loaded["back"], 2)
    found["same end"] = state_of(*loaded["again"]) == state_of(*ours) == state_of(*loaded["back"])
    return {**found, "losses": losses}


def exported():
    """Write Hugging Face's files, and build models from them: that divide their experts, and that do not."""
    folder = Path(os.environ["RANKS_DISK"]) / "exported"
    model, optimizer = trained()
    step_of(model, optimizer, 0)
    infinity.save_pretrained(model, folder, torch.bfloat16)
    state = model.state_dict()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.load_state_dict(state)
    ids = batches(RANK, 7)
    logits, losses = [], []
    for size in (2, 1):
        with infinity.Init(host_memory="64MiB", expert_parallel=size, timeout_s=60):
            again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        again.set_experts_implementation("eager")
        with torch.no_grad():
            logits.append(torch.equal(*(one(input_ids=ids).logits for one in (model, again))))
        other = infinity.AdamW(again.parameters(), **OPTIONS)
        losses.append([step_of(again, other, number) for number in range(2)])
    return {
        "different": [k for k, one in plain.state_dict().items() if not torch.equal(one, state[k])],
        "logits": logits,
        "losses": losses,
    }


def gathered():
    """Read and write experts of all ranks, and read gradients; evaluate and generate in between."""
    model, optimizer = trained(**NVME)
    experts = experts_of(model)[0]
    whole = model.state_dict()["model.layers.0.mlp.experts.down_proj"]
    with infinity.gathered(model):
        read = torch.cat([one.down_proj.detach().clone() for one in experts.tiles])
    with infinity.gathered(experts, write=True), torch.no_grad():
        for number, one in enumerate(experts.tiles):
            one.down_proj.mul_(1 + number)
    factors = torch.arange(1, 1 + len(experts.tiles)).repeat_interleave(EXPERTS // len(experts.tiles))
    changed = model.state_dict()["model.layers.0.mlp.experts.down_proj"]
    ids = batches(RANK, 3)
    model(input_ids=ids, labels=ids).loss.backward()
    model.eval()
    with torch.no_grad():
        before = model(input_ids=ids).logits
        tokens = model.generate(torch.full((1, 2), 3), max_new_tokens=3, do_sample=False)
    model.train()
    grads = [one.down_proj.grad for one in experts.tiles if one.down_proj.grad is not None]
    dense = [one.clone() for one in grads]
    norms = [float(one.norm()) for one in grads]
    near = all(abs(float(one.double().norm()) - norm) < 1e-6 for one, norm in zip(dense, norms, strict=True))
    grads[0][0].mul_(0.5)
    dense[0][0] *= 0.5
    edited = torch.equal(grads[0], dense[0])
    model(input_ids=ids, labels=ids).loss.backward()  # the ranks that have them sum in fp32 from here on
    sums = [one.clone() for one in grads]
    for one in grads:
        one.div_(2)
    halved = all(torch.equal(one, whole / 2) for one, whole in zip(grads, sums, strict=True))
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    losses = [step_of(model, optimizer, number) for number in range(2)]
    return {
        "read": torch.equal(read, whole),
        "written": torch.equal(changed, whole * factors.view(-1, 1, 1).to(whole.dtype)),
        "finite": bool(before.isfinite().all()),
        "tokens": tokens.tolist(),
        "having": len(grads),
        "norms": norms,
        "near": near,
        "edited": edited,
        "halved": halved,
        "losses": losses,
    }


def refused():
    """Return what is said where experts cannot be divided, or are used in another way."""
    said = {}

    def attempt(name, call):
        try:
            call()
            said[name] = "nothing"
        except Exception as error:  # noqa: BLE001 - it is the answer
            said[name] = f"{type(error).__name__}: {error}"
        dist.barrier()

    attempt("ranks", lambda: build(3))
    attempt("experts", lambda: build(2, changes={"num_local_experts": 7}))
    attempt("none", lambda: models.build("llama", host_memory="64MiB", expert_parallel=2))
    attempt("whole", lambda: build(2, experts="whole"))
    model, optimizer = trained()
    experts = list(experts_of(model)[0].parameters())
    attempt("orthogonalized", lambda: infinity.Muon(experts))
    attempt("orthogonalized, whole", lambda: infinity.Muon([experts_of(model)[0].down_proj]))
    ids = batches(RANK, 0)
    tile = experts_of(model)[0].tiles[-1 if RANK == 0 else 0]
    model.config._experts_implementation = "deepgemm"
    attempt("implementation", lambda: model(input_ids=ids))
    model.config._experts_implementation = "eager"
    attempt("elsewhere", lambda: tile({0: (torch.ones(1, HIDDEN),)}, lambda _stacks, rows: rows))
    model(input_ids=ids, labels=ids).loss.backward()
    weight = experts_of(model)[0].tiles[0].down_proj
    weight.grad = torch.ones(weight.shape, dtype=weight.dtype)
    attempt("assigned", optimizer.step)
    return said


def architectures():
    """Compare losses of models that divide experts with those of a model that does not, in fp32."""
    far, tokens = {}, []

    def losses_of(name, how, size):
        with infinity.Init(host_memory="512MiB", dtype="fp32", expert_parallel=size):
            model = models.of_experts(name, how)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, eps=1e-4, max_norm=1.0)
        losses = torch.tensor([step_of(model, optimizer, number) for number in range(3)])
        tokens.append(infinity.stats(model).exchanged_nbytes["tokens"] if size > 1 else math.inf)
        return losses

    for name in models.OF_EXPERTS:
        expected = losses_of(name, "eager", 1)
        for how in ("eager", "grouped_mm", "batched_mm"):
            far[f"{name} {how}"] = float((losses_of(name, how, 2) - expected).abs().max())
            gc.collect()
    return {"far": far, "tokens": min(tokens)}


def traffic():
    """Return what a step sends of tokens, and what is gathered of weights, beside what the formulas say."""
    model, optimizer = trained(dtype="fp32")
    step_of(model, optimizer, 0)
    before = infinity.stats(model)
    step_of(model, optimizer, 1)
    moved = infinity.stats(model).since(before).exchanged_nbytes
    tokens = sum(batches(rank, 1).numel() for rank in range(WORLD))
    dense = [unit for unit in engine_of_model(model).units if ".experts." not in unit.name]
    each = 4 * (2 * HIDDEN + 1)  # a row there and back, and its weight
    outline, _ = in_slices(outline_of_content("ours", model.config.to_dict()), tokens, 2)
    method = Method(tokens, tokens, checkpointing=False)  # of all ranks
    setting = Setting(64 << 20, dtype="fp32", ranks=WORLD, expert_parallel=2, method=method)
    planned = demand(outline, setting)
    return {
        "planned of all": token_traffic(outline, setting).nbytes + 2 * LAYERS * TOP * tokens * 4,
        "numel": sum(unit.record.shard.numel for unit in engine_of_model(model).units),
        "planned numel": sum(one.numel for one in planned.units),
        "tokens": moved["tokens"],
        "expected of all": 2 * LAYERS * TOP * tokens * each,
        "gathered": moved["gather"],
        "at most": 2 * sum(unit.resident_nbytes for unit in dense),
        "held": [unit.record.shard.numel > 0 for unit in engine_of_model(model).units],
    }


def overflow():
    """Train in fp16 with GradScaler, an expert of one rank overflowing once; return scales and steps."""
    model, optimizer = trained(dtype="fp16")
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2), []
    for number in range(4):
        ids = batches(RANK, number)
        loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss * (1e6 if number == 1 and RANK == 1 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    steps = sorted({int(one["step"]) for one in optimizer.counts.values()})
    finite = all(bool(one.isfinite().all()) for one in model.state_dict().values())
    return {"scales": scales, "steps": steps, "finite": finite}


def failing():
    """Raise in the middle of a forward, and of a backward, on all ranks; train on as one that did not."""
    found = []
    for fails in (False, True):
        model, optimizer = trained(**NVME)
        step_of(model, optimizer, 0)
        for where in ("forward", "backward") if fails else ():
            ids = batches(RANK, 9)

            def fail(*_, where=where):
                raise ValueError(where)

            norm = model.model.layers[1].post_attention_layernorm
            if where == "forward":
                handle = norm.register_forward_hook(fail)
            else:
                handle = norm.register_full_backward_hook(fail)
            with contextlib.suppress(ValueError):
                model(input_ids=ids, labels=ids).loss.backward()
            handle.remove()
            optimizer.zero_grad()
        found.append([step_of(model, optimizer, number) for number in (1, 2)])
    return {"same": found[0] == found[1], "losses": found[0]}


def beside():
    """Divide experts in a model whose sequences are divided, too, and where state has 8 bits."""
    with infinity.Init(**NVME, expert_parallel=2, sequence_parallel=2, dtype="fp32"):
        torch.manual_seed(0)
        model = mixtral()
    optimizer = infinity.AdamW(model.parameters(), **OPTIONS)
    sequences, losses = sequences_of(model), []
    for step in range(2):
        ids = models.batch(step, rows=1, length=8)
        part = sequences.split({"input_ids": ids, "labels": ids})
        loss = model(**part).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    small, optimizer = trained(state_dtype="int8")
    eight = [step_of(small, optimizer, number) for number in range(3)]
    return {"losses": losses, "eight": eight}


def durable():
    """Train a durable run for some steps; resume it in another engine, and go on; train the same without."""
    begun, losses = [], []
    for last in (3, 5):
        model = build(2, **NVME, durable=True)
        optimizer = infinity.AdamW(model.parameters(), **OPTIONS)
        begun.append(infinity.resume(model, optimizer))
        losses.append([step_of(model, optimizer, number) for number in range(begun[-1], last)])
        state = state_of(model, optimizer)
        engine_of_model(model).close()
    whole = trained()
    expected = [step_of(*whole, number) for number in range(5)]
    same = losses == [expected[:3], expected[begun[1] :]] and state == state_of(*whole)
    return {"begun": begun, "same": same, "losses": expected}


CASES = {
    "saved": saved,
    "exported": exported,
    "gathered": gathered,
    "refused": refused,
    "durable": durable,
    "architectures": architectures,
    "traffic": traffic,
    "overflow": overflow,
    "failing": failing,
    "beside": beside,
    "in memory": compare,
    "nvme": lambda: compare(**NVME),
    "fp32": lambda: compare(dtype="fp32", max_norm=0.5, **NVME),
    "grouped": lambda: compare(how="grouped_mm", clip=0.5, micro=2, **NVME),
    "grouped fp32": lambda: compare(how="grouped_mm", dtype="fp32", max_norm=0.5),
    "checkpointed": lambda: compare(checkpoint="not", options={"update": "backward"}, **NVME),
    "reentrant": lambda: compare(checkpoint="reentrant", max_norm=0.5),
    "lopsided": lambda: compare(change=lopsided, changes={"num_experts_per_tok": 1}, **NVME),
    "lopsided, frozen below": lambda: compare(
        change=lopsided, changes={"num_experts_per_tok": 1}, freeze=("embed", "attn", "norm", "gate.weight")
    ),
    "frozen experts": lambda: compare(freeze=("experts",), **NVME),
    "stage 1": lambda: compare(stage=1, micro=2, once=True, clip=0.5),
    "stage 1 once": lambda: compare(stage=1, max_norm=0.5),
    "stage 2": lambda: compare(stage=2),
}


def main(folder, cases):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    gc.collect()
    gc.freeze()
    dist.init_process_group("gloo")
    answer_all(folder, cases, lambda case: CASES[case](), ends=is_of_ranks)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

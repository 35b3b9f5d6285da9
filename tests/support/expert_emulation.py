"""Ranks that divide experts, emulated in one process: each is a thread with a plain model in memory, whole
stacks included, of which it uses its own experts.

Threads hand each other the rows of tokens; every gradient becomes the mean over all of them, summed in fp32
in their order, divided once and rounded once.
"""

import threading

import torch
import torch.nn.functional as F
import transformers
from transformers.integrations.moe import _grouped_linear

import models
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference import recipe as reference
from infinity.reference.moments import widened
from thread_ranks import on_ranks

EXPERTS, LAYERS, HIDDEN, TOP = 8, 2, 32, 2
SIZES = {
    **models.SIZES,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 256,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP,
}
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
COMPUTES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def mixtral(how="eager", **changes):
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**SIZES, **changes}))
    model.set_experts_implementation(how)
    return model


def experts_of(model):
    return [layer.mlp.experts for layer in model.model.layers]


def frozen(model, freeze):
    for name, one in model.named_parameters():
        one.requires_grad_(freeze is None or not any(part in name for part in freeze))


class Handed(torch.autograd.Function):
    """Rows by expert, from every thread to the one that has the expert; gradients take the way back."""

    @staticmethod
    def forward(ctx, group, size, _lead, *rows):
        ctx.group, ctx.size = group, size
        given = group._all([one.detach() for one in rows])
        group_of = group.rank // size
        ctx.sharers = range(group_of * size, (group_of + 1) * size)
        each = EXPERTS // size
        ctx.mine = range(group.rank % size * each, (group.rank % size + 1) * each)
        ctx.counts = [[len(given[one][expert]) for one in ctx.sharers] for expert in ctx.mine]
        return tuple(torch.cat([given[one][expert] for one in ctx.sharers]) for expert in ctx.mine)

    @staticmethod
    def backward(ctx, *grads):
        parts = [one.split(counts) for one, counts in zip(grads, ctx.counts, strict=True)]
        mine = {
            (expert, sharer): part
            for expert, of_expert in zip(ctx.mine, parts, strict=True)
            for sharer, part in zip(ctx.sharers, of_expert, strict=True)
        }
        back = {key: one for given in ctx.group._all(mine) for key, one in given.items()}
        return None, None, None, *(back[expert, ctx.group.rank] for expert in range(EXPERTS))


class HandedBack(torch.autograd.Function):
    """Results of this thread's experts, to the threads whose tokens they are of."""

    @staticmethod
    def forward(ctx, group, size, counts, _lead, *results):
        ctx.group, ctx.size = group, size
        first = group.rank // size * size
        each = EXPERTS // size
        mine = range(group.rank % size * each, (group.rank % size + 1) * each)
        parts = {
            (expert, first + number): part
            for expert, one, of in zip(mine, results, counts, strict=True)
            for number, part in enumerate(one.detach().split(of))
        }
        back = {key: one for given in group._all(parts) for key, one in given.items()}
        ctx.mine, ctx.sharers = mine, range(first, first + size)
        return tuple(back[expert, group.rank] for expert in range(EXPERTS))

    @staticmethod
    def backward(ctx, *grads):
        given = ctx.group._all(list(grads))
        whole = [torch.cat([given[one][expert] for one in ctx.sharers]) for expert in ctx.mine]
        return None, None, None, None, *whole


def emulated(module, group, size, how):
    """Have a plain module of experts compute those of its thread, with the rows of all."""

    def product(rows, stack, expert):
        if how == "eager":
            return F.linear(rows, stack[expert])
        ends = torch.tensor([len(rows)], dtype=torch.int32)
        return _grouped_linear(rows, stack[expert : expert + 1], ends)

    def one_expert(expert, rows):
        gate, up = product(rows, module.gate_up_proj, expert).chunk(2, dim=-1)
        return product(module.act_fn(gate) * up, module.down_proj, expert)

    def forward(hidden, ids, weights):
        lead = torch.empty(0, requires_grad=torch.is_grad_enabled() and module.gate_up_proj.requires_grad)
        places = [torch.where(ids.t() == expert) for expert in range(EXPERTS)]
        if how != "eager":  # tokens in their order
            places = [torch.where(ids == expert)[::-1] for expert in range(EXPERTS)]
        rows = [hidden[token] for _, token in places]
        came = Handed.apply(group, size, lead, *rows)
        counts = group._all([len(one) for one in rows])
        first, each = group.rank // size * size, EXPERTS // size
        mine = range(group.rank % size * each, (group.rank % size + 1) * each)
        of_mine = [[counts[first + one][expert] for one in range(size)] for expert in mine]
        if how == "eager":
            weighted = Handed.apply(group, size, lead, *(weights[token, k, None] for k, token in places))
            results = [
                ((one_expert(e, one) if len(one) else one) * weight).to(hidden.dtype)
                for e, one, weight in zip(mine, came, weighted, strict=True)
            ]
            back = HandedBack.apply(group, size, of_mine, lead, *results)
            final = torch.zeros_like(hidden)
            for expert in ids.unique().tolist():
                final.index_add_(0, places[expert][1], back[expert])
            return final
        results = [one_expert(e, one) if len(one) else one for e, one in zip(mine, came, strict=True)]
        back = HandedBack.apply(group, size, of_mine, lead, *results)
        spread = hidden.new_zeros(*ids.shape, hidden.shape[-1])
        for (k, token), one in zip(places, back, strict=True):
            spread = spread.index_put((token, k), one)
        return (spread * weights[..., None]).sum(dim=1).to(hidden.dtype)

    module.forward = forward


def mean(rows):
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    return (total / len(rows)).to(rows[0].dtype)


def batches(rank, step, one=0):
    return models.batch(1000 * rank + 10 * step + one, rows=1, length=4 + rank)


def accumulated(group, model, trained, step, *, micro, once):
    """Run the backwards of one step of a thread; have its gradients be the means over all threads."""
    sums, losses = [None] * len(trained), []
    for one in range(micro):
        ids = batches(group.rank, step, one)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained]
        of_ranks = [grads] if once else group._all(grads)
        for number, rows in enumerate(zip(*of_ranks, strict=True)):
            new = rows[0] if once else mean(rows)
            sums[number] = new if sums[number] is None else sums[number].float() + new.float()
        for p in trained:
            p.grad = None
    if once:
        sums = [mean(rows) for rows in zip(*group._all(sums), strict=True)]
    for p, total in zip(trained, sums, strict=True):
        reference._store(p, total, torch.ones(()))
    return losses


def emulate(
    ranks, size, *, how, dtype, steps, micro, once, clip, freeze, change, max_norm, checkpoint, **changes
):
    """Train the emulation; return each rank's losses, weights and moments."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def work(group):
        with lock:
            torch.manual_seed(0)
            model = prepare(change(mixtral("eager", **changes)), COMPUTES[dtype])
        for module in experts_of(model):
            emulated(module, group, size, how)
        frozen(model, freeze)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = ReferenceAdamW(trained, **OPTIONS, max_norm=max_norm)
        if checkpoint:
            models.checkpointed(model, reentrant=False)
        losses = []
        for step in range(steps):
            losses += accumulated(group, model, trained, step, micro=micro, once=once)
            if clip is not None:
                reference.clip_grad_norm_(optimizer, clip)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            ids = batches(group.rank, 99)
            losses.append(model(input_ids=ids, labels=ids).loss.item())
        moments = {
            f"{key} of {name}": one
            for name, p in model.named_parameters()
            if p in optimizer.state
            for key, one in zip(("exp_avg", "exp_avg_sq"), widened(optimizer.state[p], "fp32"), strict=True)
        }
        return losses, {**model.state_dict(), **moments}

    lock = threading.Lock()
    try:
        return on_ranks(ranks, work)
    finally:
        torch.set_num_threads(threads)

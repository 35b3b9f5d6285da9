"""Plain data parallelism in memory, which ranks_run compares with: every gradient is the mean over the ranks.

A training of it is done once in a process, for all cases that differ in where what lies and when it comes.
"""

import contextlib
import functools
import os

import torch
import torch.distributed as dist
import transformers

import infinity
import models
from infinity.ranks.machines import LOCAL_SIZE
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference import recipe as reference

WIDE = {
    **models.SIZES,
    "vocab_size": 301,
    "hidden_size": 96,
    "intermediate_size": 168,
    "num_hidden_layers": 2,
}
WIDE_GPT2 = {**models.GPT2, "vocab_size": 301, "n_embd": 96, "n_layer": 2}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
models.MODELS.update(  # wide enough that every rank holds a part of most units, and parameters are cut
    {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**WIDE_GPT2, **STILL)),
        "gpt2-dropout": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**WIDE_GPT2)),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2)
        ),
        "experts": lambda: transformers.MixtralForCausalLM(  # the ranks' tokens go to some of them
            transformers.MixtralConfig(
                **{**WIDE, "num_hidden_layers": 1}, num_local_experts=32, num_experts_per_tok=1
            )
        ),
    }
)


def mean_over_ranks(grad, group=None):
    rows = [torch.empty_like(grad) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, grad.contiguous(), group=group)
    near = int(os.environ.get(LOCAL_SIZE, len(rows)))
    of_machines = [sum_of(rows[first : first + near]).to(grad.dtype) for first in range(0, len(rows), near)]
    return (sum_of(of_machines if len(of_machines) > 1 else rows) / len(rows)).to(grad.dtype)


def sum_of(rows):
    return sum(rows[1:], rows[0].float())


def build_reference(name, seed=0, group=None, computes="bf16"):
    """Return the plain model of a rank, whose gradients are means over the ranks as they come."""
    torch.manual_seed(seed)
    model = models.MODELS[name]()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: mean_over_ranks(grad, group))
    if "in fp32" in name:
        prepare(model.lm_head, torch.float32)
    return prepare(model, models.COMPUTES[computes])


def edit(model):
    """Change the gradients, which are the same on every rank, in place."""
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    for parameter in model.parameters():
        parameter.grad.div_(3).add_(torch.ones_like(parameter), alpha=1e-3)
        parameter.grad[0].mul_(0.3)
        parameter.grad.view(-1)[-5:] = 0.25


def train(model, optimizer, *, steps=3, micro=1, once=False, clip=None, edits=False):
    """Train on this rank's batches; return the losses. once: reduce only in each step's last backward."""
    losses = []
    for step in range(steps):
        for one in range(micro):
            ids = models.batch(1000 * dist.get_rank() + 10 * step + one)
            local = once and one < micro - 1 and not isinstance(optimizer, ReferenceAdamW)
            with infinity.no_sync(model) if local else contextlib.nullcontext():
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            losses.append(loss.item())
        if once and isinstance(optimizer, ReferenceAdamW):
            mean_of_sums(model)
        if edits:
            edit(model)
        if clip is not None and isinstance(optimizer, ReferenceAdamW):
            reference.clip_grad_norm_(optimizer, clip)
        elif clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def mean_of_sums(model):
    """Let each stored gradient of the reference, this rank's fp32 sum, be the mean of the ranks' sums."""
    for parameter in model.parameters():
        value, factor = reference._stored(parameter)
        reference._store(parameter, mean_over_ranks(value), factor)


def trained(model, kind, options, *, checkpoint=None, freeze=None, **how):
    """Train a model of ours or of the reference by an optimizer of this kind; return all that it shows."""
    if checkpoint is not None:
        models.checkpointed(model, checkpoint == "reentrant")
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(freeze is None or freeze not in key)
    optimizer = kind([one for one in model.parameters() if one.requires_grad], **options)
    torch.manual_seed(100 + dist.get_rank())  # of dropout: each rank draws its own
    losses = train(model, optimizer, **how)
    return {"losses": losses, **model.state_dict(), **state_of(optimizer, model)}


def in_memory(name, computes, options, *, group=None, **how):
    """Train the reference; return what it shows. options: pairs."""
    model = models.build(name) if how["once"] else build_reference(name, group=group, computes=computes)
    return trained(model, ReferenceAdamW, dict(options), **how)


once_in_memory = functools.cache(in_memory)


def compare(
    name,
    *,
    steps=3,
    micro=1,
    once=False,
    clip=None,
    edits=False,
    checkpoint=None,
    freeze=None,
    options=None,
    group=None,
    **init,
):
    """Train the reference and ours; return what differs."""
    options = {"lr": 1e-2, "weight_decay": 0.1, **(options or {})}
    plainly = tuple((key, one) for key, one in options.items() if key != "update")
    how = {"steps": steps, "micro": micro, "once": once, "clip": clip, "edits": edits, "freeze": freeze}
    computes = init.get("dtype", "bf16")
    if group is None:
        expected = once_in_memory(name, computes, plainly, **how)
    else:
        expected = in_memory(name, computes, plainly, group=group.get_group(), **how)
    model = models.build(name, **{"host_memory": "64MiB", "process_group": group, **init})
    actual = trained(model, infinity.AdamW, options, checkpoint=checkpoint, **how)
    assert expected.keys() == actual.keys()
    stats = infinity.stats(model)
    return {
        "used": sum(unit.uses > 0 for unit in stats.units),
        "units": len(stats.units),
        "different": [key for key, one in expected.items() if not same(one, actual[key])],
        "losses": actual["losses"],
        "nvme": stats.nvme_written_nbytes,
        "spilled": sum(size for (_, field), size in stats.written_nbytes.items() if "grad" in field),
    }


def state_of(optimizer, model=None):
    """Return an optimizer's moments by number, or, given its model, by the names where no layer is cut."""
    state = optimizer.state_dict()["state"]
    keys = ("exp_avg", "exp_avg_sq")
    if model is None:
        return {f"{key} of parameter {one}": state[one][key].float() for one in state for key in keys}
    numbers = {id(one): number for number, one in enumerate(optimizer.param_groups[0]["params"])}
    return {
        f"{key} of {name}": torch.cat([state[numbers[id(one)]][key].float() for one in pieces])
        for name, pieces in models.named_wholes(model)
        for key in keys
        if id(pieces[0]) in numbers and numbers[id(pieces[0])] in state
    }


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other

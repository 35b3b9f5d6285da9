"""Muon on several ranks, each of which has a part of a matrix: cases of ranks_run."""

import contextlib
import functools
import math
import os

import torch.distributed as dist

import infinity
import models
from infinity.lane.matrices import WholeMatrices
from plain_muon import ADAMW, MUON, PlainMuon
from ranks_reference import build_reference, same

STEPS = 3


def train(model, optimizer, micro):
    """Train on this rank's batches; return the losses and weights."""
    first = 1000 * dist.get_rank()
    losses = models.train(
        model, optimizer, STEPS, micro, ids_of=lambda step, micro: models.batch(first + 10 * step + micro)
    )
    return {"losses": losses, **model.state_dict()}


@functools.cache
def in_memory(name, dtype, state_dtype, muons, clip, micro):
    """Train the reference, once for all cases that differ in where what lies. muons: the names of Muon's."""
    model = build_reference(name, computes=dtype)
    return train(model, PlainMuon(model, muons, clip=clip, state_dtype=state_dtype), micro)


@contextlib.contextmanager
def orthogonalized():
    """Note how many matrices this rank orthogonalizes at a time."""
    real, found = WholeMatrices.orthogonalize, []

    def noted(matrices, index, stack):
        found.append(math.prod(stack.shape[:-2]))
        real(matrices, index, stack)

    WholeMatrices.orthogonalize = noted
    try:
        yield found
    finally:
        WholeMatrices.orthogonalize = real


def compare_muon(name, *, micro=1, update="forward", clip=None, dtype="bf16", **init):
    """Train by Muon, plainly and on the ranks; return what differs, as ranks_reference.compare does."""
    ours = models.build(name, **{"host_memory": "64MiB", "dtype": dtype, **init})
    groups = infinity.muon_groups(ours, ADAMW, **MUON)
    optimizer = infinity.Muon(groups, update=update, max_norm=clip)
    muons = {id(one) for one in groups[0]["params"]}
    names = {key for key, pieces in models.named_wholes(ours) if id(pieces[0]) in muons}
    expected = in_memory(name, dtype, init.get("state_dtype", "fp32"), frozenset(names), clip, micro)
    with orthogonalized() as here:
        actual = train(ours, optimizer, micro)
    numbers = [one["momentum_buffer"] for one in optimizer.state_dict()["state"].values() if len(one) == 2]
    stats, matrices = infinity.stats(ours), groups[0]["params"]
    return {
        "different": [key for key, one in expected.items() if not same(one, actual[key])],
        "momenta": len(numbers),
        "weights": len(matrices),
        "losses": actual["losses"],
        "nvme": stats.nvme_written_nbytes,
        "orthogonalized": sum(here),
        "matrices": STEPS * sum(math.prod(one.shape[:-2]) for one in matrices),
        "exchanged": stats.exchanged_nbytes.get("orthogonalize", 0),
        "elements": STEPS * sum(one.numel() for one in matrices),
    }


NVME = {"nvme": os.environ.get("RANKS_DISK"), "host_memory": int(os.environ["WORLD_SIZE"]) << 20}
MUONS = {
    "muon": lambda: compare_muon("gpt2"),
    "muon clipped": lambda: compare_muon("llama", micro=2, clip=0.5),
    "muon fp32": lambda: compare_muon("llama", dtype="fp32"),
    "muon backward": lambda: compare_muon("gpt2", update="backward"),
    "muon of experts": lambda: compare_muon("experts", **NVME),
    "muon in bf16 state": lambda: compare_muon("gpt2", state_dtype="bf16"),
    "muon stage 2": lambda: compare_muon("llama", stage=2, update="backward"),
    "nvme muon": lambda: compare_muon("gpt2", **NVME),
    "nvme muon in int4": lambda: compare_muon("llama", state_dtype="int4", **NVME),
    "nvme muon in int8": lambda: compare_muon("gpt2", state_dtype="int8", update="backward", **NVME),
    "nvme muon backward": lambda: compare_muon("gpt2", update="backward", **NVME),
}

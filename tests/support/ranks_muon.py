"""Muon on several ranks, each of which has a part of a matrix: cases of ranks_run."""

import os

import torch
import torch.distributed as dist

import infinity
import models
from plain_muon import ADAMW, MUON, PlainMuon


def compare_muon(build_reference, name, *, micro=1, update="forward", clip=None, dtype="bf16", **init):
    """Train by Muon, plainly and on the ranks; return what differs, as ranks_run.compare does.

    build_reference: makes the plain model, whose gradients are means over the ranks.
    """
    ours = models.build(name, **{"host_memory": "64MiB", "dtype": dtype, **init})
    groups = infinity.muon_groups(ours, ADAMW, **MUON)
    optimizer = infinity.Muon(groups, update=update, max_norm=clip)
    muons = {id(one) for one in groups[0]["params"]}
    names = {key for key, pieces in models.named_wholes(ours) if id(pieces[0]) in muons}
    theirs = PlainMuon(build_reference(name, computes=dtype), names, clip=clip)
    shown = []
    for model, one in ((theirs.model, theirs), (ours, optimizer)):
        losses = []
        for step in range(3):
            for number in range(micro):
                ids = models.batch(1000 * dist.get_rank() + 10 * step + number)
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                losses.append(loss.item())
            one.step()
            one.zero_grad()
        shown.append({"losses": losses, **model.state_dict()})
    expected, actual = shown
    numbers = [one["momentum_buffer"] for one in optimizer.state_dict()["state"].values() if len(one) == 2]
    stats = infinity.stats(ours)
    return {
        "different": [key for key, one in expected.items() if not _same(one, actual[key])],
        "momenta": len(numbers),
        "losses": actual["losses"],
        "nvme": stats.nvme_written_nbytes,
        "orthogonalized": stats.exchanged_nbytes.get("orthogonalize", 0),
    }


def _same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def muon_cases(build_reference):
    """Return the cases by name."""
    nvme = {"nvme": os.environ.get("RANKS_DISK"), "host_memory": int(os.environ["WORLD_SIZE"]) << 20}

    def case(name, **options):
        return lambda: compare_muon(build_reference, name, **options)

    return {
        "muon": case("gpt2"),
        "muon clipped": case("llama", micro=2, clip=0.5),
        "muon fp32": case("llama", dtype="fp32"),
        "muon backward": case("gpt2", update="backward"),
        "muon of experts": case("experts", **nvme),
        "muon stage 2": case("llama", stage=2, update="backward"),
        "nvme muon": case("gpt2", **nvme),
        "nvme muon backward": case("gpt2", update="backward", **nvme),
    }

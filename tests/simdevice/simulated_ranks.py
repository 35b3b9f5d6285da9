"""Two ranks train one model over gloo, each on a simulated device of its own."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import tempfile
import threading

import torch
import torch.distributed as dist

import models
from infinity import AdamW, stats
from infinity.engine.engine import engine_of_model
from infinity.planning.activations import Method
from infinity.ranks.group import Channel
from infinity.reference import ReferenceAdamW, prepare
from infinity.units.device_tier import lives_on_device
from places import disk
from planned_units import plan_beside
from simulated_counts import Uses, plain_uses
from simulator import Simulator

RANKS = 2
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
STAGES = {
    f"stage {stage}, {update}": {"stage": stage, "update": update, "device": device}
    for stage, update, device in (
        (3, "backward", "512KiB"),
        (3, "forward", "512KiB"),
        (1, "forward", "1536KiB"),
        (2, "backward", "1MiB"),
    )
}
ALL = {"stage": 3, "update": "backward", "device": None, "steps": 4}
TIER = {
    "room for all": ALL,
    "room for half": {**ALL, "device": "1536KiB"},
    "summed and clipped": {**ALL, "update": "forward", "accumulate": 2, "clip": 0.05},
    "summed in little room": {**ALL, "update": "forward", "accumulate": 3, "device": "768KiB"},
    "frozen": {**ALL, "frozen": True},
    "in host memory": {**ALL, "nvme": False, "device": "1MiB"},
}
"""Cases of stage 3 in which a rank's parts of records live on its device."""
STAGES |= {f"on the device, {name}": case for name, case in TIER.items()}
DELAYS = {"at once": (0, 0), "0.2 ms": (200, 20), "20 ms": (20_000, 50)}
"""Of copies and of kernels, in microseconds."""
CASES = {
    f"{RANKS} ranks, {name}, {delay}": {**case, "delays": delays}
    for name, case in STAGES.items()
    for delay, delays in DELAYS.items()
}
_gather, _exchange = Channel.gather, Channel.exchange
COLLECTIVES = collections.defaultdict(list)
"""What a thread has exchanged, in order, and on which stream."""


def note(what):
    stream = torch.accelerator.current_stream().stream_id
    COLLECTIVES[threading.current_thread().name].append((what, stream))


def exchanged():
    """Return what each thread has exchanged, on which streams, and that on which this one computes."""
    return {
        "collectives": {name: [what for what, _ in those] for name, those in COLLECTIVES.items()},
        "streams": {name: sorted({stream for _, stream in those}) for name, those in COLLECTIVES.items()},
        "computes_on": torch.accelerator.current_stream().stream_id,
    }


def gather_over_host(channel, whole, part, what, beside=None):
    """Channel.gather for gloo, which knows the host's memory alone; of ranks on one machine."""
    if whole.device.type == "cpu":
        return _gather(channel, whole, part, what, beside)
    note(what)
    rows = torch.empty(whole.shape, dtype=whole.dtype)
    _gather(channel, rows, part.cpu(), what)
    whole.copy_(rows)
    return None


def exchange_over_host(channel, received, sent, what, rows=None):
    """The same for Channel.exchange."""
    if sent.device.type == "cpu":
        return _exchange(channel, received, sent, what, rows)
    note(what)
    came = torch.empty(received.shape, dtype=received.dtype)
    _exchange(channel, came, sent.cpu(), what, rows)
    received.copy_(came)
    return None


def backward(model, number, place):
    ids = models.batch(1000 * dist.get_rank() + number).to(place)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


def train(model, optimizer, place, case, after_step=lambda: None):
    losses, micros = [], case.get("accumulate", 1)
    for step in range(case.get("steps", 3)):
        losses += [backward(model, micros * step + micro, place) for micro in range(micros)]
        if "clip" in case:
            models.clip_norm(model, optimizer, case["clip"])
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return losses


def freeze(model, case):
    """Freeze the blocks, where the case says so; return what is trained."""
    for parameter in model.model.layers.parameters() if case.get("frozen") else ():
        parameter.requires_grad = False
    return [one for one in model.parameters() if one.requires_grad]


def planned(plain, case, engine):
    """Return what a plan of these ranks lets live on the device of each: names of units, and the bytes
    of their records, or of the copies of all of them.
    """
    need, names, there = plan_beside(
        plain,
        engine,
        nvme=case.get("nvme", True),
        update=case["update"],
        micro_batches=case.get("accumulate", 1),
        ranks=RANKS,
        local_ranks=RANKS,
        method=Method(checkpointing=False),
    )
    nbytes = [12 * one.numel if one.part_there else 2 * RANKS * one.numel for one in need.units]
    return {"units": names, "nbytes": sum(nbytes[unit] for unit in there)}


@functools.cache
def in_memory(case):
    """Return a model that plain data parallelism has trained, and its losses. case: pairs of names and values
    that say what is computed.
    """
    from ranks_reference import mean_over_ranks

    case = dict(case)
    torch.manual_seed(0)
    plain = models.MODELS["llama"]()
    trained = freeze(plain, case)
    for parameter in trained:
        parameter.register_hook(mean_over_ranks)
    prepare(plain, torch.bfloat16).train()
    return plain, train(plain, ReferenceAdamW(trained, **SETTINGS), "cpu", case)


@functools.cache
def on_the_device(frozen, simulator):
    """Return what a backward takes on the device in plain PyTorch, see plain_uses."""
    torch.manual_seed(0)
    model = prepare(models.MODELS["llama"](), torch.bfloat16).train()
    freeze(model, {"frozen": frozen})
    return plain_uses(model, lambda model: backward(model, 0, "sim"), simulator)


def in_the_end(plain, case, engine):
    """Return what was exchanged, the units that live on the device, and those of a plan, in stage 3."""
    names = sorted(unit.name for unit in engine.units if lives_on_device(unit))
    said = planned(plain, case, engine) if case["stage"] == 3 else None
    return {**exchanged(), "there": names, "planned": said}


def run(name: str, simulator: Simulator) -> dict[str, object]:
    """Train as one of the ranks, and beside plain data parallelism in memory."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    Channel.gather, Channel.exchange = gather_over_host, exchange_over_host
    case = CASES[name]
    COLLECTIVES.clear()
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        tempfile.TemporaryDirectory(prefix="infinity-", dir=disk()) as folder,
    ):
        computed = ("steps", "accumulate", "clip", "frozen")
        plain, expected = in_memory(tuple((key, case[key]) for key in computed if key in case))
        activations, plain_pass = on_the_device(case.get("frozen", False), simulator)
        gc.collect()
        simulator.delay(*case["delays"], 1 + dist.get_rank(), 50)
        simulator.restart()
        before = simulator.counts()["allocated"]
        ours = models.build(
            "llama",
            nvme=folder if case.get("nvme", True) else None,
            host_memory="64MiB",
            device="sim:0",
            device_memory=case["device"],
            stage=case["stage"],
        )
        ours.to("sim").train()
        room = engine_of_model(ours).device.room
        before += sum(room.nbytes(one.nbytes) for one in ours.buffers())
        uses = Uses(ours, lambda: simulator.counts()["allocated"] - before - room.ledger.held_nbytes)
        optimizer = AdamW(freeze(ours, case), update=case["update"], **SETTINGS)
        seen, waits = [stats(ours)], [0]

        def after_step():
            seen.append(stats(ours))
            waits.append(sum(map(simulator.waits_of, uses.threads)))

        losses = train(ours, optimizer, "sim", case, after_step)
        most = simulator.counts()["peak"] - before
        found = {key: value.cpu() for key, value in ours.state_dict().items()}
    torch.accelerator.synchronize()
    dist.barrier()
    different = [key for key, value in plain.state_dict().items() if not torch.equal(value, found[key])]
    return {
        "losses": losses == expected,
        "different": different,
        "most": most,
        "activations": activations,
        "device_memory": seen[-1].device_budget_nbytes,
        "uncounted": uses.beside(plain_pass),
        "uploaded": [one.since(other).uploaded_nbytes for other, one in itertools.pairwise(seen)],
        "downloaded": [one.since(other).downloaded_nbytes for other, one in itertools.pairwise(seen)],
        "waits_of_backward": [after - before for before, after in itertools.pairwise(waits)],
        "on_device": seen[-1].device_nbytes,
        **in_the_end(plain, case, engine_of_model(ours)),
        "records": sum(unit.record.nbytes("device") for unit in engine_of_model(ours).units),
        "whole": sum(
            unit.record.field_nbytes(name)
            for unit in engine_of_model(ours).units
            for name in unit.record.fields
        ),
    }

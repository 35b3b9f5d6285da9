"""Two ranks train one model over gloo, each on a simulated device of its own."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist

import models
from infinity import AdamW, stats
from infinity.engine.engine import engine_of_model
from infinity.ranks.group import Channel
from infinity.reference import ReferenceAdamW, prepare
from places import disk
from simulated_counts import Uses, plain_uses
from simulator import Simulator

RANKS = 2
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
STAGES = {
    f"stage {stage}, {update}": {"stage": stage, "update": update, "device": device}
    for stage, update, device in (
        (3, "backward", "512KiB"),
        (3, "forward", None),
        (1, "forward", "1536KiB"),
        (2, "backward", "1MiB"),
    )
}
DELAYS = {"at once": (0, 0), "0.2 ms": (200, 20), "20 ms": (20_000, 50)}
"""Of copies and of kernels, in microseconds."""
CASES = {
    f"{RANKS} ranks, {name}, {delay}": {**case, "delays": delays}
    for name, case in STAGES.items()
    for delay, delays in DELAYS.items()
}
_gather, _exchange = Channel.gather, Channel.exchange


def gather_over_host(channel, whole, part, what):
    """Channel.gather for gloo, which knows the host's memory alone."""
    if whole.device.type == "cpu":
        return _gather(channel, whole, part, what)
    rows = torch.empty(whole.shape, dtype=whole.dtype)
    _gather(channel, rows, part.cpu(), what)
    whole.copy_(rows)
    return None


def exchange_over_host(channel, received, sent, what):
    """The same for Channel.exchange."""
    if sent.device.type == "cpu":
        return _exchange(channel, received, sent, what)
    rows = torch.empty(received.shape, dtype=received.dtype)
    _exchange(channel, rows, sent.cpu(), what)
    received.copy_(rows)
    return None


def backward(model, step, place):
    ids = models.batch(1000 * dist.get_rank() + step).to(place)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


def train(model, optimizer, place):
    losses = []
    for step in range(3):
        losses.append(backward(model, step, place))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run(name: str, simulator: Simulator) -> dict[str, object]:
    """Train as one of the ranks, and beside plain data parallelism in memory."""
    from ranks_run import mean_over_ranks

    dist.init_process_group("gloo")
    Channel.gather, Channel.exchange = gather_over_host, exchange_over_host
    case = CASES[name]
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        tempfile.TemporaryDirectory(prefix="infinity-", dir=disk()) as folder,
    ):
        torch.manual_seed(0)
        plain = models.MODELS["llama"]()
        for parameter in plain.parameters():
            parameter.register_hook(mean_over_ranks)
        prepare(plain, torch.bfloat16).train()
        expected = train(plain, ReferenceAdamW(plain.parameters(), **SETTINGS), "cpu")
        torch.manual_seed(0)
        model = prepare(models.MODELS["llama"](), torch.bfloat16).train()
        activations, plain_pass = plain_uses(model, lambda model: backward(model, 0, "sim"), simulator)
        del model
        simulator.delay(*case["delays"], 1 + dist.get_rank(), 50)
        simulator.restart()
        before = simulator.counts()["allocated"]
        ours = models.build(
            "llama",
            nvme=folder,
            host_memory="64MiB",
            device="sim:0",
            device_memory=case["device"],
            stage=case["stage"],
        )
        ours.to("sim").train()
        room = engine_of_model(ours).device.room
        before += sum(room.nbytes(one.nbytes) for one in ours.buffers())
        uses = Uses(ours, lambda: simulator.counts()["allocated"] - before - room.ledger.held_nbytes)
        optimizer = AdamW(ours.parameters(), update=case["update"], **SETTINGS)
        losses = train(ours, optimizer, "sim")
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
        "device_memory": stats(ours).device_budget_nbytes,
        "uncounted": uses.beside(plain_pass),
    }

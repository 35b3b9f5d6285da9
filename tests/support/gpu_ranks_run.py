"""What two ranks on one GPU do in the tests of them: trainings by name.

    torchrun --nproc-per-node 2 tests/support/gpu_ranks_run.py FOLDER

Rank R writes FOLDER/R.json, {case: answer}.
NCCL takes one rank of a GPU: they exchange over gloo, by way of the host's memory. All else, and above all
the order of kernels, copies and exchanges, is as on several GPUs. The reference is plain data parallelism on
the GPU, whose updates the reference recipe makes on the CPU.
"""

import json
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import models
from infinity import AdamW, stats
from infinity.engine.engine import engine_of_model
from infinity.ranks import group, groups
from infinity.reference import ReferenceAdamW
from places import disk
from ranks_reference import mean_over_ranks
from simulated_ranks import SETTINGS, STAGES, exchange_over_host, freeze, gather_over_host

PLACE = "cuda:0"


def on_one_gpu():
    """Let both ranks compute there, and exchange over gloo."""
    group.backend_of = groups.backend_of = lambda device: "gloo"
    group.placed = lambda device: PLACE if device.startswith("cuda") else device
    group.Channel.gather, group.Channel.exchange = gather_over_host, exchange_over_host


def backward(model, number):
    ids = models.batch(1000 * dist.get_rank() + number).to(PLACE)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


def steps(case, model, take, update):
    losses, micros = [], case.get("accumulate", 1)
    for step in range(case.get("steps", 3)):
        for micro in range(micros):
            losses.append(backward(model, micros * step + micro))
            take()
        update()
    return losses


def plain(case):
    """Return the losses and weights of plain training."""
    torch.manual_seed(0)
    twin = models.build("llama")
    optimizer = ReferenceAdamW(freeze(twin, case), **SETTINGS)
    model = models.build("llama").to(PLACE).train()
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    freeze(model, case)

    def take():
        for ours, theirs in pairs:
            if ours.grad is not None:
                torch.autograd.backward([theirs], [mean_over_ranks(ours.grad.cpu())])
            ours.grad = None

    def update():
        if "clip" in case:
            models.clip_norm(twin, optimizer, case["clip"])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for ours, theirs in pairs:
                ours.copy_(theirs)

    return steps(case, model, take, update), model.state_dict()


def offloaded(case, folder):
    """Return the losses and weights of ours, and whether anything lives on the device."""
    nvme = folder if case.get("nvme", True) else None
    place = {
        "host_memory": "64MiB",
        "device": "cuda",
        "device_memory": case["device"],
        "stage": case["stage"],
    }
    model = models.build("llama", nvme=nvme, **place).to(PLACE).train()
    optimizer = AdamW(freeze(model, case), update=case["update"], **SETTINGS)

    def update():
        if "clip" in case:
            models.clip_norm(model, optimizer, case["clip"])
        optimizer.step()
        optimizer.zero_grad()

    losses = steps(case, model, lambda: None, update)
    weights = {name: one.cpu() for name, one in model.state_dict().items()}
    there = stats(model).device_nbytes
    engine_of_model(model).close()
    return losses, weights, there


def answer(case):
    """Train both, and say how they differ."""
    with tempfile.TemporaryDirectory(prefix="infinity-", dir=disk()) as folder:
        expected, values = plain(case)
        losses, weights, there = offloaded(case, folder)
    dist.barrier()
    different = [name for name, one in values.items() if not torch.equal(one.cpu(), weights[name])]
    return {"losses": losses == expected, "different": different, "on_device": there}


def main():
    on_one_gpu()
    torch.cuda.set_device(PLACE)
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    dist.init_process_group("gloo")
    said = {}
    for name, case in STAGES.items():
        try:
            said[name] = answer(case)
        except Exception:  # noqa: BLE001
            said[name] = {"raised": traceback.format_exc()[-1500:]}
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What the ranks of a mesh hold at once, in bytes: cases by name, an answer as JSON each.

    torchrun --nproc-per-node 2 tests/support/mesh_peaks_run.py FOLDER CASE [CASE ...]  # or launches.forked

Rank R writes FOLDER/R.json.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import infinity
import plain_ranks  # noqa: F401 - what ranks share is not counted
from answers import answer_all
from held_memory import HeldMemory

WIDTH, INNER, SMALL, BLOCKS, ROWS = 256, 2048, 32, 2, 4
UNIT_NBYTES = 2 * WIDTH * INNER
"""Of a layer of a large model, whole, in bf16."""
BUDGET = 1 << 20
"""host_memory of the machine: its ranks divide it."""


class LargeBlock(nn.Module):
    """Two layers, of UNIT_NBYTES each where `inner` is INNER."""

    def __init__(self, inner):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner, bias=False), nn.Linear(inner, WIDTH, bias=False)

    def forward(self, hidden):
        return hidden + self.down(functional.silu(self.up(hidden)))


def blocks(count, inner):
    torch.manual_seed(1)
    return nn.Sequential(*(LargeBlock(inner) for _ in range(count)))


def batch(step, dtype=torch.bfloat16):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def trained(model, held, steps=2):
    """Train; return what was held from the first step on."""
    optimizer = infinity.AdamW(model.parameters(), lr=0.01)
    held.begin()
    for step in range(steps):
        model(batch(step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "peak": held.peak_nbytes,
        "largest": held.largest_nbytes,
        "nvme": infinity.stats(model).nvme_read_nbytes,
    }


def divided(folder, data):
    """Train layers that the ranks of a tensor dimension divide, beside `data` ranks with other data."""
    shape = (data, dist.get_world_size() // data)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    with HeldMemory() as held:
        with infinity.Init(mesh=mesh, data="dp", dtype="bf16", nvme=folder, host_memory=BUDGET):
            model = blocks(BLOCKS, INNER)
            for block in model:
                parallelize_module(block, mesh["tp"], plan)
        return trained(model, held)


def alone(folder):
    """Train the same layers on one rank, with the memory of all; every rank does so, by itself."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    with HeldMemory() as held:
        own = groups[dist.get_rank()]
        # of the machine, which each takes for its own
        with infinity.Init(process_group=own, dtype="bf16", nvme=folder, host_memory=BUDGET):
            model = blocks(BLOCKS, INNER)
        return trained(model, held)


def staged(folder, large):
    """Train a pipeline of which the stage number `large` has large layers, and the other small ones."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "pp"))
    number, count = mesh["pp"].get_local_rank(), mesh["pp"].size()
    settings = {"dtype": "bf16", "nvme": folder, "host_memory": BUDGET}
    with HeldMemory() as held:
        with infinity.Init(process_group=mesh["dp"], pipeline_group=mesh["pp"], **settings):
            model = blocks(BLOCKS, INNER if number == large else SMALL)
        optimizer = infinity.AdamW(model.parameters(), lr=0.01, max_norm=1.0)
        stage = pipelining.PipelineStage(
            model, number, count, torch.device("cpu"), group=mesh["pp"].get_group()
        )
        schedule = pipelining.ScheduleGPipe(
            stage, 2, loss_fn=lambda out, aim: (out.float() - aim).square().mean()
        )
        held.begin()
        for step in range(2):
            given = [batch(step)] if number == 0 else []
            aim = {"target": batch(step, torch.float32)} if number == count - 1 else {}
            schedule.step(*given, **aim)
            optimizer.step()
            optimizer.zero_grad()
        return {
            "peak": held.peak_nbytes,
            "largest": held.largest_nbytes,
            "nvme": infinity.stats(model).nvme_read_nbytes,
        }


def loaded(folder):
    """Load a model of transformers that its plan divides; return what was held while it was loaded."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": BLOCKS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    if dist.get_rank() == 0 and not Path(folder, "llama").exists():
        LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16).save_pretrained(f"{folder}/llama")
    dist.barrier()
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    plan = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    with HeldMemory() as held:
        held.begin()
        with infinity.Init(mesh=mesh, data="dp", dtype="bf16", nvme=folder, host_memory=BUDGET):
            model = LlamaForCausalLM.from_pretrained(
                f"{folder}/llama", distributed_config=plan, dtype=torch.bfloat16
            )
        return {"peak": held.peak_nbytes, "largest": held.largest_nbytes, "units": len(model.model.layers)}


CASES = {
    "divided": partial(divided, data=1),
    "divided and partitioned": partial(divided, data=2),
    "alone": alone,
    "first large": partial(staged, large=0),
    "last large": partial(staged, large=1),
    "loaded": loaded,
}


def main(folder, *names):
    """Do cases."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answer_all(folder, names, lambda name: CASES[name](folder))


if __name__ == "__main__":
    main(*sys.argv[1:])

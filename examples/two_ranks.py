"""Data parallelism on several ranks: nothing is wrapped; each rank takes its own part of the data.

torchrun --nproc-per-node 2 examples/two_ranks.py
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

import infinity

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def main() -> None:
    """Train ten steps, and save a checkpoint that any number of ranks can load."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a folder on each machine's NVMe disk")
    parser.add_argument("--out", type=Path, help="a folder that all ranks share, for the checkpoint")
    options = parser.parse_args()
    run = os.environ.get("TORCHELASTIC_RUN_ID", "alone")
    out = options.out or Path(tempfile.gettempdir()) / f"infinity-example-{run}"

    with infinity.Init(nvme=options.nvme, host_memory="64MiB"):  # joins torch.distributed under torchrun
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4))
    model.to(model.device)  # its buffers, where there is a GPU
    optimizer = infinity.AdamW(model.parameters(), lr=3e-3, max_norm=1.0)

    random = torch.Generator().manual_seed(0)  # the same data on every rank,
    rows = list((torch.randint(0, 64, (160, 1), generator=random) + 3 * torch.arange(32)) % 64)
    sampler = DistributedSampler(rows) if distributed.is_initialized() else None  # of which each takes a part
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    for step, batch in enumerate(DataLoader(rows, batch_size=8, sampler=sampler), 1):
        ids = batch.to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank}, step {step}: loss {loss.item():.3f}", flush=True)

    infinity.save(model, optimizer, out, overwrite=True)  # every rank calls it
    if rank == 0:
        print(f"saved: {out}")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""One long sequence on two ranks: each computes on half of its tokens (Ulysses).

torchrun --nproc-per-node 2 examples/two_ranks_one_sequence.py
"""

import argparse
import os
import tempfile

import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity import tiling

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def main() -> None:
    """Train, with short sequences at first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a folder on each machine's NVMe disk")
    parser.add_argument("--tokens", type=int, default=2048, help="the length of the longest sequences")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))

    torch.manual_seed(0)
    with infinity.Init(nvme=options.nvme, host_memory="64MiB", offload_activations="host"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4))
    sequences = infinity.sequence_parallel(model, ranks)
    # its name in transformers 5.24, and before
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    tiling.tile_loss_(model)  # no logits
    model.to(model.device)  # its buffers, where there is a GPU
    optimizer = infinity.AdamW(model.parameters(), lr=3e-3, max_norm=1.0)

    places = torch.arange(options.tokens)
    rows = [{"input_ids": (3 * places + row) % 64, "labels": (3 * places + row) % 64} for row in range(16)]
    sampler = DistributedSampler(rows, num_replicas=sequences.data_ranks, rank=sequences.data_rank)
    loader = infinity.SequenceWarmup(
        DataLoader(rows, batch_size=2, sampler=sampler), options.tokens // 4, options.tokens, steps=6
    )
    for step, batch in enumerate(infinity.SequenceParallelLoader(loader, sequences), 1):
        loss = model(**{name: one.to(model.device) for name, one in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens = batch["input_ids"].shape[1]
        print(
            f"rank {sequences.rank}, step {step}: loss {loss.item():.3f}, "
            f"{tokens} of {ranks * tokens} tokens",
            flush=True,
        )
    print(f"rank {sequences.rank} has exchanged {sequences.exchanged_nbytes / 2**20:.1f} MiB", flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()

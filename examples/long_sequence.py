"""A long sequence: activations offloaded, MLPs in slices, a loss without logits, large layers in tiles.

Prints the peak memory of a step with and without that. The model is tiny; the sequence has 4,096 tokens.
"""

import argparse
import re
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity import tiling

SIZES = {"vocab_size": 8192, "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2}


def peak_mib() -> float:
    """Return the most memory that this process has had; ru_maxrss may be that of its parent."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def main() -> None:
    """Train two steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a folder on the NVMe disk")
    parser.add_argument("--tokens", type=int, default=4096, help="the length of the sequence")
    parser.add_argument("--plain", action="store_true", help="without tiles and offloaded activations")
    options = parser.parse_args()

    torch.manual_seed(0)
    tiles = {} if options.plain else {"tile_above": "1MiB", "offload_activations": "nvme"}
    with infinity.Init(nvme=options.nvme, host_memory="64MiB", **tiles):
        model = LlamaForCausalLM(
            LlamaConfig(**SIZES, num_attention_heads=4, max_position_embeddings=options.tokens)
        )
    # its name in transformers 5.24, and before
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if not options.plain:
        for block in model.model.layers:
            tiling.tile_sequence(block.mlp, tiles=8)  # an MLP sees an eighth of the sequence at a time
        tiling.tile_loss_(model)  # logits of a few thousand words at a time
    model.to(model.device)  # its buffers, where there is a GPU
    optimizer = infinity.AdamW(model.parameters(), lr=1e-3)

    ids = torch.randint(0, SIZES["vocab_size"], (1, options.tokens), device=model.device)
    before = peak_mib()
    for step in (1, 2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
    print(f"peak memory above that before the first step: {peak_mib() - before:.0f} MiB")


if __name__ == "__main__":
    main()

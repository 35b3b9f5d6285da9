"""LoRA by PEFT: the base on NVMe is read and never written; adapters are ordinary parameters in memory.

The base is tiny and random; put `LlamaForCausalLM.from_pretrained(...)` in its place.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import infinity

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def main() -> None:
    """Train adapters, save them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a folder on the NVMe disk")
    parser.add_argument("--out", type=Path, help="a folder for the adapter; a temporary one by default")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="infinity-example-")) / "adapter"

    torch.manual_seed(0)
    with infinity.Init(nvme=options.nvme, host_memory="64MiB"):
        base = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4))
    base.to(base.device)  # its buffers, where there is a GPU
    adapters = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, adapters)
    model.print_trainable_parameters()

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(1, 16):
        ids = (torch.randint(0, 64, (8, 1)) + 3 * torch.arange(32)) % 64
        ids = ids.to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    infinity.save_pretrained(model, out)  # PEFT's own files; the base is not read
    print(f"saved: {out}")


if __name__ == "__main__":
    main()

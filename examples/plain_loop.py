"""Fine-tune a model of transformers by a plain PyTorch loop: clipping, a schedule, evaluation, a checkpoint.

The model is tiny and its data are generated; put `LlamaForCausalLM.from_pretrained(...)` and a tokenised
dataset in their places.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import infinity

STEPS = 20
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def sequences(count: int) -> list[torch.Tensor]:
    """Return token ids in which each token follows from the one before."""
    starts = torch.randint(0, 64, (count, 1))
    return list((starts + 3 * torch.arange(32)) % 64)


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a folder on the NVMe disk")
    parser.add_argument("--out", type=Path, help="a folder for what is saved; a temporary one by default")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="infinity-example-"))

    torch.manual_seed(0)
    with infinity.Init(nvme=options.nvme, host_memory="64MiB"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4))
    model.to(model.device)  # its buffers, where there is a GPU
    # its name in transformers 5.24, and before
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    optimizer = infinity.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, max_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    loader = DataLoader(sequences(8 * STEPS), batch_size=8, shuffle=True)
    for step, batch in enumerate(loader, 1):
        ids = batch.to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {optimizer.grad_norm:.3f}")

    model.eval()
    with torch.no_grad():
        ids = torch.stack(sequences(16)).to(model.device)
        print(f"evaluation: loss {model(input_ids=ids, labels=ids).loss.item():.3f}")

    infinity.save(model, optimizer, out / "checkpoint", scheduler=schedule, extra={"step": STEPS})
    infinity.save_pretrained(model, out / "model")  # for LlamaForCausalLM.from_pretrained
    print(f"saved: {out}")
    print(infinity.stats(model))


if __name__ == "__main__":
    main()

"""Hugging Face's Trainer, unmodified: the model in Init, the optimizer and a callback named.

The run stops half way and resumes from its checkpoint, bit for bit.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import infinity

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def dataset(count: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences in which each token follows from the one before."""
    rows = (torch.randint(0, 64, (count, 1)) + 3 * torch.arange(32)) % 64
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(nvme: str, out: Path, steps: int) -> Trainer:
    """Build a model in its places, and the Trainer of it."""
    torch.manual_seed(0)
    with infinity.Init(nvme=nvme, host_memory="64MiB"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4))
    arguments = TrainingArguments(
        str(out),
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=steps,
        save_steps=5,
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
    )
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=dataset(64),
        optimizer_cls_and_kwargs=(infinity.AdamW, {"lr": arguments.learning_rate}),
        callbacks=[infinity.huggingface.TrainerCallback()],
    )


def main() -> None:
    """Train five steps, then go on to ten from the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a folder on the NVMe disk")
    parser.add_argument("--out", type=Path, help="a folder for checkpoints; a temporary one by default")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="infinity-example-"))
    trainer(options.nvme, out, steps=5).train()
    resumed = trainer(options.nvme, out, steps=10)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model(str(out / "model"))
    print(f"steps: {resumed.state.global_step}, saved: {out / 'model'}")


if __name__ == "__main__":
    main()

"""A DeepSpeed script. Its import has changed, and its JSON, deepspeed.json beside this file, is DeepSpeed's.

The section "infinity" of the JSON holds the one setting for which DeepSpeed has no word: the memory budget.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity.deepspeed as deepspeed  # was: import deepspeed

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def main() -> None:
    """Train, save a checkpoint, load it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a folder on the NVMe disk")
    parser.add_argument("--out", type=Path, help="a folder for the checkpoint; a temporary one by default")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="infinity-example-"))

    config = json.loads(Path(__file__).with_name("deepspeed.json").read_text())
    for part in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][part]["nvme_path"] = options.nvme

    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4))
    engine, _, _, schedule = deepspeed.initialize(model=model, config=config)
    print(engine.settings.report)  # what became of every key of the JSON

    for micro_step in range(1, 21):
        ids = (torch.randint(0, 64, (4, 1)) + 3 * torch.arange(32)) % 64
        ids = ids.to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()  # updates at every second micro-step
        if micro_step % 4 == 0:
            print(f"step {engine.global_steps}: loss {loss.item():.3f}, lr {schedule.get_last_lr()[0]:.2e}")

    engine.save_checkpoint(str(out), client_state={"epoch": 1})
    _, client_state = engine.load_checkpoint(str(out))
    print(f"loaded: {client_state}, from {out}")


if __name__ == "__main__":
    main()

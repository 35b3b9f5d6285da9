"""The contestant "lora": PEFT's LoRA on a base offloaded by Infinity, with the arguments of contestant.py.

Started by infinity.bench.engine.lora. Imports are at the top, so that they count towards the memory baseline.
"""

from __future__ import annotations

import peft
import torch
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import infinity
from infinity.bench.engine import contestant
from infinity.bench.engine.contestant import RATES, Contestant, Spec, checkpointed, count, llama


def lora(spec: Spec) -> Contestant:
    """Adapters on the attention's queries and values; settings: those of Config, and the adapters' rank."""
    chosen = dict(spec.settings)
    config = peft.LoraConfig(r=chosen.pop("rank"), target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    files = chosen.pop("files", None)
    if files is None:
        with infinity.Init(nvme=spec.nvme, device="cpu", **chosen):
            base = llama(spec)
    else:
        with infinity.Init(nvme=spec.nvme, device="cpu", frozen=True, **chosen):
            base = LlamaForCausalLM.from_pretrained(files)
        base.config.use_cache = False
    torch.manual_seed(spec.seed)  # as the peers, whatever the base has drawn
    model = checkpointed(peft.get_peft_model(base, config))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **RATES)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def moved() -> tuple[int, int]:
        stats = infinity.stats(model)
        return stats.nvme_read_nbytes + stats.checkpoint_read_nbytes, stats.nvme_written_nbytes

    return Contestant(model, count(model), torch.Tensor.backward, step, moved=moved)


if __name__ == "__main__":
    contestant.KINDS["lora"] = lora
    contestant.main()

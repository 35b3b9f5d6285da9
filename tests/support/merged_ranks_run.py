"""One of several ranks that merge adapters into a packed base.

    torchrun --nproc-per-node 2 tests/support/merged_ranks_run.py FOLDER

FOLDER/base is the checkpoint, FOLDER/merged gets the files. The adapters are DoRA's, of seed 3.
"""

import os
import sys
import warnings
from pathlib import Path

import peft
import torch
import transformers
from torch import distributed

import infinity


def main(folder):
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo")
    nvme = folder / f"nvme-{os.environ['RANK']}"
    nvme.mkdir()
    with infinity.Init(nvme=str(nvme), host_memory="8MiB", frozen=True):
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    torch.manual_seed(3)
    adapters = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        r=4,
        use_dora=True,
        init_lora_weights=False,
    )
    infinity.save_merged(peft.get_peft_model(base, adapters), folder / "merged", dtype=torch.bfloat16)
    distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

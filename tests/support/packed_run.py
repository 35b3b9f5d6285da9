"""A durable training of adapters on a frozen base in fewer bits, which may kill itself.

    python tests/support/packed_run.py FOLDER BASE FROZEN KILL

BASE: a checkpoint. FROZEN: frozen_dtype, "-" for none. KILL: in the middle of which step's backward the
process kills itself; -1 for no step. [step, loss] is appended to FOLDER/losses as a line of JSON; adapters
are in FOLDER/adapters.pt at the end.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import peft
import torch
import transformers

import infinity
import models

STEPS = 4


def main(folder, base, frozen, kill):
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(mode=True)
    (folder / "nvme").mkdir(exist_ok=True)
    place = {"nvme": str(folder / "nvme"), "host_memory": "1MiB", "durable": True}
    torch.manual_seed(3)
    with infinity.Init(**place, frozen=True, frozen_dtype=None if frozen == "-" else frozen):
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = infinity.AdamW(trained, lr=1e-2)

    def die(_grad):
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(infinity.resume(model, optimizer), STEPS):
        ids = models.batch(step)
        output = model(input_ids=ids, labels=ids, output_hidden_states=True)
        output.hidden_states[1].register_hook(die)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with (folder / "losses").open("a") as losses:
            losses.write(json.dumps([step, output.loss.item()]) + "\n")
    infinity.commit(model)
    torch.save(peft.get_peft_model_state_dict(model), folder / "adapters.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))

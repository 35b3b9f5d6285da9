"""One rank of a training that saves after every second step, and in which a rank may be killed.

    torchrun --nproc-per-node 2 --max-restarts 1 tests/support/restart_run.py FOLDER KILL

KILL: in the middle of which step's backward the last rank of the first life kills itself; -1 for no step.
Rank R appends [step, loss] as a line of JSON to FOLDER/R.losses, and what it raised to FOLDER/R.error.
"""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch

import infinity
import models

STEPS = 6


def main(folder, kill):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    rank = int(os.environ["RANK"])
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    nvme = folder / f"nvme-{rank}"
    nvme.mkdir(exist_ok=True)
    model = models.build("gpt2-dropout", nvme=str(nvme), host_memory="8MiB", timeout_s=20)
    model.train()
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    saved = folder / "saved"
    begin = infinity.load(model, optimizer, saved)["step"] if saved.exists() else 0
    dies = first_life and rank == int(os.environ["WORLD_SIZE"]) - 1

    def die(_grad):
        if dies and step == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(begin, STEPS):
        ids = models.batch(1000 * rank + step)
        output = model(input_ids=ids, labels=ids, output_hidden_states=True)
        output.hidden_states[1].register_hook(die)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with (folder / f"{rank}.losses").open("a") as losses:
            losses.write(json.dumps([step, output.loss.item()]) + "\n")
        if step % 2:
            infinity.save(model, optimizer, saved, extra={"step": step + 1}, overwrite=True)


if __name__ == "__main__":
    began = time.monotonic()
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    except infinity.RanksError as error:
        told = {"error": str(error), "seconds": time.monotonic() - began}
        Path(sys.argv[1], f"{os.environ['RANK']}.error").write_text(json.dumps(told))
        raise

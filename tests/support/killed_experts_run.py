"""A durable training of stacked experts, slice by slice, which may kill itself.

    python tests/support/killed_experts_run.py FOLDER ARCHITECTURE EXPERTS UPDATE KILL

ARCHITECTURE: a key of models.OF_EXPERTS. EXPERTS, UPDATE: of Config, of the optimizer. KILL: the step behind
which the process kills itself, or where it is negative in the middle of its backward; 0: it does not. [step,
loss] is appended to FOLDER/losses as a line of JSON; at the end weights and moments are in FOLDER/end.pt.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch

import infinity
import models

STEPS = 6


def ids_of(step):
    """Few tokens, so that each step leaves most experts unused, and comes back to them later."""
    return torch.randint(0, 64, (1, 4), generator=torch.Generator().manual_seed(step % 4))


def moments_of(optimizer):
    """Return all moments in order of size: a stack is one parameter or many, whose elements are the same."""
    state = optimizer.state_dict()["state"].values()
    return {
        name: torch.cat([one[name].flatten() for one in state]).sort().values
        for name in ("exp_avg", "exp_avg_sq")
    }


def main(folder, architecture, experts, update, kill):
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(mode=True)
    (folder / "nvme").mkdir(exist_ok=True)
    place = {"nvme": str(folder / "nvme"), "host_memory": "2MiB", "durable": True}
    with infinity.Init(**place, experts=experts):
        model = models.of_experts(architecture)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, update=update)

    def die(_grad=None):
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(infinity.resume(model, optimizer), STEPS):
        output = model(input_ids=ids_of(step), labels=ids_of(step), output_hidden_states=True)
        if kill and step == -kill:
            output.hidden_states[1].register_hook(die)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == kill > 0:
            die()
        with (folder / "losses").open("a") as losses:
            losses.write(json.dumps([step, output.loss.item()]) + "\n")
    infinity.commit(model)
    torch.save({"weights": dict(model.state_dict()), "moments": moments_of(optimizer)}, folder / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:5], int(sys.argv[5]))

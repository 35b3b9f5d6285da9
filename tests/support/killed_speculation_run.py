"""A durable training whose updates are made before step() decides them, which may kill itself.

    python tests/support/killed_speculation_run.py FOLDER EVERY KILL WHERE

EVERY: steps from one commit to the next. KILL: the step in which the process kills itself, -1 for none.
WHERE: "backward", in the middle of it; "between", behind the backward; "drained", there when all that the
backward has begun is written; "step", behind step(). [step, loss, confirmed] is appended to FOLDER/losses as
a line of JSON; at the end weights and state are in FOLDER/end.pt.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch

import infinity
from deep import WIDTH, Deep
from infinity.engine.engine import engine_of_model

STEPS = 8


def main(folder, every, kill, where):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    (folder / "nvme").mkdir(exist_ok=True)
    torch.manual_seed(0)
    durable = f"every {every} steps" if every > 1 else True
    with infinity.Init(nvme=str(folder / "nvme"), host_memory="1MiB", durable=durable):
        model = Deep()
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_norm=1e9, speculate=True)
    engine = engine_of_model(model)

    def die(at):
        if step == kill and where == at:
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(infinity.resume(model, optimizer), STEPS):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        middle = model.layers[1](model.layers[0](x))
        middle.register_hook(lambda _: die("backward"))
        loss = model.layers[3](torch.tanh(model.layers[2](middle))).square().mean()
        loss.backward()
        die("between")
        if step == kill and where == "drained":
            engine.lane.drain()
            die("drained")
        optimizer.step()
        die("step")
        optimizer.zero_grad()
        with (folder / "losses").open("a") as losses:
            losses.write(json.dumps([step, loss.item(), engine.speculation.confirmed]) + "\n")
    infinity.commit(model)
    state = optimizer.state_dict()["state"]
    torch.save({"weights": dict(model.state_dict()), "state": state}, folder / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

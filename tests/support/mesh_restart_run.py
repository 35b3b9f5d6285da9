"""One rank of a training on a mesh that saves after each step, which torchrun starts again when a rank dies.

    torchrun --nproc-per-node 2 --max-restarts 1 tests/support/mesh_restart_run.py FOLDER KILL STEPS

The mesh is of as many ranks as there are, two by two tensor parallel. KILL: in which step of the first life
the last rank kills itself; -1 for none. Rank R appends [step, loss] as a line of JSON to FOLDER/R.losses.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import infinity
import mesh_run


def main(folder, kill, steps):
    """Load what was saved last, and train to the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    place = mesh_run.Place(folder, size // 2)
    model = mesh_run.offloaded(place, dtype="bf16", host_memory=mesh_run.TIGHT, timeout_s=20)
    optimizer = infinity.AdamW(model.parameters(), lr=0.01)
    saved = Path(folder, "saved")
    begin = infinity.load(model, optimizer, saved)["step"] if saved.exists() else 0
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for step in range(begin, steps):
        if first_life and step == kill and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ((loss,), _) = mesh_run.train(place, model, optimizer, steps=1, first=step)
        with Path(folder, f"{rank}.losses").open("a") as losses:
            losses.write(json.dumps([step, loss]) + "\n")
        infinity.save(model, optimizer, saved, extra={"step": step + 1}, overwrite=True)
    dist.barrier()
    os._exit(0)  # no rank waits for another's connections


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

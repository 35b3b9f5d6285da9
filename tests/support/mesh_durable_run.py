"""One rank of a durable run on a mesh, which may kill itself when it commits.

    RANK=... WORLD_SIZE=... python tests/support/mesh_durable_run.py FOLDER DATA RANK COMMIT AFTER
    torchrun --nproc-per-node 4 tests/support/mesh_durable_run.py ...

DATA: how many ranks have different data; the others are tensor parallel. RANK kills itself at its commit
number COMMIT, right before it is written, or, with AFTER, when all ranks have written theirs; -1: none
does. Rank R writes
FOLDER/R.json: {"first": the steps done before, "losses": {step: loss}, "state": hashes} or {"error": text}.
"""

import json
import os
import signal
import sys
import time
import types
from pathlib import Path

import torch
import torch.distributed as dist

import infinity
import mesh_run
from infinity.durable.folder import RunFolder
from mesh_saves import state

STEPS = 5


def die_at(number, *, after, dies, written):
    """Let this process, if it `dies`, do so at one of its commits. after: when all ranks have written theirs,
    each of which then leaves a file in the folder `written`.
    """
    real, calls = RunFolder.write_slot, []

    def write_slot(folder, slot, data):
        calls.append(slot)
        if len(calls) != number:
            real(folder, slot, data)
            return
        if dies and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        real(folder, slot, data)
        (written / f"{dist.get_rank()}.written").touch()
        while dies:
            if len(list(written.glob("*.written"))) == dist.get_world_size():
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)

    RunFolder.write_slot = write_slot


def start(place, data):
    """Return a durable model on the mesh, and its optimizer."""
    model = mesh_run.offloaded(
        types.SimpleNamespace(folder=place.folder, mesh=place.mesh, tensor=place.tensor, data=place.data),
        dtype="bf16",
        nvme=data,
        host_memory=mesh_run.TIGHT,
        durable=True,
        timeout_s=20,
    )
    return model, infinity.AdamW(model.parameters(), lr=0.01)


def run(place, data):
    """Resume, and train to the end; return what this rank has to tell."""
    model, optimizer = start(place, data)
    first = infinity.resume(model, optimizer)
    losses = {}
    for step in range(first, STEPS):
        ((losses[step],), _) = mesh_run.train(place, model, optimizer, steps=1, first=step)
    infinity.commit(model)
    return {"first": first, "losses": losses, "state": state(model, optimizer)}


def main(folder, data, dying, commit, after):
    """Run. The run lies in FOLDER/run, of all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = mesh_run.Place(folder, int(data))
    if int(dying) >= 0:
        dies = dist.get_rank() == int(dying)
        die_at(int(commit), after=bool(int(after)), dies=dies, written=Path(folder))
    try:
        told = run(place, f"{folder}/run")
    except Exception as error:  # noqa: BLE001 - it is the answer
        told = {"error": f"{type(error).__name__}: {error}"}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(told), encoding="utf-8")
    if "error" in told:
        os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

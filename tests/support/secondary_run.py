"""What ranks that keep second parts of weights do in the tests: cases by name, a JSON answer each.

    secondary_run.py FOLDER CASE [CASE ...]  # launched by launches.forked

Rank R writes FOLDER/R.json. The reference is the same training without second parts: once for all cases that
differ in where what lies.
"""

import functools
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import coded_run
import infinity
import parity
from coded_run import BACKWARD, BOTH, NVME, build, refused, train
from infinity.engine.engine import engine_of_model


def moved_by(model):
    """Return the bytes of units that were assembled by now, from all ranks, and from neighbours; and those
    that this rank has sent to other machines for that, once what was queued has run.
    """
    partition, grid = engine_of_model(model).partition, engine_of_model(model).ranks.grid
    gathers, end_s = partition._gathers, time.monotonic() + 60
    while True:
        of_all, near = gathers.nbytes["gather"], gathers.nbytes["gather near"]
        expected = 0 if grid is None else of_all * (grid.machines - 1) // grid.size
        if (gathers.crossed_nbytes or 0) == expected or time.monotonic() > end_s:
            return [of_all, near, gathers.crossed_nbytes or 0]
        time.sleep(0.01)


WHERE = {"nvme", "host_memory", "gather_bucket", "reduce_bucket"}
"""Settings that say where weights lie, and how many go together: what a step moves is the same."""
WAYS = {*WHERE, "units", "checkpoint", "update"}
"""Those, and others that change no bit."""


def trained(name, *, steps, micro, once, frozen, waits=False, checkpoint=None, **settings):
    """Train; return the losses, the weights, what the last step has moved, and the engine. waits: units may
    wait for their next use; else each use assembles what it needs.
    """
    options = {key: settings.pop(key) for key in ("max_norm", "update") if key in settings}
    model = build(name, frozen, checkpoint, **settings)
    if not waits:
        parity.nothing_waits(model)
    of_step = [one for one in model.parameters() if one.requires_grad]
    optimizer = infinity.AdamW(of_step, lr=1e-2, weight_decay=0.1, **options)
    losses, each = [], [[0, 0, 0]]
    for step in range(steps):
        losses += train(model, optimizer, steps=1, micro=micro, once=once, first=step)
        each.append(None if waits else moved_by(model))
    moved = None if waits else [last - one for last, one in zip(each[-1], each[-2], strict=True)]
    return losses, model.state_dict(), moved, engine_of_model(model)


@functools.cache
def without(name, **settings):
    """Return the losses and weights of a training without second parts, and what its last step has moved."""
    return trained(name, **{**settings, "secondary_shard": None})[:3]


def compare(name, *, steps=3, micro=1, once=False, frozen=None, moved=False, options=None, **fields):
    """Train with second parts and without; return what differs, and what a step has moved: without them as
    well, where that is asked for.
    """
    steps_of = {"steps": steps, "micro": micro, "once": once, "frozen": frozen}
    settings = {"secondary_shard": "machine", **fields, **(options or {})}
    alike = {key: one for key, one in settings.items() if key not in (WHERE if moved else WAYS)}
    plain_losses, plain, plain_moved = without(name, waits=not moved, **steps_of, **alike)
    losses, state, step_moved, engine = trained(name, **steps_of, **settings)
    different = [key for key, one in plain.items() if not torch.equal(one, state[key])]
    ranks, units = engine.ranks, [unit for unit in engine.units if unit.resident_nbytes]
    machines = ranks.grid.machines if ranks.grid is not None else 1
    return {
        "different": different + (["losses"] if losses != plain_losses else []),
        "a step": step_moved,
        "a step without": plain_moved,
        "weights": sum(unit.resident_nbytes for unit in units),
        "trained": sum(unit.resident_nbytes for unit in units if unit.trainable),
        "crosses": sum((machines - 1) * unit.record.shard.numel * unit.flat.itemsize for unit in units),
        "kept": engine.partition._secondary.nbytes,
        "stored": engine.partition._secondary.stored_nbytes,
    }


def edited():
    """Change weights between a forward and its backward, and after it; evaluate; load."""
    shown = []
    for fields in ({"secondary_shard": "machine"}, {}):
        model = build("layers", quantized_weights="int8", **fields)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        losses = train(model, optimizer, steps=2)
        with infinity.gathered(model, write=True), torch.no_grad():
            model.last.weight[3, 5] = 7.0
        losses += train(model, optimizer, steps=1, first=2)
        with torch.no_grad():
            losses.append(coded_run.loss_of(model, 5).item())
        state = {key: one + 0.125 for key, one in model.state_dict().items()}
        model.load_state_dict(state)
        losses += train(model, optimizer, steps=2, first=3)
        shown.append((losses, model.state_dict()))
    (losses, state), (plain_losses, plain) = shown
    different = [key for key, one in plain.items() if not torch.equal(one, state[key])]
    return {"different": different + (["losses"] if losses != plain_losses else [])}


def on_mesh():
    """Train on a mesh of (replicate, shard), which says how many neighbours keep second parts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    shown = []
    for group in (mesh, None):
        torch.manual_seed(0)
        with infinity.Init(host_memory="64MiB", process_group=group):
            model = coded_run.Layers()
        parity.nothing_waits(model)
        losses = train(model, infinity.AdamW(model.parameters(), lr=1e-2), steps=2)
        shown.append((losses, model.state_dict(), moved_by(model)[1]))
    (losses, state, near), (plain_losses, plain, _) = shown
    different = [key for key, one in plain.items() if not torch.equal(one, state[key])]
    return {"different": different + (["losses"] if losses != plain_losses else []), "near": near}


def no_room():
    """Return the error of a host_memory without room for second parts, without NVMe, and what comes of what
    it names as enough.
    """
    nbytes, shown = dist.get_world_size() << 18, []
    while not shown:
        nbytes += nbytes // 8
        try:
            build("llama", secondary_shard="machine", host_memory=nbytes)
            shown.append("there was room from the start")
        except infinity.HostMemoryError as error:
            shown += [str(error)] if "secondary_shard" in str(error) else []
    try:
        works = shown[0].split("host_memory=")[1].split(" works")[0]
        build("llama", secondary_shard="machine", host_memory=works)
        shown.append("none")
    except infinity.HostMemoryError as error:
        shown.append(str(error))
    return {"errors": shown}


def killed():
    """Let the last rank be killed in a backward, while others assemble within their machines."""
    model = build("llama", secondary_shard="machine", timeout_s=30)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, steps=3)
    loss = coded_run.loss_of(model, dist.get_rank())
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    train(model, optimizer, steps=2)
    return {"went through": True}


STORED = {**NVME, "host_memory": int(os.environ["WORLD_SIZE"]) << 18}
"""So little host memory that second parts lie on NVMe."""

CASES = {
    "llama": lambda: compare("llama", moved=True),
    "layers": lambda: compare("layers"),
    "qwZ": lambda: compare("layers", **BOTH),
    "nvme": lambda: compare("llama", moved=True, **{**NVME, "host_memory": "64MiB"}),
    "nvme, qwZ": lambda: compare("llama", **{**NVME, "host_memory": "64MiB"}, **BOTH),
    "stored": lambda: compare("llama", moved=True, **STORED),
    "stored, one by one": lambda: compare("llama", gather_bucket=0, micro=2, **STORED),
    "stored, qwZ": lambda: compare("llama", **BOTH, **STORED),
    "stored, backward": lambda: compare("llama", **BACKWARD, **STORED),
    "backward, qwZ": lambda: compare("gpt2", **BACKWARD, **BOTH),
    "accumulated": lambda: compare("llama", moved=True, micro=2),
    "no_sync": lambda: compare("llama", moved=True, micro=2, once=True),
    "max_norm": lambda: compare("llama", moved=True, options={"max_norm": 0.5}),
    "frozen": lambda: compare("llama", frozen="mlp"),
    "blocks": lambda: compare("llama", moved=True, units="block"),
    "one by one": lambda: compare("llama", moved=True, gather_bucket=0, reduce_bucket=0),
    "checkpointed": lambda: compare("llama", checkpoint="not", **BACKWARD),
    "reentrant": lambda: compare("llama", moved=True, checkpoint="reentrant"),
    "mixtral": lambda: compare("mixtral"),
    "routed": lambda: compare("routed"),
    "chosen, checkpointed": lambda: compare("chosen, checkpointed"),
    "fp32": lambda: compare("llama", moved=True, dtype="fp32"),
    "fp32 beside qgZ": lambda: compare("llama", dtype="fp32", quantized_gradients="int8"),
    "edited": edited,
    "mesh": on_mesh,
    "no room": no_room,
    "killed": killed,
    "does not divide": lambda: refused(secondary_shard=dist.get_world_size() - 1),
    "of several machines": lambda: refused(secondary_shard=dist.get_world_size() // 2),
    "different": lambda: refused(secondary_shard="machine", other={"secondary_shard": 2}),
}


if __name__ == "__main__":
    coded_run.main(sys.argv[1], sys.argv[2:], CASES)

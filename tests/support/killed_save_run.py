"""Saves of several ranks, in each of which one is killed; the next ranks go on from the last good checkpoint.

    python tests/support/killed_save_run.py FOLDER SEED

One process that has imported everything forks the ranks of every attempt, and the store in which they meet,
which survives them as torchrun's does. An attempt loads FOLDER/saved, compares all weights and moments with
those that the save of it had, trains a step, and saves again: there one rank kills itself, before, in the
middle of, or behind one of the calls that the first attempt has counted. Prints a line of JSON per attempt.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # warmed up for the ranks: what makes a torch Optimizer imports it
import torch.distributed as dist
import xxhash
from torch import nn

import infinity
from infinity.checkpoint import atomic
from infinity.checkpoint.save_load import read_manifest
from infinity.engine.engine import engine_of
from infinity.ranks import group as ranks
from infinity.tensors import as_bytes

HANGS_S = 60
"""Longer than any timeout of the engine's here."""
PLACES = {
    "pwrite": (os, "pwrite"),
    "fsync": (os, "fsync"),
    "manifest": (Path, "write_text"),
    "exchange": (atomic, "_exchange"),
    "rename": (Path, "rename"),
    "remove": (shutil, "rmtree"),
    "link": (os, "link"),
    "meet": (ranks.Ranks, "each"),
}


class Doom:
    """Counts calls; dies at one of them."""

    def __init__(self, name="", nth=-1, when="before"):
        self.counts = Counter()
        self._at = name, nth
        self._when = when

    def watch(self):
        for name, (owner, attribute) in PLACES.items():
            setattr(owner, attribute, self._counted(name, getattr(owner, attribute)))

    def _counted(self, name, real):
        def call(*args, **kwargs):
            dies = self._at == (name, self.counts[name])
            self.counts[name] += 1
            if dies and self._when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if dies and self._when == "amid" and name in ("pwrite", "manifest"):
                place, data, *more = args
                real(place, data[: len(data) // 2], *more)
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


def state(model, optimizer):
    """Return the hash of every weight and moment, whole."""
    kinds = {p: ["master", "m", "v"] if optimizer.state.get(p) else ["master"] for p in model.parameters()}
    return [
        xxhash.xxh3_64_hexdigest(as_bytes(v))
        for p, kind in kinds.items()
        for v in engine_of(p).parameters.read(p, kind)
    ]


def train_and_save(folder, number, doom):
    """Go on from the last checkpoint, if there is one, and save as `number`."""
    torch.manual_seed(0)
    with infinity.Init(host_memory="16MiB", timeout_s=20):
        model = nn.Sequential(nn.Linear(120, 101), nn.LayerNorm(101), nn.Linear(101, 70))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    if (folder / "saved").exists():
        last = infinity.load(model, optimizer, folder / "saved")
        expected = json.loads((folder / f"{last}.state").read_text())
        if state(model, optimizer) != expected:
            raise SystemExit(f"the checkpoint of save {last} is not what was saved")
    inputs = torch.randn(4, 120, generator=torch.Generator().manual_seed(number))
    model(inputs.bfloat16()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    after = state(model, optimizer)
    if not engine_of(model[0].weight).ranks.rank:
        (folder / f"{number}.state").write_text(json.dumps(after))
    doom.watch()
    infinity.save(model, optimizer, folder / "saved", extra=number, overwrite=True)


def of_rank(folder, port, number, rank, size, doom):
    """Be one rank; leave what it raised, or how often it called what."""
    signal.alarm(HANGS_S)
    ranks._GRACE_S = 0.5
    answer = folder / f"{rank}.answer"
    try:
        if size > 1:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
            dist.init_process_group(
                "gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=size
            )
        train_and_save(folder, number, doom)
    except infinity.RanksError as error:
        answer.write_bytes(json.dumps({"error": str(error)}).encode())
        return 1
    answer.write_bytes(json.dumps({"counts": doom.counts}).encode())
    return 0


def fork(work):
    """Run work() in a process of its own; return its id."""
    if pid := os.fork():
        return pid
    code = 70
    with contextlib.suppress(BaseException):
        code = work()
    os._exit(code)


def attempt(folder, port, number, size, killed=None, **doom):
    """Train and save on so many ranks, of which one may be killed; return each's answer, and its end."""
    for old in folder.glob("*.answer"):
        old.unlink()

    def begin(rank):
        return fork(
            lambda: of_rank(folder, port, number, rank, size, Doom(**(doom if rank == killed else {})))
        )

    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in [begin(rank) for rank in range(size)]]
    files = [folder / f"{rank}.answer" for rank in range(size)]
    answers = [json.loads(file.read_bytes()) if file.exists() else None for file in files]
    found = {"number": number, "size": size, "killed": killed, **doom, "ends": ends, "answers": answers}
    left = sorted(path.name for path in folder.iterdir() if path.is_dir())
    note = folder / "saved" / "notes.txt"
    if not number:
        note.write_text("mine")
    note = note.read_text()
    return {**found, "saved": read_manifest(folder / "saved").extra, "left": left, "note": note}


def tell(found):
    """Print what an attempt has come to."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def serve(writing):
    """Keep the store in which the ranks meet."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    signal.pause()
    return 0


def main(folder, seed):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    draw = random.Random(seed)
    reading, writing = os.pipe()
    server = fork(lambda: serve(writing))
    port = int(os.read(reading, 16))
    try:
        numbers = iter(range(1000))
        tell(attempt(folder, port, next(numbers), 3))
        first = attempt(folder, port, next(numbers), 3)
        tell(first)
        calls = [(rank, name) for rank, one in enumerate(first["answers"]) for name in one["counts"]]
        draw.shuffle(calls)
        for rank, name in calls:
            count = first["answers"][rank]["counts"][name]
            doom = {
                "name": name,
                "nth": draw.randrange(count),
                "when": draw.choice(["before", "amid", "behind"]),
            }
            size = 3 if rank == 2 else draw.choice([2, 3])
            tell(attempt(folder, port, next(numbers), size, rank, **doom))
        for size in (2, 1):
            tell(attempt(folder, port, next(numbers), size))
    finally:
        os.kill(server, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

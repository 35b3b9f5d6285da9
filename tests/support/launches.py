"""Programs on several ranks: under torchrun, or forked."""

import functools
import gc
import importlib
import os
import runpy
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch

import models
from children import Child
from places import SUPPORT


def environment(**more):
    """Return that of a process which imports what is in this folder, and computes on one thread."""
    paths = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}


def torchrun(ranks, *arguments, restarts=0, limit_s=250, **more):
    """Run a program on several ranks. more: of the environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, f"--max-restarts={restarts}", *map(str, arguments)],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


@functools.cache
def warm_up():
    """Import what a training imports only while it runs."""
    importlib.import_module("torch._dynamo")
    for name in ("llama", "gpt2", "mixtral"):
        models.MODELS[name]()


def forked(ranks, program, folder, *arguments, limit_s=280.0, **more):
    """Run a program of this folder on several ranks as torchrun does; return what they have printed.

    Each rank is forked from this process, which has imported torch and transformers already: that takes as
    long as many a case. more: of the environment.

    Raises: AssertionError, with what was printed, where a rank has failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_all = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    printed = [Path(folder, f"{rank}.txt") for rank in range(ranks)]

    def rank(number):
        def work(_say):
            with printed[number].open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
            sys.argv = [str(program), str(folder), *map(str, arguments)]
            variables = {**of_all, "RANK": number, "LOCAL_RANK": number, **more}
            os.environ.update({key: str(one) for key, one in variables.items()})
            torch.set_num_threads(1)
            warnings.resetwarnings()
            runpy.run_path(str(program), run_name="__main__")

        return work

    warm_up()
    gc.collect()  # no rank shall end what a test before has left
    team = [Child(rank(number), limit_s) for number in range(ranks)]
    left = team
    while left := [child for child in left if not child.over()]:
        time.sleep(0.02)
    text = "\n".join(path.read_text() for path in printed if path.exists())
    assert [child.status for child in team] == [0] * ranks, (
        f"{[child.last for child in team]}\n{text[-3000:]}"
    )
    return text

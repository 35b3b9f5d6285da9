"""Programs on several ranks: under torchrun, or forked."""

import atexit
import functools
import gc
import importlib
import os
import runpy
import socket
import subprocess
import sys
import time
import traceback
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


def python(*arguments, folder, limit_s=250.0, **more):
    """Do what `python ARGUMENTS` does, -m and -c among them, in a process forked from this one.

    This one has imported torch and transformers already, which takes longer than many a program. The child
    ends as a script ends, but for the interpreter's own destructors. folder: what it prints is kept there
    meanwhile. more: of the environment.
    """
    return _forked([arguments], folder, limit_s, [more])[0]


def python_of_ranks(ranks, *arguments, folder, limit_s=280.0, **more):
    """Do what `torchrun ARGUMENTS` does on so many ranks, as `python` does; return each rank's end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_all = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables = [{**of_all, "RANK": rank, "LOCAL_RANK": rank, **more} for rank in range(ranks)]
    return _forked([arguments] * ranks, folder, limit_s, variables)


def forked(ranks, program, folder, *arguments, **options):
    """Run a program of this folder on several ranks, its first argument a folder; return what they printed.

    Raises: AssertionError, with what was printed, where a rank has failed.
    """
    ended = python_of_ranks(ranks, program, folder, *arguments, folder=folder, **options)
    text = "\n".join(one.stdout + one.stderr for one in ended)
    codes = [one.returncode for one in ended]
    assert codes == [0] * ranks, f"exit codes {codes}\n{text[-3000:]}"
    return text


def _forked(commands, folder, limit_s, variables):
    """Run command lines side by side in children of this process, to their ends."""
    warm_up()
    gc.collect()  # no child shall end what a test before has left
    printed = [
        [Path(folder, f"{number}.{name}") for name in ("out", "err")] for number in range(len(commands))
    ]
    team = [
        Child(_work(list(map(str, command)), files, {name: str(one) for name, one in more.items()}), limit_s)
        for command, files, more in zip(commands, printed, variables, strict=True)
    ]
    left = team
    while left := [child for child in left if not child.over()]:
        time.sleep(0.01)
    ended = []
    for command, child, files in zip(commands, team, printed, strict=True):
        code = os.waitstatus_to_exitcode(child.status)
        ended.append(subprocess.CompletedProcess(command, code, *(file.read_text() for file in files)))
        for file in files:
            file.unlink()
    return ended


def _work(command, files, variables):
    """Return what a child does: it becomes the interpreter of a command line."""

    def work(_say):
        for fd, path in enumerate(files, 1):
            with path.open("w") as file:
                os.dup2(file.fileno(), fd)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        os.environ.update(environment(**variables))
        torch.set_num_threads(1)
        warnings.resetwarnings()
        atexit._clear()  # what this process does at its end is not the child's to do
        try:
            _run(*command)
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            atexit._run_exitfuncs()

    return work


def _run(first, *rest):
    """Run what the interpreter's command line names, as __main__."""
    if first == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
    elif first == "-m":
        module, *rest = rest
        sys.argv = [module, *rest]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")

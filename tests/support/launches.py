"""Programs on several ranks: under torchrun, or forked."""

import atexit
import functools
import gc
import importlib
import itertools
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

import models
from children import Child
from infinity.bench.ports import free_port
from places import SUPPORT


def environment(**more):
    """Return that of a process which imports what is in this folder, and computes on one thread."""
    paths = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}


def torchrun(ranks, *arguments, restarts=0, limit_s=600, **more):
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


class Program:
    """What `python ARGUMENTS` does, -m and -c among them, in a process forked from this one.

    This one has imported torch and transformers already, which takes longer than many a program. The child
    ends as a script ends, but for the interpreter's own destructors. folder: what it prints is kept there
    until its end. more: of the environment.
    """

    def __init__(self, *arguments, folder, limit_s=600.0, **more):
        warm_up()
        gc.collect()  # no child shall end what a test before has left
        self.arguments = [str(one) for one in arguments]
        self._printed = [Path(folder, f"{next(_NUMBERS)}.{name}") for name in ("out", "err")]
        self._child = Child(self._work({name: str(one) for name, one in more.items()}), limit_s)
        self.pid = self._child.pid

    def over(self):
        """Whether it has ended."""
        return self._child.status is not None or self._child.over()

    def end(self):
        """Wait for its end; return that, with what it printed."""
        while not self.over():
            time.sleep(0.01)
        code = os.waitstatus_to_exitcode(self._child.status)
        texts = [file.read_text() for file in self._printed]
        for file in self._printed:
            file.unlink()
        return subprocess.CompletedProcess(self.arguments, code, *texts)

    def kill(self):
        """End it, if it has not ended."""
        if not self.over():
            os.kill(self.pid, signal.SIGKILL)
        while not self.over():
            time.sleep(0.01)

    def _work(self, variables):
        def work(_say):
            gc.freeze()  # what is imported is not looked at again
            for fd, path in enumerate(self._printed, 1):
                with path.open("w") as file:
                    os.dup2(file.fileno(), fd)
            sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
            os.environ.update(environment(**variables))
            torch.set_num_threads(1)
            warnings.resetwarnings()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            atexit._clear()  # what this process does at its end is not the child's to do
            code = 1
            try:
                _run(*self.arguments)
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
                if isinstance(ended.code, str):
                    sys.stderr.write(f"{ended.code}\n")
            except BaseException:  # noqa: BLE001 - as the interpreter ends with it
                traceback.print_exc()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(code)

        return work


_NUMBERS = itertools.count()


def python(*arguments, **options):
    """Run a Program to its end."""
    return Program(*arguments, **options).end()


def python_of_ranks(ranks, *arguments, **options):
    """Do what `torchrun ARGUMENTS` does on so many ranks, as Programs; return each rank's end."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    of_all = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, **group}
    options = {"limit_s": 800.0, **of_all, **options}
    team = [Program(*arguments, **options, RANK=rank, LOCAL_RANK=rank) for rank in range(ranks)]
    return [one.end() for one in team]


def forked(ranks, program, folder, *arguments, **options):
    """Run a program of this folder on several ranks, its first argument a folder; return what they printed.

    Raises: AssertionError, with what was printed, where a rank has failed.
    """
    ended = python_of_ranks(ranks, program, folder, *arguments, folder=folder, **options)
    text = "\n".join(one.stdout + one.stderr for one in ended)
    codes = [one.returncode for one in ended]
    assert codes == [0] * ranks, f"exit codes {codes}\n{text[-3000:]}"
    return text


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

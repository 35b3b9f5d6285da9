"""Programs on several ranks, under torchrun."""

import os
import subprocess
import sys

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

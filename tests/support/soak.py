"""`python3 dev.py soak`: 2,000 steps of a durable training; memory, descriptors and threads stay flat."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch

import fragile

MOST_RSS = 4 << 20
"""Bytes that resident memory may grow between a tenth of the steps and the end: what malloc keeps."""


def look(run, folder):
    """Count everything that could grow."""
    gc.collect()
    process = psutil.Process()
    files = [path.stat() for path in Path(folder).rglob("*") if path.is_file()]
    return {
        "memory": process.memory_info().rss,
        "descriptors": process.num_fds(),
        "threads": threading.active_count(),
        "tasks": process.num_threads(),
        "files": len(files),
        "file bytes": sum(one.st_size for one in files),
        "in flight": len(run.engine.nvme_store.engine._in_flight),
        "objects": len(gc.get_objects()),
    }


def soak(steps, place):
    """Train; return what was counted after a tenth of the steps, and in the end."""
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="infinity-soak-", dir=place)
    try:
        run = fragile.Run(folder)
        counted = []
        for until in (max(steps // 10, 10), steps):
            while run.done < until:
                run.step()
            run.engine.durable.commit_now()
            counted.append(look(run, folder))
        run.kill()
        return counted
    finally:
        shutil.rmtree(folder)


def grown(first, last):
    """Name what grew."""
    allowed = {"memory": MOST_RSS, "objects": 200, "in flight": 4, "tasks": 1, "threads": 1}
    return [name for name in first if last[name] - first[name] > allowed.get(name, 0)]


def main(arguments):
    """Soak, and say what came of it."""
    parser = argparse.ArgumentParser(prog="dev.py soak")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--place", default=None, help="a folder on the disk to use")
    options = parser.parse_args(arguments)
    os.environ.setdefault("INFINITY_MEASURE", "0")
    began = time.monotonic()
    first, last = soak(options.steps, options.place)
    bad = grown(first, last)
    for name, value in first.items():
        mark = "  GROWS" if name in bad else ""
        print(f"{name:<12} {value:>12,} after a tenth, {last[name]:>12,} in the end{mark}")
    print(f"{options.steps} steps, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

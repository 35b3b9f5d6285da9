"""`python3 dev.py soak`: 2,000 steps of a durable training, 500 with updates made ahead, 500 of a mixture of
experts, 10,000 tokens of a generation; memory, descriptors, threads and files stay flat.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import torch

import trials

MOST_RSS = 4 << 20
"""Bytes that resident memory may grow between a tenth of the steps and the end: what malloc keeps."""

OF_MISSED = 8
"""Objects that a step which slices miss leaves until they are told of it: its options and scalars."""
NOTED = 200
"""Steps that are noted for slices at most."""


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


def soak(steps, place, kind=""):
    """Train; return what was counted after a tenth of the steps, and in the end. kind: of fragile_kinds."""
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="infinity-soak-", dir=place)
    try:
        run = trials.begin(folder, kind=kind)
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


def soak_generation(tokens, place, at_once=50):
    """The same of a model that generates so many tokens, `at_once` from each prompt."""
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="infinity-soak-", dir=place)
    try:
        run = trials.begin(folder, kind="generation")
        run.step()
        counted, done = [], 0
        for until in (max(tokens // 10, at_once), tokens):
            while done < until:
                done += len(run.generate(at_once))
            counted.append(look(run, folder))
        run.kill()
        return counted
    finally:
        shutil.rmtree(folder)


def grown(first, last, noted=0):
    """Name what grew. noted: steps that slices may have missed."""
    allowed = {"memory": MOST_RSS, "objects": 200 + OF_MISSED * min(noted, NOTED), "in flight": 4, "tasks": 1}
    allowed["threads"] = 1
    return [name for name in first if last[name] - first[name] > allowed.get(name, 0)]


def main(arguments):
    """Soak, and say what came of it."""
    parser = argparse.ArgumentParser(prog="dev.py soak")
    parser.add_argument("--steps", type=int, default=2000, help="of fragile's training (2000); 0 for none")
    parser.add_argument("--ahead", type=int, default=500, help="steps with updates made ahead (500)")
    parser.add_argument("--experts", type=int, default=500, help="steps of a mixture of experts (500)")
    parser.add_argument("--tokens", type=int, default=10_000, help="that a model generates (10,000)")
    parser.add_argument("--place", default=None, help="a folder on the disk to use")
    options = parser.parse_args(arguments)
    os.environ.setdefault("INFINITY_MEASURE", "0")
    all_bad = []
    for count, what, run in (
        (options.steps, "steps", soak),
        (options.ahead, "steps with updates made ahead", partial(soak, kind="speculation by turns")),
        (options.experts, "steps of a mixture of experts", partial(soak, kind="slices")),
        (options.tokens, "tokens of a generation", soak_generation),
    ):
        if not count:
            continue
        began = time.monotonic()
        first, last = run(count, options.place)
        bad = grown(first, last, count if "experts" in what else 0)
        all_bad += bad
        for name, value in first.items():
            mark = "  GROWS" if name in bad else ""
            print(f"{name:<12} {value:>12,} after a tenth, {last[name]:>12,} in the end{mark}")
        print(f"{count:,} {what}, {time.monotonic() - began:.0f} s", flush=True)
    return 1 if all_bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

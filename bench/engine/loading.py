"""Seconds until a frozen model of a checkpoint is ready, and the bytes that this writes.

    python -m infinity.bench.engine.loading --nvme DIR --json loading.json

A Llama's checkpoint is written first, all zeros in files with holes, so that it takes no room on the disk: to
be ready a model needs its files' headers alone. (With nvme=... Init writes a block of 4 KiB to that folder as
well, to see whether it takes O_DIRECT.) Each run is a process of its own; imports are not counted.
Exits with 1 above the limit, or where anything was written or the checkpoint's files have changed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.engine.base_files import llama_files
from infinity.bench.engine.lora import format_bytes
from infinity.bench.engine.runs import OWN, SHAPES, RunError, folder_on
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.bench.targets import Target

SECONDS = Target("≤", 2.0, "s until the model is ready, beyond imports")
_PROGRAM = """
import json, sys, time
import psutil, torch
from transformers import LlamaForCausalLM
import infinity, infinity.engine.frozen, infinity.engine.pretrained
folder, host_memory = sys.argv[1:]
before, began = psutil.Process().io_counters(), time.perf_counter()
with infinity.Init(host_memory=host_memory, device="cpu", frozen=True):
    model = LlamaForCausalLM.from_pretrained(folder)
seconds, after = time.perf_counter() - began, psutil.Process().io_counters()
done = infinity.stats(model)
print(json.dumps({
    "seconds": seconds,
    "parameters": sum(one.numel() for one in model.parameters()),
    "written_nbytes": after.write_bytes - before.write_bytes,
    "nvme_written_nbytes": done.nvme_written_nbytes,
    "read_nbytes": after.read_bytes - before.read_bytes,
    "checkpoint_read_nbytes": done.checkpoint_read_nbytes,
}))
"""


def write_sparse(folder: Path, shape: dict[str, int]) -> Path:
    """Write the files of a Llama of this shape to a new folder, weights as holes; return it."""
    folder.mkdir()
    config, shapes = llama_files(shape)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, sizes in shapes.items():
        nbytes = 2
        for size in sizes:
            nbytes *= size
        header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def load(options: argparse.Namespace, folder: Path, console: Console) -> Findings:
    """Load the model some times. Raises: RunError with what a process has printed."""
    with folder_on(folder) as place:
        base = write_sparse(place / "base", SHAPES[options.model])
        before = _state(base)
        rows = []
        for number in range(options.runs):
            with console.status(f"loading, run {number + 1} of {options.runs}"):
                code, said = OWN.run(["-c", _PROGRAM, str(base), options.host_memory])
            if code:
                raise RunError(f"loading ended with exit code {code}:\n{said[-2000:]}")
            rows.append({"model": options.model, **json.loads(said.strip().splitlines()[-1])})
        untouched = _state(base) == before
    wrote = sum(one["written_nbytes"] + one["nvme_written_nbytes"] for one in rows)
    seconds = statistics.median(one["seconds"] for one in rows)
    return Findings(
        title=f"Loading a frozen base, host_memory={options.host_memory}",
        rows=[{**one, "met": SECONDS.met(seconds) and untouched and not wrote} for one in rows],
        columns=[
            Column("model", "model"),
            Column("parameters", "parameters", "{:,}".format),
            Column("seconds", "ready after, s", "{:.2f}".format),
            Column("written_nbytes", "written", format_bytes),
            Column("nvme_written_nbytes", "of that by the engine", format_bytes),
            Column("checkpoint_read_nbytes", "weights read", format_bytes),
        ],
        verdicts=[
            SECONDS.verdict([seconds]),
            f"written: {format_bytes(wrote)}",
            f"the folder is {'untouched' if untouched else 'CHANGED'}",
        ],
        options=asked(options),
    )


def _state(base: Path) -> list[tuple[str, int, int, int]]:
    """Return names, sizes, blocks on the disk and times of a folder's files, and the folder's own time."""
    found = [(one, one.stat()) for one in (base, *sorted(base.iterdir()))]
    return [(path.name, stat.st_size, stat.st_blocks, stat.st_mtime_ns) for path, stat in found]


def main(arguments: list[str] | None = None) -> None:
    """Measure; exit with 1 above a limit."""
    parser = command("engine.loading", "seconds until a frozen base is ready, and bytes written")
    parser.add_argument("--model", choices=SHAPES, default="3b")
    parser.add_argument("--host-memory", default="512MiB", metavar="SIZE")
    parser.add_argument("--runs", type=int, default=3)
    findings = run_command(parser, arguments, load)
    if not all(one["met"] for one in findings.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

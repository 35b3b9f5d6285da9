"""Peak memory of saving, loading, exporting and from_pretrained, for each rank, beside its limit.

    python -m infinity.bench.checkpoint.checkpoints --nvme DIR --ranks 2 --json checkpoints-2.json

The limit, for peak resident memory above that after the imports and a first use of torch:

    a rank's part of host_memory + 2 x (the largest unit, resident) + 300 MB

Files take about 30 bytes of disk per parameter, and are removed. For from_pretrained, whose files are dropped
from the page cache first, the bytes that all ranks read from the disk are measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

import infinity
from infinity.bench.engine.runs import SHAPES, RunError
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.bench.targets import mark
from infinity.sizes import format_size, parse_size
from infinity.storage import disk_speed

ALLOWANCE = 300_000_000
VOCABULARY = 32_000
SAVED, HUB, EXPORTED = "saved", "hub", "exported"
STEPS = (
    ("save", ""),
    ("load", ""),
    ("export", ""),
    ("save_pretrained", ""),
    ("from_pretrained", "float32"),
    ("from_pretrained", "bfloat16"),
)
"""The steps to measure, in this order, and the dtype for from_pretrained."""


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """Memory and time of one rank in one step."""

    what: str
    dtype: str
    rank: int
    peak_nbytes: int
    limit_nbytes: int
    unit_nbytes: int
    """The largest unit, resident."""
    read_part: float | None
    """Bytes that all ranks read from the disk over the size of the files; None if not measured."""
    seconds: float
    parameters: int

    @property
    def met(self) -> bool:
        """Whether the peak is within the limit."""
        return self.peak_nbytes <= self.limit_nbytes


def launched(ranks: int, arguments: Sequence[str]) -> tuple[int, str]:
    """Run Python in a process of its own, or under torchrun on several ranks; return its exit code, and what
    it said of errors.
    """
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    paths = [str(Path(infinity.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, *run, *arguments],
        env={
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def measured(
    folder: Path,
    sizes: Mapping[str, int],
    ranks: int,
    host_nbytes: int,
    launch: Callable[[int, Sequence[str]], tuple[int, str]] = launched,
) -> Iterator[CheckpointRow]:
    """Do all of STEPS in an empty folder, each in new processes; yield the figures of each rank.

    sizes: of a LlamaConfig. host_nbytes: of each rank. launch: runs Python on so many ranks, see launched.

    Raises: RunError if a process failed, with the last lines that it wrote.
    """
    disk_speed.speed_of(str(folder))  # measured once on each machine, which takes memory of its own
    for what, dtype in STEPS:
        size = 1 if what == "export" else ranks
        hub = [*(folder / HUB).glob("*.safetensors")]
        for path in hub:
            _forget(path)
        spec: dict[str, object] = {"what": what, "dtype": dtype or "float32", "sizes": dict(sizes)}
        found = _run(launch, size, folder, spec, host_nbytes)
        read = sum(one["read_nbytes"] for one in found)
        part = read / sum(path.stat().st_size for path in hub) if what == "from_pretrained" else None
        for rank, one in enumerate(found):
            limit = host_nbytes + 2 * int(one["unit_nbytes"]) + ALLOWANCE
            yield CheckpointRow(
                what,
                dtype,
                rank,
                int(one["peak_nbytes"]),
                limit,
                int(one["unit_nbytes"]),
                part,
                one["seconds"],
                int(one["parameters"]),
            )
        if what == "export":
            shutil.rmtree(folder / EXPORTED)


def _run(
    launch: Callable[[int, Sequence[str]], tuple[int, str]],
    ranks: int,
    folder: Path,
    spec: dict[str, object],
    host_nbytes: int,
) -> list[dict[str, float]]:
    # host_memory is the machine's: the ranks divide it.
    spec = {**spec, "folder": str(folder), "host_memory": ranks * host_nbytes}
    worker = "infinity.bench.checkpoint.checkpoint_worker"
    code, said = launch(ranks, ["-m", worker, json.dumps(spec)])
    if code:
        last = "\n".join(said.splitlines()[-15:])
        raise RunError(f"{spec['what']} ended with exit code {code}; its last lines:\n{last}")
    return [json.loads((folder / f"taken-{rank}.json").read_bytes()) for rank in range(ranks)]


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def findings_of(rows: list[CheckpointRow], options: argparse.Namespace) -> Findings:
    """Show the peaks beside their limits."""
    return Findings(
        title=f"Peak resident memory above the imports, {options.ranks} ranks",
        rows=[{**asdict(row), "met": row.met} for row in rows],
        columns=[
            Column("what", "what"),
            Column("dtype", "as"),
            Column("rank", "rank", str),
            Column("peak_nbytes", "peak", format_size),
            Column("limit_nbytes", "limit", format_size),
            Column("met", "", lambda met: mark(met=met)),
            Column("unit_nbytes", "largest unit", format_size),
            Column("read_part", "files read", "{:.2f} times".format),
            Column("seconds", "s", "{:.0f}".format),
        ],
        verdicts=[f"{max(row.parameters for row in rows) / 1e6:,.0f} M parameters"],
        options=asked(options),
    )


def measure(options: argparse.Namespace, folder: Path, console: Console) -> Findings:
    """Measure all STEPS with the model that was asked for."""
    sizes = {**SHAPES[options.model], "vocab_size": options.vocabulary}
    with console.status("saving, loading, exporting"):
        rows = list(measured(folder, sizes, options.ranks, parse_size(options.host_memory)))
    return findings_of(rows, options)


def main(arguments: list[str] | None = None) -> None:
    """Measure, and show the peaks; exit with 1 if one is above its limit."""
    parser = command("checkpoint.checkpoints", "Peak memory of checkpoints against its limit")
    parser.add_argument("--model", choices=SHAPES, default="1.1b", help="the shape of a Llama")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, metavar="N")
    parser.add_argument("--ranks", type=int, default=1, metavar="N")
    parser.add_argument("--host-memory", default="256MiB", metavar="SIZE", help="of each rank")
    findings = run_command(parser, arguments, measure)
    if not all(row["met"] for row in findings.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

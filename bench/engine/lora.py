"""NVMe bytes and peak memory of a LoRA step on an offloaded base, beside their limits and other libraries:
`infinity bench lora`.

    infinity bench lora --nvme DIR --json lora.json

PEFT's adapters on the attention's queries and values of a Llama built in Init; torch's AdamW trains them in
memory. The base is frozen: a step reads its 16-bit weights and writes none of them. The bytes written to the
disk, by the kernel's count, may be 1 % of those read. The bound of peak resident memory, building included,
above the memory after the imports:

    host_memory + 3 x (largest block's parameters and gradients, 16 bits each) + 200 MiB

With --base bf16 or fp8 the base is a checkpoint, written first, whose weights stay in its files.
With --peer the same adapters are trained by others: torch, PEFT on a base in memory; deepspeed, ZeRO-3 with
parameters on NVMe. (Under accelerate's disk_offload nothing trains: weights are on the meta device again when
the backward needs them.) Their memory is what is the process's alone. Losses are compared with torch's.
Exits with 1 if either limit is exceeded; seconds mean something on a quiet machine alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.arguments import positive
from infinity.bench.engine import rival
from infinity.bench.engine.base_files import PACKINGS, write_base
from infinity.bench.engine.memory import ALLOWANCE, largest_block
from infinity.bench.engine.runs import (
    OWN,
    SETTLING,
    SHAPES,
    Environment,
    Measured,
    Model,
    folder_on,
    measure,
)
from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, report
from infinity.bench.targets import Target, mark
from infinity.errors import ConfigError
from infinity.sizes import format_size, parse_size

HELP = "Bytes and memory of a LoRA step on an offloaded or streamed base, beside limits and other libraries."
WRITTEN = Target("≤", 1.0, "% of the bytes read are written")


@dataclass(frozen=True, slots=True)
class LoraRow:
    """The bytes of a step, and the peak beside its bound, in bytes."""

    model: str
    parameters: int
    """Of the base and the adapters."""
    read_nbytes: float
    """Per step."""
    written_nbytes: float
    peak_nbytes: int
    bound_nbytes: int
    build_s: float
    """Seconds until the model was there."""
    first_step_s: float
    """Seconds until the first step was over, loading included."""
    seconds: float
    """Of a step."""

    @property
    def read_per_parameter(self) -> float:
        """Bytes read in a step, for each parameter."""
        return self.read_nbytes / self.parameters

    @property
    def written_percent(self) -> float:
        """Bytes written, in percent of the bytes read."""
        return 100 * self.written_nbytes / self.read_nbytes

    @property
    def within(self) -> bool:
        """Whether the peak is within its bound."""
        return self.peak_nbytes <= self.bound_nbytes

    @property
    def met(self) -> bool:
        """Whether both limits are kept."""
        return self.within and WRITTEN.met(self.written_percent)


def row_of(model: str, host_memory: str, run: Measured) -> LoraRow:
    """Compare a run with its limits. Raises: ConfigError if nothing was read, as nothing is measured then."""
    if run.read_nbytes == 0:
        raise ConfigError(
            f"--host-memory {host_memory} holds the whole base of {run.parameters:,} parameters: a step read "
            "nothing, so the bytes written cannot be compared. Choose less, or a larger --model."
        )
    blocks = 3 * 4 * largest_block(model)
    return LoraRow(
        model=model,
        parameters=run.parameters,
        read_nbytes=run.read_nbytes,
        written_nbytes=run.written_nbytes,
        peak_nbytes=run.peak_nbytes,
        bound_nbytes=parse_size(host_memory) + blocks + ALLOWANCE,
        build_s=run.build_s,
        first_step_s=run.build_s + sum(run.all_seconds[:1]),
        seconds=run.seconds,
    )


def _row_of_peer(kind: str, options: argparse.Namespace, run: Measured) -> dict[str, Any]:
    """Return what a peer has in the table: it has no limits."""
    return {
        "contestant": kind,
        "model": options.model,
        "parameters": run.parameters,
        "read_nbytes": run.read_nbytes,
        "read_per_parameter": run.read_per_parameter,
        "written_nbytes": run.written_nbytes,
        "peak_nbytes": run.engine["own_peak_nbytes"],
        "build_s": run.build_s,
        "first_step_s": run.build_s + sum(run.all_seconds[:1]),
        "seconds": run.seconds,
        "run": run,
    }


def _verdict_of_losses(run: Measured, peers: Mapping[str, Measured]) -> list[str]:
    """Return a line that compares our losses with those of PEFT in memory, if it ran."""
    if "torch" not in peers:
        return []
    same = run.all_losses == peers["torch"].all_losses
    return [
        f"losses of {len(run.all_losses)} steps are those of PEFT in memory, to the bit: {mark(met=same)}"
    ]


def findings_of(
    row: LoraRow, run: Measured, options: argparse.Namespace, peers: Mapping[str, Measured]
) -> Findings:
    """Show the bytes and the peak beside their limits, and what the peers take."""
    return Findings(
        title=f"LoRA of rank {options.rank} on an offloaded base, {options.tokens} tokens a step",
        rows=[
            {
                "contestant": "infinity",
                **asdict(row),
                "read_per_parameter": row.read_per_parameter,
                "written_percent": row.written_percent,
                "met": row.met,
                "run": run,
            },
            *(_row_of_peer(kind, options, one) for kind, one in peers.items()),
        ],
        columns=[
            Column("contestant", "contestant"),
            Column("model", "model"),
            Column("parameters", "parameters", "{:,}".format),
            Column("build_s", "s until it is there", "{:.1f}".format),
            Column("first_step_s", "first step over, s", "{:.1f}".format),
            Column("seconds", "s a step", "{:.2f}".format),
            Column("read_nbytes", "read in a step", format_bytes),
            Column("read_per_parameter", "B per parameter", "{:.2f}".format),
            Column("written_nbytes", "written", format_bytes),
            Column("written_percent", "%", "{:.3f}".format),
            Column("peak_nbytes", "peak", format_size),
            Column("bound_nbytes", "bound", format_size),
            Column("met", "", lambda met: mark(met=met)),
        ],
        verdicts=[
            WRITTEN.verdict([row.written_percent]),
            f"peak memory above the imports within its bound: {mark(met=row.within)}",
            *_verdict_of_losses(run, peers),
        ],
        options=asked(options),
    )


def format_bytes(mean: float) -> str:
    """Format a mean of bytes."""
    return format_size(round(mean))


def train(options: argparse.Namespace, folder: Path, console: Console) -> Findings:
    """Train the adapters in a process of their own. Raises: ConfigError without peft."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("infinity bench lora needs peft: pip install peft")
    environments = _environments(options, console)
    model = Model(options.model, options.tokens, SETTLING + options.steps)
    settings: dict[str, Any] = {"host_memory": options.host_memory, "rank": options.rank}
    with tempfile.TemporaryDirectory(prefix="infinity-base-", dir=folder) as place:
        if options.base != "built":
            with console.status("writing the base"):
                base = write_base(Path(place, "base"), SHAPES[options.model], options.base)
            settings["files"] = str(base)
        with console.status("building or loading the base, training its adapters"):
            run = measure(OWN, "lora", model, folder, settings, "lora_worker.py")
        row = row_of(options.model, options.host_memory, run)  # before the peers, if it measured nothing
        peers = {}
        for kind, environment in environments.items():
            with console.status(f"training them by {kind}"):
                peers[kind] = _measured_peer(kind, environment, model, folder, settings)
    return findings_of(row, run, options, peers)


def _environments(options: argparse.Namespace, console: Console) -> dict[str, Environment]:
    """Return where each peer runs. Raises: ConfigError for one that cannot."""
    if "deepspeed" in options.peer and options.base == "fp8":
        raise ConfigError("--peer deepspeed: ZeRO-3 does not read fp8. Choose --base built or bf16.")
    return {
        kind: rival.environment_of(options.venv, console) if kind == "deepspeed" else OWN
        for kind in dict.fromkeys(options.peer)
    }


def _measured_peer(
    kind: str, environment: Environment, model: Model, folder: Path, settings: dict[str, Any]
) -> Measured:
    chosen = {key: value for key, value in settings.items() if key != "host_memory"}
    if kind == "deepspeed":
        tuned = rival.settings(model.shape)
        zero = {key: one for key, one in tuned["zero_optimization"].items() if key != "offload_optimizer"}
        chosen["deepspeed"] = {**tuned, "zero_optimization": zero}
    return measure(environment, kind, model, folder, chosen, "lora_peers.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--nvme", type=Path, required=True, metavar="DIR", help="a folder on the disk")
    add("--model", choices=SHAPES, default="1.1b")
    add("--host-memory", default="512MiB", metavar="SIZE")
    bases = ("built", *PACKINGS)
    add("--base", choices=bases, default="built", help="built in Init, or a checkpoint's files")
    add("--rank", type=positive, default=8, help="of the adapters")
    add("--tokens", type=positive, default=16)
    add("--steps", type=positive, default=3, help=f"counted, after {SETTLING} that settle")
    peers = ("torch", "deepspeed")
    add("--peer", action="append", choices=peers, default=[], help="may be repeated")
    add("--venv", type=Path, metavar="DIR", help="DeepSpeed's virtual environment, with peft in it")
    add_outputs(parser, plots=False)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure; show the bytes of a step and the peak; return 1 above a limit.

    Raises: ConfigError; RunError with what a process has printed.
    """
    check_outputs(options)
    with folder_on(options.nvme) as folder:
        findings = train(options, folder, console)
        report(findings, options, console, folder)
    return 0 if findings.rows[0]["met"] else 1

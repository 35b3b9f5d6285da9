"""What LoRA on an offloaded base reads and writes in a step, and its peak memory, beside their limits.

    python -m infinity.bench.engine.lora --nvme DIR --json lora.json

PEFT's adapters on the attention's queries and values of a Llama built in Init; torch's AdamW trains them in
memory. The base is frozen: a step reads its 16-bit weights, and nothing of it is ever written. What is
written to the disk, by the kernel's count, may be 1 % of what is read. The bound of peak resident memory
above that after the imports, building included:

    host_memory + 3 x (largest block's parameters and gradients, 16 bits each) + 200 MiB

Exits with 1 where either is exceeded. Time does not matter: this may run on a busy machine.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from infinity.bench.engine.memory import ALLOWANCE, block_parameters
from infinity.bench.engine.runs import OWN, SETTLING, SHAPES, Measured, Model, folder_on, measure
from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, show, write
from infinity.bench.targets import Target, mark
from infinity.errors import ConfigError, InfinityError
from infinity.sizes import format_size, parse_size

WRITTEN = Target("≤", 1.0, "% of the bytes read are written")


@dataclass(frozen=True, slots=True)
class LoraRow:
    """A base with its adapters: what a step moves, and the peak beside its bound; bytes."""

    model: str
    parameters: int
    """Of the base and the adapters."""
    read_nbytes: float
    """Per step."""
    written_nbytes: float
    peak_nbytes: int
    bound_nbytes: int

    @property
    def written_percent(self) -> float:
        """What is written, as a part of what is read."""
        return 100 * self.written_nbytes / self.read_nbytes

    @property
    def within(self) -> bool:
        """Whether the peak is at most its bound."""
        return self.peak_nbytes <= self.bound_nbytes

    @property
    def met(self) -> bool:
        """Whether both limits are kept."""
        return self.within and WRITTEN.met(self.written_percent)


def row_of(model: str, host_memory: str, run: Measured) -> LoraRow:
    """Hold a run against its limits. Raises: ConfigError where nothing was read, so nothing is measured."""
    if run.read_nbytes == 0:
        raise ConfigError(
            f"--host-memory {host_memory} holds the whole base of {run.parameters:,} parameters: a step read "
            "nothing, and what it wrote cannot be compared. Choose less, or a larger --model."
        )
    blocks = 3 * 4 * block_parameters(model)
    return LoraRow(
        model=model,
        parameters=run.parameters,
        read_nbytes=run.read_nbytes,
        written_nbytes=run.written_nbytes,
        peak_nbytes=run.peak_nbytes,
        bound_nbytes=parse_size(host_memory) + blocks + ALLOWANCE,
    )


def findings_of(row: LoraRow, run: Measured, options: argparse.Namespace) -> Findings:
    """Lay the bytes and the peak beside their limits."""
    return Findings(
        title=f"LoRA of rank {options.rank} on an offloaded base, {options.tokens} tokens a step",
        rows=[{**asdict(row), "written_percent": row.written_percent, "met": row.met, "run": run}],
        columns=[
            Column("model", "model"),
            Column("parameters", "parameters", "{:,}".format),
            Column("read_nbytes", "read in a step", format_bytes),
            Column("written_nbytes", "written", format_bytes),
            Column("written_percent", "%", "{:.3f}".format),
            Column("peak_nbytes", "peak", format_size),
            Column("bound_nbytes", "bound", format_size),
            Column("met", "", lambda met: mark(met=met)),
        ],
        verdicts=[
            WRITTEN.verdict([row.written_percent]),
            f"peak memory above the imports within its bound: {mark(met=row.within)}",
        ],
        options=asked(options),
    )


def format_bytes(mean: float) -> str:
    """Return a mean of bytes as people read it."""
    return format_size(round(mean))


def main(arguments: list[str] | None = None) -> None:
    """Train in a process of its own; tell what a step moved, and the peak; exit with 1 above a limit."""
    parser = argparse.ArgumentParser(
        prog="python -m infinity.bench.engine.lora",
        description="LoRA's NVMe bytes and memory against their limits",
    )
    parser.add_argument("--nvme", type=Path, required=True, metavar="DIR", help="a folder on the disk")
    parser.add_argument("--model", choices=SHAPES, default="1.1b")
    parser.add_argument("--host-memory", default="512MiB", metavar="SIZE")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help=f"counted, after {SETTLING} that settle")
    add_outputs(parser, plots=False)
    options = parser.parse_args(arguments)
    console = Console()
    try:
        if importlib.util.find_spec("peft") is None:
            raise ConfigError("python -m infinity.bench.engine.lora needs peft: pip install peft")
        check_outputs(options)
        with folder_on(options.nvme) as folder:
            model = Model(options.model, options.tokens, SETTLING + options.steps)
            settings = {"host_memory": options.host_memory, "rank": options.rank}
            with console.status("building the base, training its adapters"):
                run = measure(OWN, "lora", model, folder, settings, "lora_worker.py")
            row = row_of(options.model, options.host_memory, run)
            findings = findings_of(row, run, options)
            show(findings, console, folder)
            write(findings, options, folder)
    except InfinityError as error:
        raise SystemExit(str(error)) from error
    if not row.met:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

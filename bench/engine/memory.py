"""Peak memory of Infinity against its bound, for two sizes of model at one budget.

    python -m infinity.bench.engine.memory --nvme DIR --json bench/results/memory.json

The bound of peak resident memory, building included, above the memory after the imports:

    host_memory + 3 x (largest block's parameters and gradients, 16 bits each)
    + (plain forward and backward's peak at the same tokens - its parameters and gradients) + 200 MiB

The plain run's allocator returns freed memory to the kernel as Infinity's does; otherwise fragmentation would
raise the bound. Growth is the additional memory of the larger model per additional parameter, beyond the
terms of the bound that grow with the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.engine.runs import OWN, SHAPES, Measured, Model, block_parameters, measure, settings_of
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.bench.targets import mark
from infinity.sizes import format_size, parse_size

ALLOWANCE = 200 << 20
GROWTH_LIMIT = 0.1
"""Bytes per parameter."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A model's peak at the budget, and the terms of its bound, in bytes."""

    model: str
    update: str
    parameters: int
    peak_nbytes: int
    build_peak_nbytes: int
    host_nbytes: int
    blocks_nbytes: int
    """Three of the largest block: parameters and gradients."""
    plain_nbytes: int
    """A plain forward and backward's peak, without parameters and gradients."""
    bytes_per_parameter: float
    """NVMe traffic of a step."""

    @property
    def bound_nbytes(self) -> int:
        """The limit of the peak."""
        return self.host_nbytes + self.growing_nbytes + ALLOWANCE

    @property
    def growing_nbytes(self) -> int:
        """The terms that depend on the model."""
        return self.blocks_nbytes + self.plain_nbytes


def largest_block(model: str) -> int:
    """Return the parameters of one decoder block, or of an embedding if that is larger."""
    sizes = SHAPES[model]
    return max(block_parameters(sizes), sizes["vocab_size"] * sizes["hidden_size"])


def rows_of(model: str, options: argparse.Namespace, folder: Path) -> list[MemoryRow]:
    """Measure the plain run's memory, then Infinity's with either update."""

    def run(kind: str, settings: dict[str, Any]) -> Measured:
        own = OWN if kind == "infinity" else replace(OWN, variables=_GIVES_BACK)
        return measure(own, kind, Model(model, options.tokens, options.steps), folder, settings)

    alone = run("forward_backward", {})
    rows = []
    for update in ("backward", "clipped"):
        one = run("infinity", settings_of(options.host_memory, update))
        rows.append(
            MemoryRow(
                model=model,
                update=update,
                parameters=one.parameters,
                peak_nbytes=one.peak_nbytes,
                build_peak_nbytes=one.build_peak_nbytes,
                host_nbytes=parse_size(options.host_memory),
                blocks_nbytes=3 * 4 * largest_block(model),
                plain_nbytes=max(0, alone.train_peak_nbytes - 4 * alone.parameters),
                bytes_per_parameter=one.bytes_per_parameter,
            )
        )
    return rows


_GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(16 << 20)}


def growth(small: MemoryRow, large: MemoryRow) -> dict[str, float]:
    """Return the larger model's additional bytes per additional parameter: in all, and beyond the terms."""
    more, terms = large.peak_nbytes - small.peak_nbytes, large.growing_nbytes - small.growing_nbytes
    parameters = large.parameters - small.parameters
    return {"in_all": more / parameters, "beyond_terms": (more - terms) / parameters}


def findings_of(rows: Sequence[MemoryRow], options: argparse.Namespace) -> Findings:
    """Show the peaks beside their bounds, and the growth beside its limit."""
    half = len(rows) // 2
    grown = {
        small.update: growth(small, large) for small, large in zip(rows[:half], rows[half:], strict=True)
    }
    return Findings(
        title="Peak resident memory above the imports",
        rows=[
            {**asdict(row), "bound_nbytes": row.bound_nbytes, "met": row.peak_nbytes <= row.bound_nbytes}
            for row in rows
        ],
        columns=[
            Column("model", "model"),
            Column("parameters", "state", lambda parameters: format_size(12 * parameters)),
            Column("peak_nbytes", "peak", format_size),
            Column("build_peak_nbytes", "of it building", format_size),
            Column("bound_nbytes", "bound", format_size),
            Column("met", "", lambda met: mark(met=met)),
            Column("blocks_nbytes", "of it blocks", format_size),
            Column("plain_nbytes", "of it plain", format_size),
            Column("bytes_per_parameter", "B per parameter, step", "{:.1f}".format),
            Column("update", "update"),
        ],
        verdicts=[
            f"update {update}: {more['in_all']:+.3f} B per further parameter in all, "
            f"{more['beyond_terms']:+.3f} B beyond the terms of the bound (limit {GROWTH_LIMIT})"
            for update, more in grown.items()
        ],
        options=asked(options),
    )


def measure_both(options: argparse.Namespace, folder: Path, console: Console) -> Findings:
    """Measure both models."""
    with console.status("building and training each model"):
        rows = [row for model in options.models for row in rows_of(model, options, folder)]
    return findings_of(rows, options)


def main(arguments: list[str] | None = None) -> None:
    """Measure both models; show the peaks and the growth."""
    parser = command("engine.memory", "Peak memory against its bound")
    models = ["350m", "1.1b"]
    parser.add_argument("--models", nargs=2, choices=SHAPES, default=models, help="the smaller one first")
    parser.add_argument("--host-memory", default="512MiB", metavar="SIZE")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    run_command(parser, arguments, measure_both)


if __name__ == "__main__":
    main()

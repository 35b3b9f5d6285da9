"""Peak memory of Infinity against its bound, for two sizes of model at one budget.

    python -m infinity.bench.memory --nvme DIR --json bench/results/memory.json

The bound, for peak resident memory above that after the imports, building included:

    host_memory + 3 x (largest block's parameters and gradients, 16 bits each)
    + (plain forward and backward's peak at the same tokens - its parameters and gradients) + 200 MiB

The plain run's allocator gives freed memory back as Infinity's does; otherwise holes would widen the bound.
Growth is what the larger model takes more, beyond the terms of the bound that grow with it, per further
parameter.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infinity.bench.runs import (
    OWN,
    SHAPES,
    UPDATES,
    Measured,
    Model,
    RunError,
    folder_on,
    here,
    machine,
    measure,
    save,
    words,
)
from infinity.sizes import format_size, parse_size

ALLOWANCE = 200 << 20
GROWTH_LIMIT = 0.1
"""Bytes per parameter."""


@dataclass(frozen=True, slots=True)
class Row:
    """A model at the budget, and the terms of its bound, in bytes."""

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
        """What the peak may be."""
        return self.host_nbytes + self.growing_nbytes + ALLOWANCE

    @property
    def growing_nbytes(self) -> int:
        """The terms that depend on the model."""
        return self.blocks_nbytes + self.plain_nbytes


def block_parameters(model: str) -> int:
    """Return the parameters of one decoder block, or of an embedding if that is larger."""
    sizes = SHAPES[model]
    hidden = sizes["hidden_size"]
    block = 4 * hidden**2 + 3 * hidden * sizes["intermediate_size"] + 2 * hidden
    return max(block, sizes["vocab_size"] * hidden)


def rows_of(model: str, options: argparse.Namespace, folder: Path) -> list[Row]:
    """Measure the plain run's memory, then Infinity's with either update."""

    def run(kind: str, settings: dict[str, Any]) -> Measured:
        own = OWN if kind == "infinity" else replace(OWN, variables=_GIVES_BACK)
        return measure(own, kind, Model(model, options.tokens, options.steps), folder, settings)

    alone = run("forward_backward", {})
    rows = []
    for update, settings in UPDATES.items():
        one = run("infinity", {"host_memory": options.host_memory, **settings})
        rows.append(
            Row(
                model=model,
                update=update,
                parameters=one.parameters,
                peak_nbytes=one.peak_nbytes,
                build_peak_nbytes=one.build_peak_nbytes,
                host_nbytes=parse_size(options.host_memory),
                blocks_nbytes=3 * 4 * block_parameters(model),
                plain_nbytes=max(0, alone.train_peak_nbytes - 4 * alone.parameters),
                bytes_per_parameter=one.bytes_per_parameter,
            )
        )
    return rows


_GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(16 << 20)}


def growth(small: Row, large: Row) -> dict[str, float]:
    """Return what the larger model takes more, per further parameter: in all, and beyond the terms."""
    more, terms = large.peak_nbytes - small.peak_nbytes, large.growing_nbytes - small.growing_nbytes
    parameters = large.parameters - small.parameters
    return {"in_all": more / parameters, "beyond_terms": (more - terms) / parameters}


def table(rows: list[Row]) -> Table:
    """Lay the peaks beside their bounds."""
    lines = Table(title="Peak resident memory above the imports")
    for heading in ("parameters", "state", "peak", "of it building", "bound", "of it blocks", "of it plain"):
        lines.add_column(heading, justify="right")
    lines.add_column("B per parameter, step", justify="right")
    lines.add_column("update")
    for row in rows:
        lines.add_row(
            f"{row.parameters / 1e6:.1f} M",
            format_size(12 * row.parameters),
            format_size(row.peak_nbytes),
            format_size(row.build_peak_nbytes),
            format_size(row.bound_nbytes) + (" ✓" if row.peak_nbytes <= row.bound_nbytes else " exceeded"),
            format_size(row.blocks_nbytes),
            format_size(row.plain_nbytes),
            f"{row.bytes_per_parameter:.1f}",
            row.update,
        )
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Print the table and the growth, write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m infinity.bench.memory", description="Peak memory against its bound"
    )
    parser.add_argument("--nvme", type=Path, required=True, metavar="DIR", help="a folder on the disk")
    parser.add_argument(
        "--models", nargs=2, choices=SHAPES, default=["350m", "1.1b"], help="the smaller one first"
    )
    parser.add_argument("--host-memory", default="512MiB", metavar="SIZE")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    console = Console()
    with folder_on(options.nvme) as folder:
        facts = machine(folder)
        try:
            with console.status("building and training each model"):
                rows = [row for model in options.models for row in rows_of(model, options, folder)]
        except RunError as error:
            raise SystemExit(str(error)) from error
    grown = {small.update: growth(small, large) for small, large in zip(rows[:2], rows[2:], strict=True)}
    console.print(table(rows))
    for update, more in grown.items():
        console.print(
            f"update {update}: {more['in_all']:+.3f} B per further parameter in all, "
            f"{more['beyond_terms']:+.3f} B beyond the terms of the bound (limit {GROWTH_LIMIT})"
        )
    about = here()
    console.print(words(facts))
    console.print(words(about))
    if options.json:
        chosen = {key: getattr(options, key) for key in ("models", "host_memory", "tokens", "steps")}
        measured = [{**asdict(row), "bound_nbytes": row.bound_nbytes} for row in rows]
        record = {"about": about, "machine": facts, "options": chosen, "rows": measured, "growth": grown}
        save(options.json, record)


if __name__ == "__main__":
    main()

"""The bytes that a step reads and writes, counted by the kernel, against what the design allows.

    python -m infinity.bench.engine.traffic --nvme DIR --json bench/results/traffic-269m.json

There is one line for each dtype of the moments at a budget too small to keep anything, and one for exact
state at each budget that holds a fraction c of it: at most (1 - c) * 26 B per parameter. Half a byte is
allowed on top everywhere.
Time does not matter: this may run on a busy machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.engine.runs import OWN, SHAPES, STATE_DTYPES, Measured, Model, measure, settings_of
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.bench.targets import mark
from infinity.sizes import format_size

DESIGN = {"fp32": 26.0, "bf16": 18.0, "int8": 14.0, "int4": 12.0}
"""Bytes per parameter by the moments' dtype: hi is read twice, all fields are read and written once."""
ALLOWANCE = 0.5
"""Bytes per parameter: padding, scales of int8 blocks."""


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """One run: the state kept in memory, the bytes moved, and their limit."""

    state_dtype: str
    host_memory: str
    pinned: float
    """The fraction of the state that lies in host memory."""
    read_per_parameter: float
    written_per_parameter: float
    limit: float
    """Bytes per parameter per step, read and written."""

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes read and written per step."""
        return self.read_per_parameter + self.written_per_parameter

    @property
    def met(self) -> bool:
        """Whether the bytes are within the limit."""
        return self.bytes_per_parameter <= self.limit


def limit(state_dtype: str, pinned: float) -> float:
    """Return the limit of bytes per parameter for a step with a fraction of its state pinned."""
    return (1 - pinned) * DESIGN[state_dtype] + ALLOWANCE


def row_of(state_dtype: str, host_memory: str, run: Measured) -> TrafficRow:
    """Compare a run with its limit."""
    host, nvme = run.engine["host_nbytes"], run.engine["nvme_nbytes"]
    pinned = host / (host + nvme)
    moved = run.read_per_parameter, run.written_per_parameter
    return TrafficRow(state_dtype, host_memory, pinned, *moved, limit(state_dtype, pinned))


def findings_of(rows: Sequence[tuple[TrafficRow, Measured]], options: argparse.Namespace) -> Findings:
    """Show the bytes moved beside their limits; each row holds its run."""
    size = format_size(12 * rows[-1][1].parameters) if rows else "0 B"
    return Findings(
        title="NVMe traffic of a step, B per parameter",
        rows=[
            {**asdict(row), "moved": row.bytes_per_parameter, "met": row.met, "run": run} for row, run in rows
        ],
        columns=[
            Column("state_dtype", "state"),
            Column("host_memory", "host_memory"),
            Column("pinned", "pinned", "{:.2f}".format),
            Column("read_per_parameter", "read", "{:.2f}".format),
            Column("written_per_parameter", "written", "{:.2f}".format),
            Column("moved", "in all", "{:.2f}".format),
            Column("limit", "limit", "{:.2f}".format),
            Column("met", "", lambda met: mark(met=met)),
        ],
        verdicts=[f"{options.model}: {size} of exact state"],
        options=asked(options),
    )


def run_all(options: argparse.Namespace, folder: Path, console: Console) -> Findings:
    """Run each setting once."""
    model = Model(options.model, options.tokens, options.steps)
    settings = [(state, options.least) for state in options.state_dtype]
    settings += [(STATE_DTYPES[0], budget) for budget in options.budgets]
    rows = []
    for state, budget in settings:
        with console.status(f"{state} state, {budget}"):
            run = measure(OWN, "infinity", model, folder, settings_of(budget, state_dtype=state))
        rows.append((row_of(state, budget, run), run))
    return findings_of(rows, options)


def main(arguments: list[str] | None = None) -> None:
    """Run each setting once; print the table, write the record."""
    parser = command("engine.traffic", "NVMe bytes of a step against their limits")
    parser.add_argument("--model", choices=SHAPES, default="269m")
    parser.add_argument("--state-dtype", nargs="*", choices=STATE_DTYPES, default=list(STATE_DTYPES))
    parser.add_argument("--least", default="16MiB", metavar="SIZE", help="the budget that keeps nothing")
    budgets: dict[str, Any] = {"nargs": "*", "metavar": "SIZE", "default": ["512MiB", "1GiB", "2GiB"]}
    parser.add_argument("--budgets", **budgets, help="for exact state, of which they hold a part")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    run_command(parser, arguments, run_all)


if __name__ == "__main__":
    main()

"""The results of all benchmarks in one form: a table on the terminal, JSON, and a picture.

Values in the rows are in SI units (bytes, seconds, bytes per second); a `Column` says how to format them. The
conditions (machine, kernel, filesystem, torch, commit, date) are added to all three.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from infinity.bench.engine.runs import folder_on, here, machine, plain, words
from infinity.errors import ConfigError, InfinityError
from infinity.timeline import new_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOT_ASKED = {"command", "bench", "question", "run", "traceback", "nvme"}
"""Options that do not belong into a record: places on this machine, like all paths, and argparse's own."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table: its key in the rows, its heading, and the format of a value."""

    key: str
    heading: str
    show: Callable[[Any], str] = str


@dataclass(frozen=True, slots=True)
class Findings:
    """All results of a benchmark."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    """Values for JSON, in SI units. A row may hold keys without a column; a missing key is shown empty."""
    columns: Sequence[Column]
    verdicts: Sequence[str] = ()
    """Lines below the table: figures beside their limits, and facts about the measurement."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the measurement."""
    draw: Callable[[Axes], None] | None = None
    """Draws the picture; None if there is none."""


def gb_per_s(bytes_per_s: float) -> str:
    """Format a rate in decimal units: "2.31 GB/s"."""
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options for a record: all but NOT_ASKED and paths."""
    return {
        key: value
        for key, value in vars(options).items()
        if key not in NOT_ASKED and not isinstance(value, Path)
    }


def show(findings: Findings, console: Console, folder: Path | None = None) -> None:
    """Print the table, the verdicts and the conditions. folder: the folder on the measured disk, if any."""
    table = Table(title=findings.title)
    for column in findings.columns:
        values = [row.get(column.key) for row in findings.rows]
        texts = [value for value in values if isinstance(value, str)]
        table.add_column(column.heading, justify="left" if texts else "right", overflow="fold")
    for row in findings.rows:
        cells = ((column, row.get(column.key)) for column in findings.columns)
        table.add_row(*("" if value is None else column.show(value) for column, value in cells))
    _wide_enough(console, table).print(table, markup=False)
    for line in (*findings.verdicts, words(machine(folder)), words(here())):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _wide_enough(console: Console, table: Table) -> Console:
    """Return a console wide enough for whole cells: a file or a pipe has no width."""
    if console.is_terminal:
        return console
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    return Console(file=console.file, width=max(console.width, needed))


# A measurement as a command


def command(module: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of `python -m infinity.bench.` + module, with --nvme."""
    parser = argparse.ArgumentParser(prog=f"python -m infinity.bench.{module}", description=description)
    parser.add_argument("--nvme", type=Path, required=True, metavar="DIR", help="a folder on the disk")
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    measure: Callable[[argparse.Namespace, Path, Console], Findings],
) -> Findings:
    """Run a command that measures in a temporary folder below --nvme; show and write its findings.

    Raises: SystemExit with the text of an InfinityError.
    """
    add_outputs(parser, plots=False)
    options = parser.parse_args(arguments)
    console = Console()
    try:
        check_outputs(options)
        with folder_on(options.nvme) as folder:
            findings = measure(options, folder, console)
            report(findings, options, console, folder)
    except InfinityError as error:
        raise SystemExit(str(error)) from error
    return findings


def report(
    findings: Findings, options: argparse.Namespace, console: Console, folder: Path | None = None
) -> None:
    """Show the findings, and write the files that were asked for; `folder` as in `show`."""
    show(findings, console, folder)
    write(findings, options, folder)


# Files


def add_outputs(parser: argparse.ArgumentParser, *, plots: bool = True) -> None:
    """Add --json, and --plot if the command draws something."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured: a new *.json")
    if plots:
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: a new *.png")


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse files that could not be written, before anything is measured.

    Raises: ConfigError for an existing file, another ending, a folder that is missing or not writable, and
    a plot without matplotlib.
    """
    for flag, suffix in (("json", ".json"), ("plot", ".png")):
        path: Path | None = getattr(options, flag, None)
        if path is None:
            continue
        if path.suffix != suffix:
            raise ConfigError(f"--{flag} {path}: expected a name that ends in {suffix}")
        if path.exists():
            raise ConfigError(f"--{flag} {path} exists, and is never overwritten. Name another file.")
        if not path.parent.is_dir():
            raise ConfigError(
                f"--{flag} {path}: there is no folder {path.parent}. Make it, or name another one."
            )
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(f"--{flag} {path}: no right to write into {path.parent}. Name another folder.")
        if flag == "json" and (unfinished := unfinished_of(path)).exists():
            raise ConfigError(
                f"{unfinished} is of a run that has not ended. Wait for it; else move the file away."
            )
        if flag == "plot" and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(f"--plot {path} needs matplotlib: pip install matplotlib")


def unfinished_of(path: Path) -> Path:
    """Return the file in which `write_unfinished` keeps what --json `path` is to hold."""
    return path.with_suffix(".unfinished.json")


def write_unfinished(findings: Findings, options: argparse.Namespace, folder: Path) -> None:
    """Keep what was measured so far where a JSON was asked for, in the place of what this run kept before:
    an interrupt, or a contestant that fails, loses no round that is over. `write` removes it.

    Raises: OSError naming the file.
    """
    path: Path | None = getattr(options, "json", None)
    if path is not None:
        kept = unfinished_of(path)
        new = kept.with_suffix(".new")
        new.unlink(missing_ok=True)
        with _named(new) as file:
            file.write(_json(findings, _conditions(folder)))
        new.replace(kept)


def _conditions(folder: Path | None) -> dict[str, Mapping[str, Any]]:
    return {"about": here(), "machine": machine(folder)}


def _json(findings: Findings, conditions: Mapping[str, Mapping[str, Any]]) -> bytes:
    record = {
        "title": findings.title,
        **conditions,
        "options": findings.options,
        "verdicts": list(findings.verdicts),
        "rows": list(findings.rows),
    }
    return json.dumps(record, indent=1, default=plain).encode() + b"\n"


def write(findings: Findings, options: argparse.Namespace, folder: Path | None = None) -> None:
    """Write the files of --json and --plot, each whole or not at all; `folder` as in `show`.

    Raises: OSError naming the file, if it exists by now or cannot be written.
    """
    conditions = _conditions(folder)
    path: Path | None = getattr(options, "json", None)
    if path is not None:
        with _named(path) as file:
            file.write(_json(findings, conditions))
        unfinished_of(path).unlink(missing_ok=True)
    path = getattr(options, "plot", None)
    if path is not None:
        with _named(path) as file:
            _picture(findings, file, "\n".join(words(facts) for facts in conditions.values()))


@contextmanager
def _named(path: Path) -> Iterator[BinaryIO]:
    """Open a new file; errors of writing name it too."""
    try:
        with new_file(path) as file:
            yield file
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _picture(findings: Findings, file: BinaryIO, conditions: str) -> None:
    """Draw one PNG, with the conditions in small print below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if findings.draw is None:
        raise ConfigError("--plot: this command draws no picture. Leave --plot out.")
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    findings.draw(axes)
    figure.suptitle(findings.title)
    figure.supxlabel(conditions, fontsize=6, color="0.4")
    figure.savefig(file, format="png", dpi=120)

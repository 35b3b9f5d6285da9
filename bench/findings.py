"""What a benchmark found, in one shape for all of them: a table on the terminal, JSON, and a picture.

Values in the rows are in SI units (bytes, seconds, bytes per second); a `Column` says how they are drawn.
The conditions (machine, kernel, filesystem, torch, commit, date) are added here, to each of the three.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from infinity.bench.engine.runs import here, machine, words
from infinity.errors import ConfigError
from infinity.timeline import new_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOT_ASKED = {"command", "bench", "question", "run", "traceback", "nvme"}
"""Options that are no part of what was measured: places on this machine, as all paths are, and argparse's."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table: the key in the rows, its heading, and how a value is drawn."""

    key: str
    heading: str
    show: Callable[[Any], str] = str


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that a benchmark has to tell."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    """Ready for JSON, in SI units. A row may hold more than is drawn; a key it lacks is drawn as nothing."""
    columns: Sequence[Column]
    verdicts: Sequence[str] = ()
    """Each figure beside its limit, and plain sentences about what was measured."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What was asked for."""
    draw: Callable[[Axes], None] | None = None
    """Fills the picture; None where there is none."""


def gb_per_s(bytes_per_s: float) -> str:
    """Return a rate as people read it, in decimal units: "2.31 GB/s"."""
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that belong into a record: all but places and what argparse adds."""
    return {
        key: value
        for key, value in vars(options).items()
        if key not in NOT_ASKED and not isinstance(value, Path)
    }


def show(findings: Findings, console: Console, folder: Path | None = None) -> None:
    """Print the table, the verdicts, and the conditions; `folder` is where files were measured, if any."""
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
    """Return a console on which the table's cells are whole: a file or a pipe has no width."""
    if console.is_terminal:
        return console
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    return Console(file=console.file, width=max(console.width, needed))


# Files


def add_outputs(parser: argparse.ArgumentParser, *, plots: bool = True) -> None:
    """Offer --json, and --plot where the command draws something."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured: a new *.json")
    if plots:
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: a new *.png")


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse, before anything is measured, files that could not be written afterwards.

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
        if flag == "plot" and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(f"--plot {path} needs matplotlib: pip install matplotlib")


def write(findings: Findings, options: argparse.Namespace, folder: Path | None = None) -> None:
    """Write what --json and --plot name, each whole or not at all; `folder` as in `show`.

    Raises: OSError naming the file, where it exists by now or cannot be written.
    """
    conditions = {"about": here(), "machine": machine(folder)}
    path: Path | None = getattr(options, "json", None)
    if path is not None:
        record = {
            "title": findings.title,
            **conditions,
            "options": findings.options,
            "verdicts": list(findings.verdicts),
            "rows": list(findings.rows),
        }
        with _named(path) as file:
            file.write(json.dumps(record, indent=1, default=_plain).encode() + b"\n")
    path = getattr(options, "plot", None)
    if path is not None:
        with _named(path) as file:
            _picture(findings, file, "\n".join(words(facts) for facts in conditions.values()))


@contextmanager
def _named(path: Path) -> Iterator[BinaryIO]:
    """Open a new file; an error of writing names it, as one of opening does."""
    try:
        with new_file(path) as file:
            yield file
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} is not for a record")


def _picture(findings: Findings, file: BinaryIO, conditions: str) -> None:
    """Draw one PNG, with the conditions in small letters below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if findings.draw is None:
        raise ConfigError("this command draws nothing: leave --plot out")
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    findings.draw(axes)
    figure.suptitle(findings.title)
    figure.supxlabel(conditions, fontsize=6, color="0.4")
    figure.savefig(file, format="png", dpi=120)

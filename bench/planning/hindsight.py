"""`infinity plan compare`: forecasts beside the steps measured by `infinity bench step --json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from infinity.bench.engine.runs import SHAPES
from infinity.bench.findings import Column, Findings
from infinity.bench.planning.cores import Cores
from infinity.bench.planning.planned import split_of
from infinity.bench.planning.sketch import outline_of_shape
from infinity.bench.targets import Target
from infinity.errors import ConfigError
from infinity.planning.activations import Method
from infinity.planning.demand import demand
from infinity.planning.forecast import Forecast, forecast
from infinity.planning.lookups import in_blocks_of_rows
from infinity.planning.outline import timed
from infinity.planning.setting import Setting
from infinity.planning.simulator import Disk, Rates
from infinity.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LIMIT = 0.15
"""The error that a forecast may have, relative to the measured seconds."""

_SETTING = ("model", "tokens", "host_memory", "state_dtype", "update")
_NEEDED = (*_SETTING, "seconds", "compute_s", "own_disk", "cores")
_CORES = tuple(one.name for one in fields(Cores))


def foretell(row: Mapping[str, Any]) -> Forecast:
    """Forecast the step of a row of `infinity bench step`, from its setting and the figures around the run:
    the seconds of computing alone, the disk's bandwidths by our engine, and the speed of updates, hashes and
    copies. Nothing comes from the run itself.

    Raises: ConfigError for a model that is none of runs.SHAPES.
    """
    if row["model"] not in SHAPES:
        raise ConfigError(f"model {row['model']!r}: expected one of {', '.join(SHAPES)}")
    outline = outline_of_shape(row["model"])
    setting = Setting(
        host_nbytes=int(row["host_memory"]),
        state_dtype=row["state_dtype"],
        update=row["update"],
        method=Method(row["tokens"], row["tokens"]),
    )
    if row.get("embeddings") == "rows":  # older measurements are of whole embeddings
        outline = in_blocks_of_rows(outline, setting)
    need = demand(outline, setting)
    script = timed(outline.script(row["tokens"], row["tokens"]), row["compute_s"])
    disk = Disk(**{name: row["own_disk"][name] for name in ("read", "write", "mixed")})
    rates = Rates(disk, **row["cores"])
    split = split_of(need, script, rates)
    limits = need.limits if split is None else replace(need.limits, early=frozenset(split.early))
    return forecast(script, need.plan, need.units, limits, rates)


def check(files: Sequence[Path], console: Console) -> tuple[Findings, bool]:
    """Forecast every measured step of Infinity in some files; return the findings, and whether all errors are
    within `LIMIT`.

    Raises: ConfigError for a file without such steps; OSError.
    """
    rows = []
    for path in files:
        for row in _measured(path):
            with console.status(f"{path.name}: {row['model']}, {row['tokens']} tokens"):
                told = foretell(row)
            rows.append(
                {
                    **{name: row[name] for name in _NEEDED},
                    "name": path.stem,
                    "predicted_s": told.seconds,
                    "error": told.seconds / row["seconds"] - 1,
                    "predicted_nbytes": told.read_nbytes + told.written_nbytes,
                    "measured_nbytes": row.get("read_nbytes", 0) + row.get("written_nbytes", 0),
                    "bound": str(told.bound),
                }
            )
    worst = max(abs(row["error"]) for row in rows)
    target = Target("≤", LIMIT, f"|predicted / measured - 1|, the worst of {len(rows)}")
    return (
        Findings(
            title="Forecasts beside what was measured",
            rows=rows,
            columns=_columns(),
            verdicts=[target.verdict([worst])],
            draw=lambda axes: _draw(rows, axes),
        ),
        target.met(worst),
    )


def _measured(path: Path) -> list[Mapping[str, Any]]:
    """Return the rows of a file that are steps of Infinity and have all figures that a forecast needs."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        found = [row for row in rows if row.get("kind", "infinity") == "infinity"]
        usable = [row for row in found if all(row.get(name) is not None for name in _NEEDED)]
        usable = [row for row in usable if set(_CORES) <= set(row["cores"])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not what `infinity bench step --json` writes ({error})") from error
    if not usable:
        raise ConfigError(
            f"{path}: none of its {len(rows)} rows is a step of Infinity with {', '.join(_NEEDED)} "
            f"({', '.join(_CORES)}). Likely cause: an older `infinity bench step` wrote it. Measure anew."
        )
    return usable


def _columns() -> list[Column]:
    def seconds(value: float) -> str:
        return f"{value:.2f} s"

    return [
        Column("model", "model"),
        Column("tokens", "tokens"),
        Column("host_memory", "host memory", format_size),
        Column("state_dtype", "state"),
        Column("update", "update"),
        Column("compute_s", "compute", seconds),
        Column("measured_nbytes", "moved", format_size),
        Column("predicted_nbytes", "predicted", format_size),
        Column("seconds", "measured", seconds),
        Column("predicted_s", "predicted", seconds),
        Column("error", "off by", lambda error: f"{error:+.0%}"),
        Column("bound", "limited by"),
    ]


def _draw(rows: Sequence[Mapping[str, Any]], axes: Axes) -> None:
    most = 1.1 * max(max(row["seconds"], row["predicted_s"]) for row in rows)
    for factor, style in ((1, "-"), (1 - LIMIT, ":"), (1 + LIMIT, ":")):
        axes.plot([0, most], [0, factor * most], style, color="0.6")
    axes.plot([row["seconds"] for row in rows], [row["predicted_s"] for row in rows], "o")
    axes.set_xlabel("measured, s")
    axes.set_ylabel("predicted, s")

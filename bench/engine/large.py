"""A model many times larger than its memory, beside what `infinity plan check` said of it.

    infinity bench large --nvme DIR --json large.json
    infinity bench large --nvme DIR --model 7b --state-dtype int8

It takes 12 bytes of the disk for each parameter (with int8 moments 6), 45 GB for the model of 3.74 G
parameters, and the time of a few steps, some 45 s each on a drive of 2 GB/s. The plan is made before: it
measures the disk and the cores for some seconds, and knows nothing of the run.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.arguments import positive, size_of
from infinity.bench.engine.runs import (
    OWN,
    SETTLING,
    SHAPES,
    STATE_DTYPES,
    UPDATES,
    Measured,
    Model,
    folder_on,
    measure,
    settings_of,
)
from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, report
from infinity.bench.planning.plan import planned_of
from infinity.bench.planning.planned import Planned
from infinity.bench.targets import Target
from infinity.errors import ConfigError
from infinity.planning.capacity import HOST_MEMORY
from infinity.sizes import format_size, parse_size
from infinity.storage import disk_speed

HELP = "a model many times larger than its memory, beside what was planned of it"
LIMIT = 0.1
"""How far off the plan may be, of what was measured."""
MOVED = 26.5
"""Bytes per parameter and step of exact state, at most."""


@dataclass(frozen=True, slots=True)
class LargeRun:
    """What was measured, and what was planned."""

    model: str
    parameters: int
    state_nbytes: int
    """Of records, on NVMe."""
    host_nbytes: int
    seconds: float
    planned_s: float | None
    bytes_per_parameter: float
    planned_bytes_per_parameter: float
    peak_nbytes: int
    """Of all that the process has in memory, imports included."""
    planned_nbytes: int
    """Of host memory, with Python and torch, if the plan has measured these."""
    loss: float

    @property
    def error(self) -> float | None:
        """How far the plan's seconds are off; None where it knew none."""
        return None if self.planned_s is None else self.planned_s / self.seconds - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinity bench large`."""
    add = parser.add_argument
    add("--nvme", type=Path, default=Path(), metavar="DIR", help="a folder on the disk (this one)")
    add("--model", choices=SHAPES, default="3.74b", metavar="NAME", help=f"{', '.join(SHAPES)}; 3.74b")
    add("--host-memory", type=_size, default="2GiB", metavar="SIZE", help="Infinity's budget; 2GiB")
    add("--state-dtype", choices=STATE_DTYPES, default="fp32", help="of moments; fp32")
    add("--update", choices=UPDATES, default="backward", help="when weights change; backward")
    add("--tokens", type=positive, default=256, metavar="N", help="of a step's sequence; 256")
    add("--steps", type=positive, default=4, metavar="N", help=f"the first {SETTLING} are not counted; 4")
    add_outputs(parser, plots=False)


def _size(text: str) -> str:
    size_of(text)
    return text


def run(options: argparse.Namespace, console: Console) -> int:
    """Plan, train, and report; 1 where the plan was off by more than a tenth.

    Raises: ConfigError; RunError where the training fails; OSError.
    """
    check_outputs(options)
    if options.steps <= SETTLING:
        raise ConfigError(f"--steps {options.steps}: the first {SETTLING} are not counted. Ask for more.")
    with folder_on(options.nvme) as folder:
        disk_speed.measure(str(folder))  # a disk that others use is not as fast at all times
        planned = plan_of(options, folder, console)
        if not planned.fits:
            raise ConfigError(f"{options.model} does not fit: {'; '.join(planned.reasons)}")
        model = Model(options.model, options.tokens, options.steps)
        settings = settings_of(options.host_memory, options.update, options.state_dtype)
        with console.status(f"{options.steps} steps of {options.model}"):
            measured = measure(OWN, "infinity", model, folder, settings)
        found = beside(options, planned, measured)
        report(findings_of(found, options), options, console, folder)
    return 0 if found.error is not None and abs(found.error) <= LIMIT else 1


def plan_of(options: argparse.Namespace, folder: Path, console: Console) -> Planned:
    """Return the plan of the training, by measurements of this machine."""
    config = folder / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **SHAPES[options.model]}))
    arguments = ["--model", str(config), "--tokens", f"1x{options.tokens}", "--nvme", str(options.nvme)]
    arguments += ["--host-memory", options.host_memory, "--state-dtype", options.state_dtype]
    return planned_of([*arguments, "--update", UPDATES[options.update]["update"]], console)


def beside(options: argparse.Namespace, planned: Planned, measured: Measured) -> LargeRun:
    """Put what was measured beside what was planned."""
    need = planned.demand
    if need is None:
        raise ConfigError(planned.refusal)
    moved = need.read_nbytes + need.written_nbytes
    memory = next(one for one in planned.needs if one.what == HOST_MEMORY)
    return LargeRun(
        model=options.model,
        parameters=measured.parameters,
        state_nbytes=need.nvme_nbytes,
        host_nbytes=parse_size(options.host_memory),
        seconds=measured.seconds,
        planned_s=planned.step_s,
        bytes_per_parameter=measured.bytes_per_parameter,
        planned_bytes_per_parameter=moved / measured.parameters,
        peak_nbytes=measured.baseline_nbytes + measured.peak_nbytes,
        planned_nbytes=memory.nbytes,
        loss=measured.loss,
    )


def findings_of(found: LargeRun, options: argparse.Namespace) -> Findings:
    """Show it."""

    def seconds(value: float | None) -> str:
        return "not known" if value is None else f"{value:.1f} s"

    off = Target("≤", LIMIT, "|planned / measured - 1| of the seconds of a step")
    moved = Target("≤", MOVED, "bytes from and to the disk per parameter and step")
    verdicts = [off.verdict([abs(found.error)] if found.error is not None else [])]
    if options.state_dtype == STATE_DTYPES[0]:
        verdicts.append(moved.verdict([found.bytes_per_parameter]))
    row: dict[str, Any] = {**asdict(found), "error": found.error}
    return Findings(
        title=f"{found.parameters / 1e9:.2f} G parameters in {options.host_memory}",
        rows=[row],
        columns=[
            Column("model", "model"),
            Column("state_nbytes", "on NVMe", format_size),
            Column("seconds", "a step", seconds),
            Column("planned_s", "planned", seconds),
            Column("bytes_per_parameter", "B per parameter", "{:.1f}".format),
            Column("planned_bytes_per_parameter", "planned", "{:.1f}".format),
            Column("peak_nbytes", "peak of the process", format_size),
            Column("planned_nbytes", "planned", format_size),
            Column("loss", "loss", "{:.3f}".format),
        ],
        verdicts=verdicts,
        options=asked(options),
    )

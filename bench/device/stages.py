"""Runs the stages of `python3 dev.py gpu`: each a process of its own with a time limit, which stops no other.

    python -m infinity.bench.device.stages --out build/gpu --seconds 540

A stage is a line of gpu.jsonl, written as soon as it is over, a file of what it printed, and a row of the
table at the end. What a stage finds is the last line of JSON that it prints, or which of its tests have
failed: also where its time was over before its end, or the runner was interrupted. Whatever hangs or fails,
all ends within `--seconds`. The limits of all stages together are less, so that none is left out; what one
leaves, the next ones may use. A stage that no longer fits is listed as not run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LEAST_S = 5.0
"""Seconds left with which no stage is begun."""
_SAID_S = 5.0
"""Seconds that a stage has, of its time, to say what it has found when it is interrupted."""
_MARGIN_S = 3.0
"""Seconds kept for the end of the last process and the table."""
_PYTEST = (
    *("-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:benchmark", "--timeout", "90"),
    *("-m", "gpu and not slow"),
)
_FILES = (
    "tests/device/test_gpu.py",
    "tests/device/test_gpu_cases.py",
    "tests/device/test_gpu_features.py",
    "tests/records/test_tensor_steps.py",
    "tests/units/test_fused_updates.py",
)
_ALONE = "host_waits or beside_the_kernels or steady_state"
"""Tests that see what happens at the same time: no other runs beside them."""
_FAILED = re.compile(
    r"(?:^|\] )(?:FAILED|ERROR) (?P<name>tests/.*?)(?: - (?P<reason>.*))?$"
    r"|^(?P<late>tests/.*?) (?:FAILED|ERROR) +\["
)
"""A line of pytest's that names a test which has failed: as it ends, and in the summary."""
_PROBE = ("-m", "infinity.bench.device.probes")
_STEPS = ("-m", "infinity.bench.device.gpu", "--model", "8b", "--layers")
_PLAIN = "plain PyTorch"
_IN_MEMORY = (_PLAIN, "on the device", "in host memory")


def _workers() -> tuple[str, ...]:
    """What lets tests run side by side, where pytest-xdist is installed."""
    found = importlib.util.find_spec("xdist") is not None
    return ("-n", str(min(10, os.cpu_count() or 1)), "--dist=worksteal") * found


@dataclass(frozen=True, slots=True)
class GpuStage:
    """One measurement, or some tests: what Python is to run."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    """Seconds that are kept for it; it gets more, `most_s` at most, of what stages before it have left."""
    variables: Mapping[str, str] = field(default_factory=dict)
    more_s: float | None = None
    """Seconds beyond `limit_s`, at most; None: as many again."""

    @property
    def most_s(self) -> float:
        """Seconds that it gets at most."""
        return self.limit_s + (self.limit_s if self.more_s is None else self.more_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage went. status: "ok", "failed", "timed out" or "not run"; found: what it says."""

    stage: str
    status: str
    seconds: float
    found: Mapping[str, Any]
    last_line: str = ""
    """Of what it printed, where it found nothing."""


STAGES = (
    GpuStage("facts", (*_PROBE, "facts"), 15),
    GpuStage("tests", (*_PYTEST, *_workers(), *_FILES, "-k", f"not ({_ALONE})"), 110),
    GpuStage("steps", (*_STEPS, "8", "--tokens", "8192", "--only", *_IN_MEMORY), 100),
    GpuStage("ranks", (*_PYTEST, "tests/device/test_gpu_ranks.py"), 65),
    GpuStage("tests alone", (*_PYTEST, "tests/device/test_gpu.py", "-k", _ALONE), 45),
    GpuStage("link", (*_PROBE, "link"), 25),
    GpuStage("update rates", (*_PROBE, "updates"), 15),
    GpuStage("nccl", (*_PROBE, "nccl"), 15),
    GpuStage("pinning", (*_PROBE, "pinning"), 15),
    GpuStage("NVMe", (*_STEPS, "2", "--tokens", "8192", "--only", "on NVMe", _PLAIN), 55),
    GpuStage(
        "races",
        (*_PYTEST, *_workers(), _FILES[0], "-k", "equals_training and llama"),
        40,
        {"TORCH_CUDA_SANITIZER": "1"},
    ),
    GpuStage("tokens", (*_STEPS, "8", "--tokens", "2048", "--only", *_IN_MEMORY), 0, more_s=120),
)
"""In the order in which they run: what the next ones build on first. Limits of measurements are what they
took on an H100 (bench/results/gpu-h100.json), and a margin. The last one has what the others leave.
"""


def share_s(stage: GpuStage, later: Sequence[GpuStage], left_s: float) -> float:
    """Return for how many of the seconds left a stage may run, so that those `later` have their limits."""
    kept_s = sum(one.limit_s for one in later)
    return min(left_s, stage.most_s, max(stage.limit_s, left_s - kept_s))


def run_stage(stage: GpuStage, limit_s: float, out: Path) -> Outcome:
    """Run one stage for at most `limit_s`, and say how it went. It is interrupted a little before that, so
    that it says what it has found by then, and killed where it does not end.
    """
    if limit_s < LEAST_S:
        return Outcome(stage.name, "not run", 0.0, {})
    began, log = time.monotonic(), _log(stage, out)
    said_s = min(_SAID_S, limit_s / 4)
    with log.open("wb") as printed:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, *stage.command],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {"PYTHONUNBUFFERED": "1"}
            | dict(stage.variables),  # what ends keeps what it said
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s - said_s)
        except subprocess.TimeoutExpired:
            code = None
            _interrupt(process, said_s)
        finally:
            _end(process)
    found, last_line = said(_read(log))
    status = "timed out" if code is None else "failed" if code else "ok"
    return Outcome(stage.name, status, round(time.monotonic() - began, 1), found, last_line)


def _log(stage: GpuStage, out: Path) -> Path:
    """Return the file of what a stage prints."""
    return out / f"{stage.name.replace(' ', '-')}.log"


def _read(log: Path) -> str:
    """Return what was printed; nothing where no stage has begun to."""
    return log.read_text(errors="replace") if log.exists() else ""


def _interrupt(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Have a stage's process, and all that it has started, end by themselves within so many seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage's process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def said(text: str) -> tuple[dict[str, Any], str]:
    """Return the last JSON object that a stage printed on a line, or which of its tests have failed, with the
    reasons as far as it came to say them; and the last line of all.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last_line = lines[-1] if lines else ""
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found, last_line
    failed: dict[str, str] = {}
    for line in lines:
        if (one := _FAILED.search(line)) is not None:
            failed[one["name"] or one["late"]] = one["reason"] or ""
    return {"summary": last_line, "failed": failed} if failed else {}, last_line


def run_stages(
    stages: Sequence[GpuStage], seconds: float, out: Path, tell: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run stages one after the other within `seconds`; write each to gpu.jsonl in the folder `out`, and
    `tell` of it. On Ctrl-C or SIGTERM the stage that runs is ended, and the rest is not run.
    """
    out.mkdir(parents=True, exist_ok=True)
    ends, outcomes, stopped = time.monotonic() + seconds - _MARGIN_S, [], False
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with (out / "gpu.jsonl").open("a") as lines:
            for number, stage in enumerate(stages):
                left_s = 0.0 if stopped else ends - time.monotonic()
                try:
                    outcome = run_stage(stage, share_s(stage, stages[number + 1 :], left_s), out)
                except KeyboardInterrupt:
                    found, _ = said(_read(_log(stage, out)))
                    outcome, stopped = Outcome(stage.name, "timed out", 0.0, found, "interrupted"), True
                outcomes.append(outcome)
                lines.write(json.dumps(asdict(outcome)) + "\n")
                lines.flush()
                os.fsync(lines.fileno())
                tell(outcome)
    finally:
        signal.signal(signal.SIGTERM, before)
    return outcomes


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Return a row for each stage."""
    table = Table("stage", "status", "seconds", "found", title="GPU")
    for one in outcomes:
        table.add_row(one.stage, one.status, f"{one.seconds:.1f}", _summary(one))
    return table


def _summary(one: Outcome) -> str:
    found = one.found.get("summary", one.found)
    if isinstance(found, Mapping):
        found = ", ".join(f"{name} {value}" for name, value in found.items())
    return str(found) or one.last_line


def main(stages: Sequence[GpuStage] = STAGES) -> int:
    """Run the stages; 0 if all that ran went well and none was left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for what is found")
    parser.add_argument("--seconds", type=float, default=540.0, help="in which all of it ends")
    names = [stage.name for stage in stages]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STAGE", help=str(names))
    options = parser.parse_args()
    console = Console()

    def tell(outcome: Outcome) -> None:
        how = f"{outcome.stage}: {outcome.status}, {outcome.seconds:.1f} s: {_summary(outcome)}"
        failed = [f"    {name}: {why}" for name, why in outcome.found.get("failed", {}).items()]
        for line in (how, *failed):
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    chosen = [stage for stage in stages if stage.name in options.only]
    outcomes = run_stages(chosen, options.seconds, options.out, tell)
    console.print(table_of(outcomes))
    return 0 if all(one.status == "ok" for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The output of a run: a log line per step, a progress bar, a loss curve, and a closing table."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from infinity.engine.engine import Engine
from infinity.engine.stats import Stats, predicted_step_s
from infinity.planning.bottleneck import UNMEASURED, Bound, Load, Speed, bound
from infinity.planning.layout import RecordSchema
from infinity.sizes import format_size

SMOOTHED = 10
"""Steps in the moving average of the picture."""
LISTED_S = 0.05
RECENT = 20
"""Steps in the medians of the progress line."""
_STALLS = {
    "read": "waiting for reads",
    "slot": "waiting for slots to read through",
    "update": "waiting for updates",
    "gradients": "waiting for gradients to leave",
}
_LANE = {"read_wait": "reads awaited", "write_wait": "writes awaited", "inline": "in other threads"}


def state_nbytes(schema: RecordSchema, fields: Sequence[str] | None = None) -> int:
    """Return the bytes of state per parameter: of all the record's fields, or some, without the blocks'
    scales.
    """
    counted = [field for field in schema.fields if field != "scale" and (fields is None or field in fields)]
    return sum(schema.nbytes(field, 1) for field in counted)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step. The fields' names are the log's keys."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    """None where it was not computed."""
    seconds: float
    tokens_per_second: float
    nvme_read_nbytes: int
    nvme_written_nbytes: int
    rss_nbytes: int
    """Resident memory of the process, imports included."""
    budget_held_nbytes: int
    """Bytes of host_memory in use."""
    stall_s: float = 0.0
    """Seconds for which the computation waited."""
    eval_loss: float | None = None
    """The loss of the evaluation after this step, if there was one."""

    @property
    def nvme_nbytes(self) -> int:
        """Bytes read and written."""
        return self.nvme_read_nbytes + self.nvme_written_nbytes


class Meter:
    """The kernel's figures of the process: memory above a baseline, bytes read and written."""

    def __init__(self) -> None:
        """Take the baseline, after the imports."""
        self._process = psutil.Process()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
        self.baseline_nbytes = self.rss_nbytes()
        self.counts_io = self._io() is not None

    def rss_nbytes(self) -> int:
        """Resident memory now."""
        return int(self._process.memory_info().rss)

    def peak_nbytes(self) -> int:
        """The most resident memory since the meter was made, above the baseline."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return max(0, int(line.split()[1]) * 1024 - self.baseline_nbytes)
        return max(0, self.rss_nbytes() - self.baseline_nbytes)

    def io_nbytes(self, stats: Stats | None) -> tuple[int, int]:
        """Bytes (read from, written to) devices; the engine's own count where the kernel has none."""
        counted = self._io()
        if counted is not None:
            return counted
        return (stats.nvme_read_nbytes, stats.nvme_written_nbytes) if stats is not None else (0, 0)

    @staticmethod
    def _io() -> tuple[int, int] | None:
        try:
            lines = Path("/proc/self/io").read_text().splitlines()
        except OSError:
            return None
        counts = {key: int(value) for key, _, value in (line.partition(": ") for line in lines)}
        return counts["read_bytes"], counts["write_bytes"]


class StepLog:
    """A file of JSON lines, one per logged step, each flushed immediately."""

    def __init__(self, path: Path, every: int = 1) -> None:
        """Create the file.

        Raises: FileExistsError where there is one.
        """
        self._file = path.open("x", encoding="utf-8", buffering=1)
        self._every = every

    def write(self, step: StepReport) -> None:
        """Add a step; a number that is not finite becomes null, since JSON has no value for it."""
        if step.step % self._every and step.step != 1:
            return
        self._file.write(json.dumps({key: _finite(value) for key, value in asdict(step).items()}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Progress:
    """A progress bar on a terminal; elsewhere about twenty plain lines."""

    def __init__(self, steps: int, budget_nbytes: int | None, baseline_nbytes: int, done: int = 0) -> None:
        """Show `done` of `steps`: those that a resumed run made before."""
        tqdm.monitor_interval = 0  # its thread would outlive the run
        self._steps = steps
        self._budget = "" if budget_nbytes is None else f" of {format_size(budget_nbytes)}"
        self._baseline_nbytes = baseline_nbytes
        terminal = sys.stderr.isatty()
        self._bar: Any = None
        if terminal:
            self._bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True, leave=True)

    def show(self, step: StepReport, bound: Bound | None) -> None:
        """Show a completed step, and the run's bottleneck."""
        memory = format_size(max(0, step.rss_nbytes - self._baseline_nbytes))
        speed = (
            f"{step.tokens_per_second:.0f} tokens/s, NVMe {step.nvme_nbytes / step.seconds / 1e9:.2f} GB/s"
        )
        against = "" if bound is None else f", {bound}"
        evaluated = "" if step.eval_loss is None else f", evaluation {step.eval_loss:.3f}"
        held = f", host_memory {format_size(step.budget_held_nbytes)}{self._budget}" if self._budget else ""
        text = f"loss {step.loss:.3f}{evaluated}, {speed}{against}, process {memory}{held}"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif step.step in (1, self._steps) or step.step % max(1, self._steps // 20) == 0:
            sys.stderr.write(f"step {step.step}/{self._steps}: {text}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()


def plot_run(path: Path, run: Run, title: str, unit: str) -> str | None:
    """Draw loss, tokens per second and memory over the steps as a PNG.

    unit: of the loss, "byte" or "token". Returns: without matplotlib, a line that says so.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture of the loss: matplotlib is not installed (pip install matplotlib)"
    figure = Figure(figsize=(8, 9), layout="constrained")
    FigureCanvasAgg(figure)
    loss, speed, memory = figure.subplots(3, sharex=True, height_ratios=(2, 1, 1))
    steps = run.steps
    numbers, losses = [step.step for step in steps], [step.loss for step in steps]
    loss.plot(numbers, losses, marker="." if len(steps) < 80 else "", alpha=0.4, label="each step")
    loss.plot(numbers, _smooth(losses), label=f"mean of the last {SMOOTHED}")
    if evaluated := [(step.step, step.eval_loss) for step in steps if step.eval_loss is not None]:
        loss.plot(*zip(*evaluated, strict=True), marker="o", label="evaluation")
    loss.set(ylabel=f"loss (nats per {unit})", title=title)
    speed.plot(numbers, [step.tokens_per_second for step in steps], label=f"{unit}s per second")
    process = [max(0, step.rss_nbytes - run.baseline_nbytes) / 2**20 for step in steps]
    memory.plot(numbers, process, label="process, above imports (MiB)")
    if run.before is not None:
        held = [step.budget_held_nbytes / 2**20 for step in steps]
        memory.plot(numbers, held, label="host_memory in use (MiB)")
        memory.axhline(run.before.budget_nbytes / 2**20, linestyle="--", label="host_memory (MiB)")
    memory.set(xlabel="step")
    for axes in (loss, speed, memory):
        axes.legend()
        axes.grid(visible=True, alpha=0.3)
    for axes in (speed, memory):
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    return None


def _smooth(values: Sequence[float]) -> list[float]:
    """Return, for each value, the mean of it and the up to SMOOTHED - 1 before it."""
    return [statistics.fmean(values[max(0, at - SMOOTHED + 1) : at + 1]) for at in range(len(values))]


@dataclass(slots=True)
class Run:
    """The data of the closing table."""

    name: str
    parameters: int
    """Those that are trained."""
    state_nbytes: int = 12
    """Bytes of state per trained parameter."""
    frozen: int = 0
    """Parameters that are not trained."""
    frozen_nbytes: int = 4
    """Bytes of state per frozen parameter."""
    baseline_nbytes: int = 0
    """Memory of the imports."""
    steps: list[StepReport] = field(default_factory=list)
    peak_nbytes: int = 0
    """Memory above the imports."""
    counts_io: bool = True
    before: Stats | None = None
    """The engine's, when training began; None without one."""
    after: Stats | None = None
    speed: Speed | None = None
    """The disk's, if it was measured."""
    of_ranks: list[dict[str, float]] = field(default_factory=list)
    """Each of several ranks' `figures`."""

    def begin(self, before: Stats, speed: Speed | None) -> None:
        """Set what is known when training with an engine begins."""
        self.before, self.speed = before, speed

    def hear(self, of_ranks: list[dict[str, float]]) -> None:
        """Set each of several ranks' `figures`."""
        self.of_ranks = of_ranks

    def end(self, peak_nbytes: int, after: Stats | None) -> None:
        """Set what is known at the end of training; after: None without an engine, or if it is set."""
        self.peak_nbytes = peak_nbytes
        self.after = after or self.after

    @property
    def all_parameters(self) -> int:
        """The number of all parameters, trained or not."""
        return self.parameters + self.frozen

    @property
    def whole_state_nbytes(self) -> int:
        """Bytes of weights, masters and moments of all parameters."""
        return self.parameters * self.state_nbytes + self.frozen * self.frozen_nbytes

    @property
    def steady(self) -> list[StepReport]:
        """The steps after the first, in which no order is known and no moments exist."""
        return self.steps[1:] or self.steps

    def bound(self, last: int | None = None) -> Bound | None:
        """Return the bottleneck of the (`last`) steady steps; None without an engine, or a step."""
        if self.before is None or not self.steps:
            return None
        return bound(typical(self.steady[-last:] if last else self.steady), self.speed)

    def predict(self, engine: Engine, after: Stats) -> None:
        """Set the last snapshot, with the predicted time of a step, if the disk's speed is known."""
        self.after = after
        if self.before is None or self.speed is None or not self.steps:
            return
        load, done = typical(self.steady), after.since(self.before)
        self.after = replace(after, predicted_step_s=predicted_step_s(engine, load, done, self.speed))

    def table(self) -> Table:
        """Return the closing table."""
        table = Table(title=f"Infinity: {self.name}", show_header=False, title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, value in self.rows():
            table.add_row(name, escape(value))
        return table

    def rows(self) -> list[tuple[str, str]]:
        """Return the table's rows, as (what, value)."""
        return [*self._model(), *self._time(), *self._bound(), *self._engine(), *self._ranks()]

    def figures(self, peak_nbytes: int) -> dict[str, float]:
        """Return this rank's figures for rank 0's table."""
        median = statistics.median
        return {
            "peak_nbytes": peak_nbytes,
            "read_nbytes": median(step.nvme_read_nbytes for step in self.steady),
            "written_nbytes": median(step.nvme_written_nbytes for step in self.steady),
            "stall_s": median(step.stall_s for step in self.steady),
        }

    def _ranks(self) -> list[tuple[str, str]]:
        rows = [(f"rank {rank}", _of_rank(one)) for rank, one in enumerate(self.of_ranks)]
        if self.before is not None and self.after is not None and self.after.ranks > 1 and self.steps:
            done, steps = self.after.since(self.before), 1e6 * len(self.steps)
            moved = {kind: f"{nbytes / steps:,.1f} MB" for kind, nbytes in done.exchanged_nbytes.items()}
            shared = (
                f" ({done.shared_nbytes / steps:,.1f} MB in memory they share)" if done.shared_nbytes else ""
            )
            said = f"units {moved['gather']}{shared}, gradients {moved['reduce']}"
            rows.append(("exchanged by ranks per step", said))
        return rows

    def _model(self) -> list[tuple[str, str]]:
        state = self.whole_state_nbytes
        trained = f", {self.parameters / 1e6:,.1f} M trained" if self.frozen else ""
        each = f"{self.state_nbytes} B per parameter"
        each += f", {self.frozen_nbytes} B per frozen one" if self.frozen else ""
        used = format_size(self.peak_nbytes)
        if self.peak_nbytes < state:
            used += f", {self.peak_nbytes / state:.0%} of the state"
        if self.after is not None:
            used += f" (host_memory {format_size(self.after.budget_nbytes)}, and what computing takes)"
        return [
            ("parameters", f"{self.all_parameters / 1e6:,.1f} M{trained}"),
            ("state", f"{format_size(state)}: weights, masters and moments, {each}"),
            ("peak memory used", used),
        ]

    def _time(self) -> list[tuple[str, str]]:
        if not self.steps:
            return [("steps", "none")]
        seconds = sum(step.seconds for step in self.steps)
        median = statistics.median(step.seconds for step in self.steady)
        speed = statistics.median(step.tokens_per_second for step in self.steady)
        last = [step.loss for step in self.steps[-max(1, len(self.steps) // 10) :]]
        loss = (
            f"{self.steps[0].loss:.3f} at first, {statistics.fmean(last):.3f} at last (mean of {len(last)})"
        )
        evaluated = [step.eval_loss for step in self.steps if step.eval_loss is not None]
        rows = [("loss", loss)]
        if evaluated:
            rows.append(("evaluation", f"{evaluated[-1]:.3f} at last, {min(evaluated):.3f} at best"))
        return [
            *rows,
            ("steps", f"{len(self.steps)} in {seconds:.1f} s; median {median:.2f} s, {speed:.0f} tokens/s"),
        ]

    def _bound(self) -> list[tuple[str, str]]:
        found = self.bound()
        if found is None:
            return []
        load = typical(self.steady)
        if not found.limit:
            return [("bound", f"{found}; {UNMEASURED}" if load.nbytes else str(found))]
        floor_s = found.floor_share * load.seconds
        disk_s = found.disk_share * load.seconds
        parts = f"computing {load.compute_s:.2f} s, the disk {disk_s:.2f} s at its {found.limit} limit"
        floor = f"{floor_s:.2f} s ({parts}); the median step takes {load.seconds:.2f} s"
        return [("bound", str(found)), ("floor of a step", floor), *self._predicted(load)]

    def _predicted(self, load: Load) -> list[tuple[str, str]]:
        """Return the plan's predicted time beside the median step's."""
        predicted_s = None if self.after is None else self.after.predicted_step_s
        if not predicted_s:
            return []
        took = f"{load.seconds:.2f} s ({load.seconds / predicted_s - 1:+.0%})"
        return [("predicted step", f"{predicted_s:.2f} s by its plan; the median step takes {took}")]

    def _engine(self) -> list[tuple[str, str]]:
        if self.before is None or self.after is None:
            return []
        after, done = self.after, self.after.since(self.before)
        rows = [("I/O engine", after.io_engine), ("state on NVMe now", format_size(after.nvme_nbytes))]
        rows.append(("state in host memory now", format_size(after.host_nbytes)))
        if self.steps:
            rows += self._traffic()
            computing = sum(step.seconds for step in self.steps) - done.stall_s
            rows.append(("main thread", _seconds({"computing": computing, **done.stalls_s}, _STALLS)))
        rows.append(("record lane", _seconds(done.lane_s, _LANE)))
        counts = f"{done.hits:,} hits, {done.misses:,} misses, {done.divergences:,} out of the plan's order"
        rows.append(("uses of units", f"{counts}; {after.plans:,} plans"))
        often = done.frequency.values()
        if self.steps and often:
            rows.append(
                ("uses per step", f"{min(often):.1f} to {max(often):.1f} of each of {len(often):,} units")
            )
        return rows

    def _traffic(self) -> list[tuple[str, str]]:
        held = self.all_parameters / (self.after.ranks if self.after is not None else 1)
        read = statistics.median(step.nvme_read_nbytes for step in self.steady) / held
        written = statistics.median(step.nvme_written_nbytes for step in self.steady) / held
        rate = statistics.median(step.nvme_nbytes / step.seconds for step in self.steady) / 1e9
        source = "/proc/self/io" if self.counts_io else "the engine's own count"
        moved = f"{read + written:.1f} (read {read:.1f}, written {written:.1f}; median, by {source})"
        return [("NVMe bytes per parameter, step", moved), ("NVMe throughput", f"{rate:.2f} GB/s, median")]


def _of_rank(figures: Mapping[str, float]) -> str:
    read, written = (figures[name] / 1e6 for name in ("read_nbytes", "written_nbytes"))
    peak = format_size(int(figures["peak_nbytes"]))
    moved = f"a step reads {read:,.1f} MB, writes {written:,.1f} MB, waits {figures['stall_s']:.2f} s"
    return f"peak memory {peak}; {moved} (medians)"


def typical(steps: Sequence[StepReport]) -> Load:
    """Return the medians of some steps."""
    median = statistics.median
    return Load(
        seconds=median(step.seconds for step in steps),
        stall_s=median(step.stall_s for step in steps),
        read_nbytes=median(step.nvme_read_nbytes for step in steps),
        written_nbytes=median(step.nvme_written_nbytes for step in steps),
    )


def _seconds(spent: Mapping[str, float], names: Mapping[str, str]) -> str:
    """List seconds, under the names in `names` where it has any; without those that round to 0."""
    listed = [
        f"{names.get(name, name)} {seconds:.1f} s" for name, seconds in spent.items() if seconds >= LISTED_S
    ]
    return ", ".join(listed) or f"less than {LISTED_S} s"

"""The CPU kernels, beside the memory bandwidth in the same run, and beside torch's AdamW.

    infinity bench adam --rounds 25 --json adam.json --plot adam.png

A row is one kernel with one instruction set on some threads. Its *limit* is the time in which the same
threads
move the same bytes: the kernel's own fields, each read, updated or only written as by the kernel, with almost
no arithmetic. The fields lie in memory as training holds records, in huge pages if the machine provides them.
(It may provide them for one field and not for another, so kernel and limit use the same memory.) All rows are
timed in turn, in rounds, and the result is the median over the rounds of limit over kernel. GB/s and
parameters/s are those of the best round, which other users of the machine disturbed least. A ratio above 1
means that the limit's own loop was slower.

Bytes are those that must be moved. Kernels whose stores go through the caches also read the lines that they
overwrite, which is not counted: split, join, widen, narrow and dequantize. sum_squares and the hash are bound
by arithmetic; the hash runs on one thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import torch
from rich.console import Console
from rich.progress import Progress

from infinity import kernels
from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, gb_per_s, report
from infinity.bench.kernels.recipes import (
    BESIDE,
    BLOCK,
    SPLIT,
    FieldStream,
    Memory,
    Operation,
    other_steps,
    others,
    steps,
    torchs,
)
from infinity.bench.targets import Target
from infinity.errors import ConfigError
from infinity.kernels.library import MAX_THREADS, ffi, library
from infinity.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HELP = "how fast the CPU kernels are, beside the memory's limit and torch's AdamW"

ISAS = ("avx512", "avx2", "scalar")
LEAST_NBYTES = 64 << 20
"""Bytes moved in a timing, at least: smaller records are processed several times."""
SETTLE_S = 0.02  # torch's OpenMP threads spin after their work and would slow the next timing
LEAST_ROUNDS = 3
"""With fewer rounds there is no verdict: the median of one or two timings is random."""
NBYTES = 56
"""Bytes of memory per parameter: 32 for recipes.Memory, 20 for torch's two contestants, 4 to make them."""
LIMIT = 0.9
GAIN = 1.8


@dataclass(slots=True)
class Timing:
    """One row: seconds of the operation and of its limit, one per round."""

    operation: Operation
    isa: str
    threads: int
    numel: int
    seconds: list[float] = field(default_factory=list)
    limit_seconds: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Limit over kernel, by round."""
        return [limit / own for limit, own in zip(self.limit_seconds, self.seconds, strict=True)]

    @property
    def parameters_per_s(self) -> float:
        """Parameters per second in the best round."""
        return self.numel / min(self.seconds)

    def record(self) -> dict[str, Any]:
        """Return the row for table and JSON."""
        nbytes = self.operation.bytes_per_parameter
        return {
            "operation": self.operation.name,
            "gradient": self.operation.gradient,
            "isa": self.isa,
            "threads": self.threads,
            "parameters": self.numel,
            "bytes_per_parameter": nbytes,
            "parameters_per_s": self.parameters_per_s,
            "bytes_per_s": nbytes * self.parameters_per_s,
            "limit_bytes_per_s": nbytes * self.numel / min(self.limit_seconds),
            "of_limit": statistics.median(self.ratios),
            "of_limit_best": min(self.limit_seconds) / min(self.seconds),
            "seconds": self.seconds,
            "limit_seconds": self.limit_seconds,
        }


# Timing


def timed(call: Callable[[], object], times: int) -> float:
    """Return the mean seconds of `times` calls in a row, after one that does not count.

    STREAM leaves its first call out too: threads wake up, and the clock adapts, above all to wide registers.
    """
    time.sleep(SETTLE_S)
    call()
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def limit(streams: tuple[FieldStream, ...], numel: int) -> Callable[[], object]:
    """Return a call that moves the bytes of these streams. Updated fields keep their values, others get 0."""
    described = [(ffi.cast("void *", one.address), one.nbytes, one.kind) for one in streams]
    array = ffi.new("struct infinity_stream[]", described)
    return lambda: library.infinity_traffic(numel, len(described), array)


def one_round(timings: Sequence[Timing], best: str, *, keep: bool) -> None:
    """Time every row once, right after its limit."""
    for streams in dict.fromkeys(timing.operation.streams for timing in timings):
        rows = [timing for timing in timings if timing.operation.streams == streams]
        times = max(1, round(LEAST_NBYTES / rows[0].operation.bytes_per_parameter / rows[0].numel))
        kernels.set_isa(best)
        bound = timed(limit(streams, rows[0].numel), times)
        for row in rows:
            kernels.set_isa(row.isa or best)
            seconds = timed(row.operation.call, times)
            if keep:
                row.seconds.append(seconds)
                row.limit_seconds.append(bound)


def measured(
    operations: Sequence[Operation], numel: int, threads: int, rounds: int, step: Callable[[], object]
) -> list[Timing]:
    """Time all operations on some threads, in `rounds` rounds after one to warm up."""
    kernels.set_threads(threads)
    torch.set_num_threads(threads)
    best = available()[0]
    timings = [
        Timing(operation, isa, threads, numel)
        for operation in operations
        if operation.on(threads)
        for isa in operation.isas or ("",)
    ]
    for count in range(rounds + 1):
        one_round(timings, best, keep=count > 0)
        step()
    return timings


@contextmanager
def settings_kept() -> Iterator[None]:
    """Context that restores the instruction set and the numbers of threads, also torch's."""
    isa, ours, theirs = kernels.isa(), kernels.threads(), torch.get_num_threads()
    try:
        yield
    finally:
        kernels.set_isa(isa)
        kernels.set_threads(ours)
        torch.set_num_threads(theirs)


def available() -> tuple[str, ...]:
    """Return the instruction sets of this machine and build, best first."""
    with settings_kept():
        return tuple(isa for isa in ISAS if _has(isa))


def _has(isa: str) -> bool:
    try:
        kernels.set_isa(isa)
    except kernels.UnsupportedIsaError:
        return False
    return True


# Results


def verdicts(timings: Sequence[Timing]) -> list[str]:
    """Return a line for each recipe beside its limit, and one beside torch, on the most threads."""
    most = max(timing.threads for timing in timings)
    last = [timing for timing in timings if timing.threads == most]
    lines = []
    recipes = dict.fromkeys(
        (timing.operation.name, timing.operation.gradient) for timing in last if timing.operation.is_step
    )
    for name, gradient in recipes:
        own = _fastest(last, name, gradient)
        target = Target("≥", LIMIT, f"of the memory limit: {name}, {gradient} gradient, {own.isa}")
        lines.append(f"{target.verdict(own.ratios)} (best {own.record()['of_limit_best']:.2f})")
    ours, theirs = _fastest(last, SPLIT, "bf16"), _fastest(last, BESIDE, "bf16")
    gains = [theirs_s / ours_s for theirs_s, ours_s in zip(theirs.seconds, ours.seconds, strict=True)]
    target = Target("≥", GAIN, f"times the parameters/s of {BESIDE}")
    return [*lines, f"{target.verdict(gains)} (best {min(theirs.seconds) / min(ours.seconds):.2f})"]


def _fastest(timings: Sequence[Timing], name: str, gradient: str) -> Timing:
    """Return the row of an operation with the fastest instruction set."""
    rows = [row for row in timings if row.operation.name == name and row.operation.gradient == gradient]
    return min(rows, key=lambda row: min(row.seconds))


def findings(timings: Sequence[Timing], options: argparse.Namespace) -> Findings:
    """Return the table, verdicts and picture."""
    rows = [timing.record() for timing in timings]
    columns = (
        Column("operation", "operation"),
        Column("gradient", "gradient"),
        Column("isa", "instructions"),
        Column("threads", "threads"),
        Column("bytes_per_parameter", "B/param", lambda value: f"{value:.4g}"),
        Column("parameters_per_s", "Mparam/s", lambda value: f"{value / 1e6:.0f}"),
        Column("bytes_per_s", "best", gb_per_s),
        Column("limit_bytes_per_s", "limit", gb_per_s),
        Column("of_limit", "of limit, median", lambda value: f"{value:.2f}"),
        Column("of_limit_best", "of limit, best", lambda value: f"{value:.2f}"),
    )
    title = f"CPU kernels on {options.numel / 1e6:.3g} M parameters, {options.rounds} rounds"
    few = f"No verdicts: a median takes at least {LEAST_ROUNDS} rounds."
    said = [few] if options.rounds < LEAST_ROUNDS else verdicts(timings)
    return Findings(title, rows, columns, said, asked(options), lambda axes: _draw(axes, rows))


def _draw(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    most = max(row["threads"] for row in rows)
    shown = [row for row in rows if row["threads"] == most][::-1]
    names = [" ".join(filter(None, (row["operation"], row["gradient"], row["isa"]))) for row in shown]
    axes.barh(names, [row["limit_bytes_per_s"] / 1e9 for row in shown], color="0.85", label="limit")
    axes.barh(names, [row["bytes_per_s"] / 1e9 for row in shown], height=0.4, label="reached")
    axes.set_xlabel(f"GB/s, {most} threads, best round")
    axes.tick_params(axis="y", labelsize=6)
    axes.legend(loc="lower right")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinity bench adam`."""
    numel = (
        f"parameters, whole blocks of {BLOCK}: far more than the caches hold, or few, to time tiles in caches"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--numel", type=int, default=1 << 24, metavar="N", help=f"{numel} (16,777,216)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="timings of every row (15)")
    threads = "threads of kernels and of torch (1 and all cores)"
    parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, cores}), metavar="N", help=threads
    )
    isa = "instruction sets to time (all there are)"
    parser.add_argument("--isa", nargs="+", choices=ISAS, default=list(available()), help=isa)
    add_outputs(parser)


def check(options: argparse.Namespace) -> None:
    """Refuse options that cannot be measured. Raises: ConfigError."""
    if options.numel < BLOCK or options.numel % BLOCK:
        raise ConfigError(f"--numel {options.numel}: expected a multiple of {BLOCK}, at least {BLOCK}")
    needed, available_nbytes = NBYTES * options.numel, psutil.virtual_memory().available
    if needed > available_nbytes:
        raise ConfigError(
            f"--numel {options.numel}: takes {format_size(needed)} of memory, {NBYTES} B per parameter, and "
            f"{format_size(available_nbytes)} are available. Give a smaller --numel."
        )
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}: expected at least 1")
    if not all(1 <= count <= MAX_THREADS for count in options.threads):
        raise ConfigError(f"--threads {options.threads}: expected 1 to {MAX_THREADS}")
    missing = sorted(set(options.isa) - set(available()))
    if missing:
        raise ConfigError(f"--isa {missing}: this machine or build has {', '.join(available())}")
    check_outputs(options)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure, report. Raises: ConfigError for options that cannot be meant."""
    check(options)
    best = available()[0]
    chosen = tuple(isa for isa in ISAS if isa in options.isa)
    timings: list[Timing] = []
    with console.status("taking memory"):
        memory = Memory.of(options.numel)
        operations = [
            *steps(memory, chosen),
            *other_steps(memory, chosen[0]),
            *torchs(options.numel),
            *others(memory, best),
        ]
    with settings_kept(), Progress(console=console, disable=not console.is_terminal) as progress:
        for threads in options.threads:
            name = f"{threads} thread{'s' * (threads > 1)}"
            task = progress.add_task(name, total=options.rounds + 1)

            def advance(task: Any = task) -> None:
                progress.advance(task)

            timings += measured(operations, options.numel, threads, options.rounds, advance)
            if not console.is_terminal:
                console.print(f"{name}: measured")
    found = findings(timings, options)
    report(found, options, console)
    return 0

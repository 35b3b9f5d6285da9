"""`infinity bench copy`: bandwidth between host memory and a CUDA device, alone and beside NVMe reads.

    infinity bench copy --nvme DIR --json copy.json

Measures pinned and pageable memory, each direction and both at once, for several sizes; and all of these
again while the NVMe drive fills pinned memory, as in training. The limit beside each figure is the best rate
of that direction with pinned memory in the same run; for both at once, the sum of the two. Not run on a GPU
yet.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from rich.console import Console

from infinity import aio
from infinity.aio.measure import READ, WRITE, Moved, RequestStream, move
from infinity.bench.arguments import some_size
from infinity.bench.engine.runs import folder_on
from infinity.bench.findings import (
    Column,
    Findings,
    add_outputs,
    asked,
    check_outputs,
    gb_per_s,
    report,
)
from infinity.bench.places import file_nbytes
from infinity.device.device import open_device
from infinity.errors import UnsupportedError
from infinity.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HELP = "copies between host memory and a CUDA device, both ways at once and beside NVMe"
UP, DOWN = "to device", "to host"
WAYS: dict[str, tuple[str, ...]] = {UP: (UP,), DOWN: (DOWN,), "both at once": (UP, DOWN)}
BATCH_NBYTES = 256 << 20
"""Bytes copied between two waits for the device, at least: a wait costs as much as a small copy."""
_BUSY = RequestStream(READ, 4 << 20, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinity bench copy`."""
    add = parser.add_argument
    add("--nvme", type=Path, default=Path(), metavar="DIR", help="a folder on the drive to read (this one)")
    sizes = [64 << 10, 1 << 20, 16 << 20, 256 << 20]
    add("--size", nargs="+", type=some_size, default=sizes, metavar="SIZE", help="of a copy; 64KiB to 256MiB")
    add("--seconds", type=float, default=0.5, metavar="S", help="of each measurement; 0.5")
    file = "of the file to read, at most a quarter of what is free; 1GiB"
    add("--file-size", type=some_size, default=1 << 30, metavar="SIZE", help=file)
    add_outputs(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure, and report.

    Raises: UnsupportedError without a CUDA device; OSError, of a full disk for example.
    """
    check_outputs(options)
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "no CUDA device is visible, and this measures copies to one: torch.cuda.is_available() has to be "
            "true. Check the driver, and whether this torch was built with CUDA."
        )
    with folder_on(options.nvme) as folder:
        with console.status("copying"), nvme_reads(folder, options.file_size, pin) as busy:
            rows = measured(CudaLink, options.size, options.seconds, busy, console)
        alone = statistics.median(row["nvme_bytes_per_s"] for row in rows if row["way"] == "NVMe alone")
        findings = findings_of(rows, alone, options)
        report(findings, options, console, folder)
    return 0


# Copies


class CopyLink(Protocol):
    """Makes copies of one size, from and to memory of one kind."""

    def start(self, direction: str) -> None:
        """Begin a copy; copies in different directions may run at once."""

    def wait(self) -> None:
        """Wait until all copies are over."""


class CudaLink:
    """Plain torch copies, each direction on a stream of its own."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        pairs = {
            direction: (
                torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).fill_(1),
                torch.zeros(nbytes, dtype=torch.uint8, device="cuda"),
            )
            for direction in (UP, DOWN)
        }
        (above, device), (below, other) = pairs[UP], pairs[DOWN]
        self._copies = {UP: (device, above), DOWN: (below, other)}
        self._streams = {direction: torch.cuda.Stream() for direction in pairs}
        torch.cuda.synchronize()

    def start(self, direction: str) -> None:
        """Queue a copy."""
        into, source = self._copies[direction]
        with torch.cuda.stream(self._streams[direction]):
            into.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Wait for both streams."""
        torch.cuda.synchronize()


def rate(
    link: CopyLink,
    directions: Sequence[str],
    nbytes: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the bytes per second of `link`, all directions added: the median over batches but the first.

    nbytes: of one copy.
    """
    copies = -(-BATCH_NBYTES // (nbytes * len(directions)))
    rates: list[float] = []
    ends_s = None
    while ends_s is None or clock() < ends_s or not rates:
        began_s = clock()
        for _ in range(copies):
            for direction in directions:
                link.start(direction)
        link.wait()
        now_s = clock()
        if ends_s is None:
            ends_s = now_s + seconds
        else:
            rates.append(copies * len(directions) * nbytes / (now_s - began_s))
    return statistics.median(rates)


# NVMe reads beside the copies


@contextmanager
def pin(memory: aio.AlignedMemory) -> Iterator[None]:
    """Page-lock memory, as training does with the buffers that NVMe reads into."""
    with closing(open_device("cuda")) as device:
        device.pin(memory.address, len(memory))
        try:
            yield
        finally:
            device.unpin(memory.address)


@contextmanager
def nvme_reads(
    folder: Path, nbytes: int, pinned: Callable[[aio.AlignedMemory], Any]
) -> Iterator[Callable[[float], Moved]]:
    """Yield a function that reads from the drive of `folder` for some seconds, into memory that is `pinned`.

    It reads a nameless file of `nbytes`, or of a quarter of the free space if that is less, written first.

    Raises: aio.StorageFullError for too little space; aio.IoError.
    """
    nbytes = file_nbytes(folder, nbytes, _BUSY.request_nbytes)
    memory = _BUSY.memory()
    with aio.open_engine(str(folder)) as engine, engine.open_nameless(str(folder)) as file, pinned(memory):
        file.allocate(0, nbytes)
        filling = RequestStream(WRITE, _BUSY.request_nbytes, _BUSY.in_flight)
        move(engine, file, memory, filling, nbytes, seconds=float("inf"), at_most=nbytes)
        yield lambda seconds: move(engine, file, memory, _BUSY, nbytes, seconds=seconds)


def measured(
    link_of: Callable[..., CopyLink],
    sizes: Sequence[int],
    seconds: float,
    busy: Callable[[float], Moved],
    console: Console,
) -> list[dict[str, Any]]:
    """Return a row for each kind of memory, size and way, alone and beside NVMe, and one for NVMe alone.

    link_of: makes the link for (nbytes, pinned=...). busy: reads from the drive for some seconds.
    """
    alone = busy(seconds)
    rows: list[dict[str, Any]] = [{"way": "NVMe alone", "nvme_bytes_per_s": alone.nbytes / alone.wall_s}]
    with ThreadPoolExecutor(1) as pool:
        for pinned in (True, False):
            kind = "pinned" if pinned else "pageable"
            for nbytes in sizes:
                link = link_of(nbytes, pinned=pinned)
                for way, directions in WAYS.items():
                    row = {"memory": kind, "nbytes": nbytes, "way": way}
                    rows.append({**row, "bytes_per_s": rate(link, directions, nbytes, seconds)})
                    reading = pool.submit(busy, seconds)
                    carried = rate(link, directions, nbytes, seconds)
                    read = reading.result()
                    beside = {"bytes_per_s": carried, "nvme_bytes_per_s": read.nbytes / read.wall_s}
                    rows.append({**row, **beside})
                done = f"{format_size(nbytes)} {kind}: {rows[-2]['bytes_per_s'] / 1e9:.2f} GB/s both ways"
                console.print(done, highlight=False)
    return beside_limits(rows)


def beside_limits(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the link's limit beside each rate, and NVMe's rate beside its rate alone."""
    plain = [row for row in rows if row.get("memory") == "pinned" and "nvme_bytes_per_s" not in row]
    best = {
        direction: max((row["bytes_per_s"] for row in plain if row["way"] == direction), default=0.0)
        for direction in (UP, DOWN)
    }
    nvme = next((row["nvme_bytes_per_s"] for row in rows if row["way"] == "NVMe alone"), 0.0)
    found = []
    for row in rows:
        limit = sum(best[direction] for direction in WAYS.get(row["way"], ()))
        more: dict[str, float] = {}
        if limit:
            more |= {"limit_bytes_per_s": limit, "share": row["bytes_per_s"] / limit}
        if nvme and "nvme_bytes_per_s" in row:
            more["nvme_share"] = row["nvme_bytes_per_s"] / nvme
        found.append({**row, **more})
    return found


# What was found


def findings_of(rows: Sequence[Mapping[str, Any]], nvme: float, options: argparse.Namespace) -> Findings:
    """Return the findings. nvme: bytes per second of NVMe reads alone."""
    return Findings(
        title=f"Copies between host memory and {torch.cuda.get_device_name()}",
        rows=rows,
        columns=[
            Column("memory", "memory"),
            Column("nbytes", "size", format_size),
            Column("way", "way"),
            Column("bytes_per_s", "copies", gb_per_s),
            Column("share", "of the link", "{:.0%}".format),
            Column("nvme_bytes_per_s", "NVMe reads beside", gb_per_s),
            Column("nvme_share", "of NVMe alone", "{:.0%}".format),
        ],
        verdicts=[
            f"the link: the best of one direction with pinned memory; NVMe reads alone: {gb_per_s(nvme)}",
            f"CUDA {torch.version.cuda}",
        ],
        options=asked(options),
        draw=lambda axes: draw(axes, rows),
    )


def draw(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw rates over sizes: a line for each kind of memory and way, dashed beside NVMe."""
    lines: dict[tuple[str, str, bool], list[tuple[int, float]]] = {}
    for row in rows:
        if "nbytes" in row:
            key = row["memory"], row["way"], "nvme_bytes_per_s" in row
            lines.setdefault(key, []).append((row["nbytes"], row["bytes_per_s"] / 1e9))
    for number, ((memory, way, beside), points) in enumerate(lines.items()):
        label = f"{memory}, {way}{', beside NVMe' if beside else ''}"
        style = "--" if beside else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", color=f"C{number // 2}", label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="bytes of a copy", ylabel="GB/s")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=6)

"""The speed of a disk as a program sees it: `infinity bench io --nvme DIR`.

A cell of the grid is a verb, a request size, the size of the pieces that requests are cut into, the pieces
and requests in flight, and an engine. Each round measures all cells for a moment, one after another, and
every other round goes backwards. Because a disk's speed drifts, only measurements of the same round are
compared; results are medians over the rounds, also of ratios. Files have no name, their blocks are written
once before the first measurement, and peers work on the same blocks.

Buffers lie in huge pages, as in training, also fio's (by a setting of its C library); `--small-pages` uses
4 KiB pages for all.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from infinity import aio
from infinity.aio.measure import MIXED, READ, WRITE
from infinity.bench.aio.cells import (
    Cell,
    Samples,
    best,
    cells_of,
    counterparts,
    cpu_ratios,
    cpu_time,
    folders_of,
    measure,
    rate,
    ratios,
    thriftiest,
)
from infinity.bench.aio.peers import (
    PEERS,
    PERCENTILES,
    Ours,
    Workload,
    opened,
    peers,
)
from infinity.bench.arguments import size_of
from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, gb_per_s, report
from infinity.bench.places import check_apart, check_folder, shared
from infinity.bench.targets import Target
from infinity.errors import ConfigError
from infinity.sizes import BLOCK, format_size
from infinity.storage import disk_speed as disk

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HELP = "bandwidth, latency and CPU time of a disk, by sizes, depths and engines, beside fio and libaio"

VERBS = (READ, WRITE, MIXED)
ENGINES = ("io_uring", *(f"io_uring:{ring}" for ring in aio.RINGS), "threads", "buffered")
DEFAULTS: Mapping[str, Sequence[Any]] = {
    "verb": VERBS,
    "engine": ("io_uring", "threads"),
    "request": (4 << 20, 16 << 20),
    "piece": (256 << 10, 1 << 20),
    "depth": (8, 32),
    "in_flight": (0,),
}
FULL: Mapping[str, Sequence[Any]] = {
    "verb": VERBS,
    "engine": ENGINES,
    "request": (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20),
    "piece": (256 << 10, 1 << 20, 4 << 20),
    "depth": (1, 4, 8, 16, 32, 64),
    "in_flight": (0, 1),
}
TARGETS = {"io_uring": 0.97, "threads": 0.9}
"""The part of a peer's best bandwidth that our engine must reach."""
_MOST_DEPTH, _MOST_PIECE, _TUNABLE_DEPTH = 4096, 1 << 30, 256
_USABLE = 0.9  # part of the free space that files may take


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add = parser.add_argument
    nvme = "a folder on the disk to measure; repeated: each alone, then all at once"
    add("--nvme", metavar="DIR", action="append", required=True, help=nvme)
    add("--verb", nargs="+", choices=VERBS, help="operations (all three; mixed: half reads, half writes)")
    add("--engine", nargs="+", choices=ENGINES, metavar="NAME", help=f"some of {', '.join(ENGINES)}")
    peer = "measure this program too, on the same file, and show the ratios; may be repeated"
    add("--peer", action="append", choices=PEERS, default=[], help=peer)
    tune = "store each engine's best depth and piece size for these folders' disks, for training"
    add("--tune", action="store_true", help=tune)
    add_outputs(parser)
    add = parser.add_argument_group("advanced").add_argument
    add("--size", type=size_of, default=1 << 30, metavar="SIZE", help="of the file in each folder (1GiB)")
    add("--seconds", type=float, default=0.4, metavar="S", help="per cell and round (0.4)")
    add("--rounds", type=int, default=3, metavar="N", help="each measures every cell once (3)")
    add("--request", nargs="+", type=size_of, metavar="SIZE", help="whole blocks of 4096 B (4MiB 16MiB)")
    add(
        "--piece",
        nargs="+",
        type=size_of,
        metavar="SIZE",
        help="size that requests are cut into (256KiB 1MiB)",
    )
    add("--depth", nargs="+", type=int, metavar="N", help="pieces in flight (8 32)")
    in_flight = "requests in flight; 0: enough to keep the depth full (0)"
    add("--in-flight", nargs="+", type=int, metavar="N", help=in_flight)
    add("--full", action="store_true", help="a large grid for the dimensions that are not given: takes long")
    add(
        "--small-pages",
        action="store_true",
        help="buffers in 4 KiB pages, instead of huge pages as in training",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure, show the results, and write the files that were asked for.

    Raises: ConfigError for settings that cannot work; aio.StorageFullError; aio.EngineUnavailableError if no
    engine works; RunError of a peer.
    """
    check_outputs(options)
    grid = grid_of(options)
    check(options, grid)
    if options.tune:
        _check_cache()
    huge = not options.small_pages
    others = [
        peer for name in dict.fromkeys(options.peer) for peer in peers(name, options.nvme[0], huge=huge)
    ]
    movers, notes = available([Ours.of(name, huge=huge) for name in grid["engine"]], options)
    cells = list(cells_of(grid, movers, others, len(options.nvme)))
    seconds = len(cells) * options.rounds * options.seconds
    console.print(
        f"{len(cells)} cells, {options.rounds} rounds: about {math.ceil(seconds)} s", highlight=False
    )
    with ExitStack() as stack:
        with console.status(f"writing {format_size(options.size)} into each folder"):
            places = [stack.enter_context(opened(folder, options.size)) for folder in options.nvme]
        if not places[0].direct.direct:
            notes.append("O_DIRECT does not work here: these are figures of the page cache, not of a disk.")
        samples = measure(cells, places, options, console)
    verdicts = [*verdicts_of(samples), *notes, *shared(options.nvme)]
    if options.tune:
        verdicts += [
            line for index in range(len(places)) for line in tune(index, places[index].folder, samples)
        ]
    findings = Findings(
        title="Medians of the rounds; latencies of a request",
        rows=[row_of(cell, samples) for cell in samples],
        columns=columns_of(samples),
        verdicts=verdicts,
        options={**asked(options), **grid},
        draw=lambda axes: draw(axes, samples),
    )
    report(findings, options, console, Path(options.nvme[0]))
    return 0


# What is measured


def grid_of(options: argparse.Namespace) -> dict[str, Sequence[Any]]:
    """Return the values of each dimension: those given, else the default or full ones."""
    preset = FULL if options.full else DEFAULTS
    return {name: getattr(options, name) or values for name, values in preset.items()}


def check(options: argparse.Namespace, grid: Mapping[str, Sequence[Any]]) -> None:
    """Refuse cells that cannot be measured, before anything is written.

    Raises: ConfigError with the numbers.
    """
    most_request = options.size // (2 if MIXED in grid["verb"] else 1)
    for name, most in (("request", most_request), ("piece", _MOST_PIECE)):
        for nbytes in grid[name]:
            if nbytes < BLOCK or nbytes % BLOCK:
                raise ConfigError(
                    f"--{name} {nbytes}: O_DIRECT moves whole blocks of {BLOCK} B, at least one"
                )
            if nbytes > most:
                limit = f"--{name} {format_size(nbytes)} is more than {format_size(most)}"
                half = ", half of it for mixed" if MIXED in grid["verb"] else ""
                raise ConfigError(
                    f"{limit}: the file (--size{half}) holds no such request, or no engine does"
                )
    for name, values, least, greatest in (
        ("depth", grid["depth"], 1, _MOST_DEPTH),
        ("in-flight", grid["in_flight"], 0, _MOST_DEPTH),
        ("rounds", [options.rounds], 1, 1000),
        ("seconds", [options.seconds], 0.01, 3600),
    ):
        if wrong := [value for value in values if not least <= value <= greatest]:
            raise ConfigError(f"--{name} {wrong[0]}: expected a number from {least} to {greatest}")
    if options.tune and not (set(VERBS) <= set(grid["verb"]) and set(TARGETS) & set(grid["engine"])):
        raise ConfigError("--tune compares reads, writes and both of io_uring or threads: leave --verb out")
    for folder in options.nvme:
        check_folder(folder)
    check_apart(options.nvme)
    _check_room(options.nvme, options.size)


def _check_cache() -> None:
    """Refuse --tune if its result could not be stored. Raises: ConfigError."""
    try:
        disk.check_cache()
    except OSError as error:
        raise ConfigError(
            f"--tune stores its result in a cache: {error}. Set INFINITY_CACHE to a writable folder."
        ) from error


def _check_room(folders: Sequence[str], nbytes: int) -> None:
    """Refuse files that would fill a filesystem; folders on the same filesystem share its space."""
    devices = [os.stat(folder).st_dev for folder in folders]
    for folder, device in zip(folders, devices, strict=True):
        status = os.statvfs(folder)
        free, wanted = status.f_bavail * status.f_frsize, devices.count(device) * nbytes
        if wanted > _USABLE * free:
            raise ConfigError(
                f"{folder}: --size {format_size(nbytes)} per folder needs {format_size(wanted)}, "
                f"and {format_size(free)} are free, a tenth of which is left alone. "
                "Give a smaller --size, or free some space."
            )


def available(movers: Sequence[Ours], options: argparse.Namespace) -> tuple[list[Ours], list[str]]:
    """Return the engines that work in all folders, and a line for each that does not.

    Raises: aio.EngineUnavailableError for an engine that was named, or if none works.
    """
    working, refusals = [], []
    for mover in movers:
        try:
            for folder in options.nvme:
                mover.engine(folder, Workload(READ, BLOCK, BLOCK, 1, 1)).close()
            working.append(mover)
        except aio.EngineUnavailableError as error:
            refusals.append(error)
            if options.engine:
                raise
    if not working:
        raise refusals[-1]
    return working, [f"not measured: {error}" for error in refusals]


# What was found


def row_of(cell: Cell, samples: Samples) -> dict[str, Any]:
    """Return one row of the table, including the samples of all rounds."""
    own, work = samples[cell], cell.work
    row = {
        "folders": folders_of(cell),
        "verb": work.verb,
        "engine": cell.mover.name,
        "request_nbytes": work.request_nbytes,
        "piece_nbytes": work.piece_nbytes,
        "depth": work.depth,
        "in_flight": work.in_flight,
        "bytes_per_s": rate(own),
        "cpu_s_per_gb": cpu_time(own),
        "rounds": own,
    }
    for name in PERCENTILES:
        row[f"{name}_s"] = statistics.median(sample.latency_s[name] for sample in own)
    if isinstance(cell.mover, Ours):
        for name, theirs in counterparts(cell, samples):
            row[f"to {name}"] = statistics.median(ratios(own, theirs))
    return row


def columns_of(samples: Samples) -> list[Column]:
    """Return the columns: folders only if there are several, and a ratio for each peer."""
    folders = [Column("folders", "folders")] if len({cell.places for cell in samples}) > 1 else []
    others = dict.fromkeys(cell.mover.name for cell in samples if not isinstance(cell.mover, Ours))
    return [
        *folders,
        Column("verb", "verb"),
        Column("engine", "engine"),
        Column("request_nbytes", "request", format_size),
        Column("piece_nbytes", "piece", format_size),
        Column("depth", "depth"),
        Column("in_flight", "requests"),
        Column("bytes_per_s", "rate", gb_per_s),
        *(Column(f"{name}_s", f"{name}, ms", lambda value: f"{1e3 * value:.2f}") for name in PERCENTILES),
        Column("cpu_s_per_gb", "CPU s/GB", "{:.4f}".format),
        *(Column(f"to {name}", f"/ {name}", "{:.2f}".format) for name in others),
    ]


def verdicts_of(samples: Samples) -> Iterator[str]:
    """Yield a line per engine, verb, folder and peer: our best cell beside the peer's best."""
    others = {cell.mover.name for cell in samples if not isinstance(cell.mover, Ours)}
    alone = sorted({cell.places for cell in samples if len(cell.places) == 1})
    for places, verb, (engine, limit) in itertools.product(alone, VERBS, TARGETS.items()):
        own = best(samples, verb, [engine], places)
        where = f"{engine}, {verb}, folder {places[0] + 1}" if len(alone) > 1 else f"{engine}, {verb}"
        for peer in PEERS:
            names = [name for name in others if name.split()[0] == peer]
            if own and (theirs := best(samples, verb, names, places)):
                yield Target("≥", limit, f"of {peer}'s best, {where}").verdict(ratios(own, theirs))
            ring = f"{peer} io_uring"
            ours, its = (thriftiest(samples, verb, name, places) for name in (engine, ring))
            if ours and its and engine == "io_uring":
                times = cpu_ratios(ours, its)
                few = f"CPU time per GB beside {ring}, {where}: {ring} counted none in so short a time"
                target = Target("≤", 1, f"of the CPU time per GB of {ring}, {where}")
                yield target.verdict(times) if times else few


def tune(index: int, folder: str, samples: Samples) -> Iterator[str]:
    """Store the best setting of each engine for a folder's disk; yield a line about each.

    Raises: OSError if the cache cannot be written.
    """
    for kind in TARGETS:
        rates: dict[str, dict[tuple[int, int], float]] = {verb: {} for verb in VERBS}
        for cell, own in samples.items():
            work = cell.work
            if cell.mover.name == kind and cell.places == (index,) and work.depth <= _TUNABLE_DEPTH:
                place = (work.depth, work.piece_nbytes)
                rates[work.verb][place] = max(rate(own), rates[work.verb].get(place, 0.0))
        if not rates[MIXED]:
            continue
        mixed, depth, piece_nbytes = disk.best(rates[MIXED])
        read, written = (rates[verb][depth, piece_nbytes] for verb in (READ, WRITE))
        disk.keep(folder, disk.DiskSpeed(read, written, mixed, depth, piece_nbytes, kind, disk.today()))
        setting = f"{depth} pieces of {format_size(piece_nbytes)} in flight, {gb_per_s(mixed)} mixed"
        yield f"kept for training in {folder}, {kind}: {setting}"


def draw(axes: Axes, samples: Samples) -> None:
    """Draw the best rate at each depth: a colour per engine, a line style per verb."""
    names = list(dict.fromkeys(cell.mover.name for cell in samples))
    for (number, name), (verb, style) in itertools.product(
        enumerate(names), zip(VERBS, ("-", "--", ":"), strict=True)
    ):
        found: dict[int, float] = {}
        for cell, own in samples.items():
            if (cell.mover.name, cell.work.verb, cell.places) == (name, verb, (0,)):
                found[cell.work.depth] = max(rate(own) / 1e9, found.get(cell.work.depth, 0.0))
        if found:
            depths = sorted(found)
            values = [found[depth] for depth in depths]
            axes.plot(depths, values, style, color=f"C{number}", marker="o", label=f"{verb}, {name}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("pieces in flight")
    axes.set_ylabel("GB/s")
    axes.legend(fontsize=7)

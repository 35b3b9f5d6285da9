"""The cells of `infinity bench io`: the grid, the rounds of measurements, and comparisons."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress

from infinity.bench.aio.peers import MOST_THREADS, MeasuredFile, Measurement, Mover, Ours, Workload
from infinity.bench.findings import gb_per_s
from infinity.sizes import format_size

AS_GOOD = 0.95
"""A rate of at least this part of the best counts as equal to it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid: an engine or peer, its workload, and the folders."""

    mover: Mover
    work: Workload
    places: tuple[int, ...]
    """Folders by their number on the command line, all used at once."""


Samples = Mapping[Cell, list[Measurement]]
"""One sample per round."""


def requests_for(nbytes: int, request: int) -> int:
    """Return how many requests keep `nbytes` in flight and twice as many waiting, so that the engine never
    runs out of work, even if the submitting thread sleeps.
    """
    return max(3 * (nbytes // request), nbytes // request + 2)


def cells_of(
    grid: Mapping[str, Sequence[Any]], movers: Sequence[Ours], others: Sequence[Mover], folders: int
) -> Iterator[Cell]:
    """Yield the cells, each once, with those to be compared next to each other; peers get one folder each."""
    sets = [(index,) for index in range(folders)] + ([tuple(range(folders))] if folders > 1 else [])
    dimensions = [grid[name] for name in ("verb", "request", "piece", "depth", "in_flight")]
    seen: set[Cell] = set()
    for places, (verb, request, piece_most, depth, asked_in_flight) in itertools.product(
        sets, itertools.product(*dimensions)
    ):
        piece = min(piece_most, request)
        in_flight = asked_in_flight or requests_for(depth * piece, request)
        work = Workload(verb, request, piece, depth, in_flight)
        fewer = Workload(verb, request, piece, min(depth, MOST_THREADS), in_flight)
        block, blocks = work.block_nbytes, work.peers_depth
        theirs = Workload(verb, block, block, blocks, blocks)
        cells = [Cell(mover, work if mover.kind == "io_uring" else fewer, places) for mover in movers]
        if len(places) == 1:
            cells += [Cell(other, theirs, places) for other in others]
        yield from (cell for cell in cells if cell not in seen)
        seen.update(cells)


def measure(
    cells: Sequence[Cell], places: Sequence[MeasuredFile], options: argparse.Namespace, console: Console
) -> Samples:
    """Measure all cells once per round, every other round in reverse order, so that drift favours no cell."""
    samples: dict[Cell, list[Measurement]] = {cell: [] for cell in cells}
    # Refreshed between cells only: a drawing thread would add to the CPU time that is measured.
    with Progress(console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=len(cells) * options.rounds)
        for number in range(options.rounds):
            for cell in cells if number % 2 == 0 else reversed(cells):
                progress.update(task, description=f"round {number + 1}: {cell.work.verb}, {cell.mover.name}")
                progress.refresh()
                chosen = [places[index] for index in cell.places]
                samples[cell].append(cell.mover.measure(chosen, cell.work, options.seconds))
                progress.advance(task)
                if not console.is_terminal and number == options.rounds - 1:
                    console.print(f"{label(cell)}: {gb_per_s(rate(samples[cell]))}", highlight=False)
    return samples


def rate(samples: Sequence[Measurement]) -> float:
    """Return the median of the rounds, in bytes per second."""
    return statistics.median(sample.bytes_per_s for sample in samples)


def cpu_time(samples: Sequence[Measurement]) -> float:
    """Return the median of the rounds, in seconds per 10⁹ bytes."""
    return statistics.median(sample.cpu_s_per_gb for sample in samples)


def label(cell: Cell) -> str:
    """Describe a cell in one line."""
    work = cell.work
    sizes = f"{format_size(work.request_nbytes)} in {format_size(work.piece_nbytes)}"
    return f"{work.verb}, {cell.mover.name}, {sizes}, {work.depth} deep, folder {folders_of(cell)}"


def folders_of(cell: Cell) -> str:
    """Name a cell's folders by number: "1", or "1+2"."""
    return "+".join(str(index + 1) for index in cell.places)


def counterparts(cell: Cell, samples: Samples) -> Iterator[tuple[str, list[Measurement]]]:
    """Yield (name, samples) of the peers with the same workload on the same blocks."""
    work = cell.work
    same = (work.verb, work.block_nbytes, work.peers_depth, cell.places)
    for other, theirs in samples.items():
        its = other.work
        if (
            not isinstance(other.mover, Ours)
            and (its.verb, its.request_nbytes, its.depth, other.places) == same
        ):
            yield other.mover.name, theirs


def ratios(ours: Sequence[Measurement], theirs: Sequence[Measurement]) -> list[float]:
    """Return our rate over theirs, round by round."""
    return [one.bytes_per_s / other.bytes_per_s for one, other in zip(ours, theirs, strict=True)]


def cpu_ratios(ours: Sequence[Measurement], theirs: Sequence[Measurement]) -> list[float]:
    """Return our CPU time per byte over theirs, for the rounds in which theirs is above 0."""
    pairs = zip(ours, theirs, strict=True)
    return [one.cpu_s_per_gb / other.cpu_s_per_gb for one, other in pairs if other.cpu_s_per_gb > 0]


def best(samples: Samples, verb: str, names: Sequence[str], places: tuple[int, ...]) -> list[Measurement]:
    """Return the samples of the fastest cell of these movers; empty if nothing was measured."""
    return max(of_movers(samples, verb, names, places), key=rate, default=[])


def thriftiest(samples: Samples, verb: str, name: str, places: tuple[int, ...]) -> list[Measurement]:
    """Return the samples of a mover's cell with the least CPU time per GB, of those as fast as its best."""
    own = of_movers(samples, verb, [name], places)
    most = max(map(rate, own), default=0.0)
    return min((one for one in own if rate(one) >= AS_GOOD * most), key=cpu_time, default=[])


def of_movers(
    samples: Samples, verb: str, names: Sequence[str], places: tuple[int, ...]
) -> list[list[Measurement]]:
    """Return the samples of each cell of these movers."""
    return [
        own
        for cell, own in samples.items()
        if cell.work.verb == verb and cell.mover.name in names and cell.places == places
    ]

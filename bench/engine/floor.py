"""The floor of a step, T* = max(compute, R/B_read, W/B_write, (R+W)/B_mixed), and the disk's part of it, B.

compute is the time of the same model's forward and backward alone, in memory, with the same tokens: *it does
not include the update's kernel*, nor any other work of offloading. R and W are the bytes that the run itself
read and wrote per step. B is measured right before and right after that run and averaged, because a disk's
speed drifts.

[Note: two measures of one disk] fio is not part of Infinity, so T* by fio's bandwidths is an independent
limit. Its buffers lie in huge pages, as those of training do: in small ones, as it is installed, it is half
as fast, and no limit. Infinity's own engine stands beside it, set as in training: T* by its bandwidths is
what a run could have reached, and the basis of forecasts. Both measure the same blocks of the same file, one
after the other. Without fio, the floor uses our own engine.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from infinity import aio
from infinity.aio.measure import MIXED, READ, WRITE, RequestStream, move
from infinity.bench.aio.fio import FILE, Bandwidth, Fio, mean, read_percent
from infinity.bench.engine.runs import Measured
from infinity.bench.places import file_nbytes
from infinity.bench.planning.cores import Cores
from infinity.sizes import format_size
from infinity.storage import disk_speed as disk

_REQUEST_NBYTES = 2 << 20
"""A moment of a full tile in fp32: the largest request of training."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The least seconds of each part of a step, if it ran alone."""

    compute: float
    read: float
    write: float
    mixed: float

    @property
    def floor_s(self) -> float:
        """T*: with perfect overlap, a step takes as long as its slowest part."""
        return max(self.compute, self.read, self.write, self.mixed)

    @property
    def binding(self) -> str:
        """The name of the slowest part."""
        parts = asdict(self)
        return max(parts, key=lambda name: float(parts[name]))


def terms(compute_s: float, read_nbytes: float, written_nbytes: float, speed: Bandwidth | None) -> Terms:
    """Return the terms of T* for a step with this computing time and these bytes.

    speed: None if the disk cannot be measured; then only computing counts.
    """
    if speed is None:
        return Terms(compute_s, 0, 0, 0)
    return Terms(
        compute=compute_s,
        read=read_nbytes / speed.read,
        write=written_nbytes / speed.write,
        mixed=(read_nbytes + written_nbytes) / speed.mixed,
    )


# The disk


@dataclass(frozen=True, slots=True)
class Speeds:
    """A disk's bandwidths at one moment, as measured by fio and by our engine; None: not measured."""

    fio: Bandwidth | None = None
    own: Bandwidth | None = None
    """By Infinity's engine, set as in training."""


class Gauge(Protocol):
    """Measures one folder's disk repeatedly."""

    @property
    def source(self) -> str:
        """Describe how it measures, in a few words."""

    def measure(self, percent: int) -> Speeds:
        """Measure the bandwidths; `percent` of the mixed bytes are reads."""


@dataclass(frozen=True, slots=True)
class Own:
    """Infinity's engine over one existing file, with the depth and piece size of training."""

    path: Path
    nbytes: int
    seconds: float
    """Of each of the three measurements."""
    speed: disk.DiskSpeed

    @classmethod
    def on(cls, folder: Path, nbytes: int, seconds: float) -> Own:
        """Write the file in `folder`.

        Raises: aio.StorageFullError, aio.EngineUnavailableError, aio.IoError.
        """
        speed = disk.speed_of(str(folder))
        with _opened(folder, speed) as engine, engine.create_named(str(folder), FILE) as file:
            file.allocate(0, nbytes)
            fill = RequestStream(WRITE, _REQUEST_NBYTES, _in_flight(speed))
            move(engine, file, fill.memory(), fill, nbytes, seconds=math.inf, at_most=nbytes)
        return cls(folder / FILE, nbytes, seconds, speed)

    def measure(self, percent: int) -> Bandwidth:
        """Measure the disk's bandwidths; `percent` of the mixed bytes are reads."""
        folder, rates = self.path.parent, []
        with _opened(folder, self.speed) as engine, engine.open_named(str(folder), self.path.name) as file:
            memory = RequestStream(MIXED, _REQUEST_NBYTES, _in_flight(self.speed)).memory()
            for verb in (READ, WRITE, MIXED):
                stream = RequestStream(verb, _REQUEST_NBYTES, _in_flight(self.speed), read_percent=percent)
                moved = move(engine, file, memory, stream, self.nbytes, seconds=self.seconds)
                rates.append(moved.nbytes / moved.wall_s)
        return Bandwidth(*rates)


def _opened(folder: Path, speed: disk.DiskSpeed) -> aio.IoEngine:
    depth, piece_nbytes = speed.depth, speed.piece_nbytes
    return aio.open_engine(str(folder), speed.engine, depth=depth, threads=depth, piece_nbytes=piece_nbytes)


def _in_flight(speed: disk.DiskSpeed) -> int:
    """Return how many requests keep the engine's depth full, with as many waiting."""
    return 2 * -(-speed.depth * speed.piece_nbytes // _REQUEST_NBYTES)


@dataclass(frozen=True, slots=True)
class Measuring:
    """Infinity's engine, and fio if it is installed; see [Note: two measures of one disk]."""

    own: Own
    fio: Fio | None = None

    @property
    def source(self) -> str:
        """Describe both."""
        speed, size = self.own.speed, format_size(self.own.nbytes)
        requests = (
            f"requests of {format_size(_REQUEST_NBYTES)} in {speed.depth} x {format_size(speed.piece_nbytes)}"
        )
        own = f"our engine: {speed.engine}, {requests}"
        fio = f"fio in huge pages, {self.fio.engine}, 32 x 1.0 MiB" if self.fio else "fio is not installed"
        return f"{fio}; {own}; O_DIRECT, the same {size}, the run's own mix"

    def measure(self, percent: int) -> Speeds:
        """Measure the three bandwidths with each."""
        fio = None if self.fio is None else self.fio.measure(percent)
        return Speeds(fio, self.own.measure(percent))


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """No gauge: without O_DIRECT only the page cache could be measured."""

    source: str = "not measured (O_DIRECT does not work in that folder): T* is computing alone"

    def measure(self, percent: int) -> Speeds:
        """Return no figures."""
        return Speeds()


def gauge_on(folder: Path, nbytes: int, seconds: int) -> Gauge:
    """Return a gauge for the disk of `folder`: our own engine, and fio if it is installed.

    Both share a file of `nbytes`, or of a quarter of the free space if that is less, and take `seconds` for
    each of three bandwidths.

    Raises: aio.StorageFullError for too little space; RunError if fio fails.
    """
    with aio.open_engine(str(folder)) as engine:
        kind = engine.kind
    if kind == "buffered":
        return Unmeasured()
    nbytes = file_nbytes(folder, nbytes, 1 << 20)
    own = Own.on(folder, nbytes, seconds)
    return Measuring(own, None if shutil.which("fio") is None else Fio.on(folder, nbytes, seconds))


# A step beside its floor


@dataclass(frozen=True, slots=True)
class Round:
    """One run of a contestant, with the figures of the disk, the cores and computing alone around it."""

    run: Measured
    compute_s: float
    before: Speeds = Speeds()
    after: Speeds = Speeds()
    cores: Cores | None = None
    """The cores' speed right before it; None for contestants other than Infinity."""

    @property
    def disk(self) -> Bandwidth | None:
        """The bandwidths for the floor, around this run: fio's, or ours if it is not installed."""
        return _around(self.before.fio, self.after.fio) or self.own_disk

    @property
    def own_disk(self) -> Bandwidth | None:
        """The bandwidths of our own engine, around this run."""
        return _around(self.before.own, self.after.own)

    @property
    def terms(self) -> Terms:
        """The terms of this round's floor."""
        return terms(self.compute_s, self.run.read_nbytes, self.run.written_nbytes, self.disk)

    @property
    def ratio(self) -> float:
        """The floor over the step: at 1 only moving fewer bytes could make it faster."""
        return self.terms.floor_s / self.run.seconds

    @property
    def own_floor_s(self) -> float:
        """The floor by our own engine's bandwidths, which was attainable."""
        return terms(self.compute_s, self.run.read_nbytes, self.run.written_nbytes, self.own_disk).floor_s

    @property
    def own_ratio(self) -> float:
        """That floor over the step."""
        return self.own_floor_s / self.run.seconds


def _around(before: Bandwidth | None, after: Bandwidth | None) -> Bandwidth | None:
    return None if before is None or after is None else mean(before, after)


def mix(rounds: Sequence[Round]) -> int:
    """Return the percentage of reads to measure with: the last run's, or at first the design's."""
    if not rounds:
        return read_percent(0, 0)
    return read_percent(rounds[-1].run.read_nbytes, rounds[-1].run.written_nbytes)

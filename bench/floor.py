"""The floor of a step, T* = max(compute, R/B_read, W/B_write, (R+W)/B_mixed), and the disk's part of it, B.

compute is the same model's forward and backward alone, in memory, at the same tokens: *the update's kernel is
not counted in it*, nor is anything else that offloading does. R and W are the bytes that the run itself read
and wrote per step. B is measured right before and right after that run and averaged, because a disk's speed
drifts: by fio, which is no part of Infinity, or, where it is not installed, as Infinity does for itself.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from infinity import aio, disk
from infinity.bench.fio import Bandwidth, Fio, mean, read_percent
from infinity.bench.runs import Measured

LEAST_NBYTES = 32 << 20
"""Of the file to measure with: less would measure a drive's own memory."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The seconds that each part of a step takes at least, were it alone."""

    compute: float
    read: float
    write: float
    mixed: float

    @property
    def floor_s(self) -> float:
        """T*: with perfect overlap the slowest part is all that shows."""
        return max(self.compute, self.read, self.write, self.mixed)

    @property
    def binding(self) -> str:
        """The name of the slowest part."""
        parts = asdict(self)
        return max(parts, key=lambda name: float(parts[name]))


def terms(compute_s: float, read_nbytes: float, written_nbytes: float, speed: Bandwidth | None) -> Terms:
    """Return the terms of T* for a step that computes so long and moves so many bytes.

    speed: None where the disk cannot be measured; computing is then all that is known.
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


class Gauge(Protocol):
    """Something that measures one folder's disk, again and again."""

    @property
    def source(self) -> str:
        """Say by what and how, in a few words."""

    def measure(self, percent: int) -> Bandwidth | None:
        """Return the bandwidths now, `percent` of the mixed one reads; None where they cannot be measured."""


@dataclass(frozen=True, slots=True)
class ByFio:
    """fio, with the run's own mix of reads and writes."""

    fio: Fio
    source: str

    def measure(self, percent: int) -> Bandwidth:
        """Run fio three times."""
        return self.fio.measure(percent)


@dataclass(frozen=True, slots=True)
class ByInfinity:
    """Infinity's own measurement: what training takes its requests' size and depth from."""

    folder: Path
    source: str = "infinity.disk.measure (fio is not installed), mixed half and half"

    def measure(self, percent: int) -> Bandwidth:
        """Measure for some two seconds; reads and writes are always half and half."""
        found = disk.measure(str(self.folder))
        return Bandwidth(found.read, found.write, found.mixed)


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """No O_DIRECT: what could be measured is the page cache."""

    source: str = "not measured (O_DIRECT does not work in that folder): T* is computing alone"

    def measure(self, percent: int) -> None:
        """Return that nothing is known."""


def gauge_on(folder: Path, nbytes: int, seconds: int) -> Gauge:
    """Return the best measurement that there is for `folder`: fio's where it is installed.

    fio writes a file of `nbytes`, or of a quarter of what is free if that is less, and takes `seconds` for
    each of its three parts.

    Raises: aio.StorageFullError where there is too little room; RunError where fio fails.
    """
    with aio.open_engine(str(folder)) as engine:
        kind = engine.kind
    if kind == "buffered":
        return Unmeasured()
    if shutil.which("fio") is None:
        return ByInfinity(folder)
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    nbytes = min(nbytes, free // 4) >> 20 << 20
    if nbytes < LEAST_NBYTES:
        raise aio.StorageFullError.of_file(errno.ENOSPC, str(folder), needed=4 * LEAST_NBYTES, free=free)
    fio = Fio.on(folder, nbytes, seconds)
    return ByFio(fio, f"fio, {fio.engine}, O_DIRECT, {nbytes >> 20} MiB, the run's own mix")


# A step beside its floor


@dataclass(frozen=True, slots=True)
class Round:
    """One run of a contestant, and what the disk and the computing alone took around it."""

    run: Measured
    compute_s: float
    before: Bandwidth | None = None
    after: Bandwidth | None = None

    @property
    def disk(self) -> Bandwidth | None:
        """The bandwidths that count for this run."""
        return None if self.before is None or self.after is None else mean(self.before, self.after)

    @property
    def terms(self) -> Terms:
        """The terms of this round's floor."""
        return terms(self.compute_s, self.run.read_nbytes, self.run.written_nbytes, self.disk)

    @property
    def ratio(self) -> float:
        """The floor over the step: 1 where nothing is left to gain but fewer bytes."""
        return self.terms.floor_s / self.run.seconds


def mix(rounds: Sequence[Round]) -> int:
    """Return the percentage of reads to measure with: the last run's, or the design's where there is none."""
    if not rounds:
        return read_percent(0, 0)
    return read_percent(rounds[-1].run.read_nbytes, rounds[-1].run.written_nbytes)

"""The speed of a disk by fio, which is not part of Infinity: the reference for its own transfers.

One process makes requests of 1 MiB with O_DIRECT, 32 in flight, sequentially through a file that was written
before: writing to blocks that are not allocated yet would measure the filesystem. Its buffers lie in huge
pages, as those of training do, and it neither changes them before a write nor counts the first tenth of a
second, in which they are mapped: fio as it is installed gives half as much on drives of several GB a second.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.bench.engine.runs import RunError

ENGINES = ("io_uring", "libaio")
"""In the order in which they are tried."""
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Makes glibc's malloc, from which fio's buffers come, ask for huge pages."""
FILE = "disk.bin"
"""The name of the file to measure with; fio and our own engine share it."""
DESIGN_READ, DESIGN_WRITTEN = 14.0, 12.0
"""Bytes per parameter of a step with exact state: the mix of reads and writes if no run has shown one."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second of a disk: reads alone, writes alone, and the total of both at once."""

    read: float
    write: float
    mixed: float


def mean(one: Bandwidth, other: Bandwidth) -> Bandwidth:
    """Return the mean of two measurements."""
    return Bandwidth(
        (one.read + other.read) / 2, (one.write + other.write) / 2, (one.mixed + other.mixed) / 2
    )


def read_percent(read: float, written: float) -> int:
    """Return the percentage of reads, 1 to 99, in the bytes moved; the design's mix if none were moved."""
    if read + written == 0:
        read, written = DESIGN_READ, DESIGN_WRITTEN
    return min(99, max(1, round(100 * read / (read + written))))


def job_of(text: str) -> dict[str, Any]:
    """Return the only job of fio's JSON, skipping warnings before it.

    Raises: RunError if there is no JSON, or it reports an error.
    """
    try:
        job: dict[str, Any] = json.loads(text[text.index("{") :])["jobs"][0]
        failed = job["error"]
    except (ValueError, KeyError, IndexError) as error:
        raise RunError(f"fio wrote no measurement ({error!r}); it begins: {text[:200]!r}") from error
    if failed:
        raise RunError(f"fio's job ended with errno {failed}")
    return job


def rates(text: str) -> tuple[float, float]:
    """Return (read, written) bytes per second from fio's JSON.

    Raises: RunError as `job_of`.
    """
    job = job_of(text)
    try:
        return float(job["read"]["bw_bytes"]), float(job["write"]["bw_bytes"])
    except KeyError as error:
        raise RunError(f"fio wrote no measurement ({error!r}); it begins: {text[:200]!r}") from error


def program() -> str:
    """Return the path of fio.

    Raises: RunError if it is not installed.
    """
    found = shutil.which("fio")
    if found is None:
        raise RunError("fio is not installed: apt install fio")
    return found


def launch(job: Mapping[str, object], variables: Mapping[str, str] | None = None) -> str:
    """Run one fio job with additional environment `variables`; return its JSON.

    Raises: RunError with fio's last lines.
    """
    arguments = [f"--{key}={value}" for key, value in job.items()]
    done = subprocess.run(  # noqa: S603 (fio, with arguments written in this package)
        # --thread: job processes could outlive fio.
        [program(), *arguments, "--thread", "--output-format=json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(variables or {})},
    )
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
        raise RunError(f"fio with {job['ioengine']} ended with exit code {done.returncode}:\n{last}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Fio:
    """fio over one existing file."""

    path: Path
    nbytes: int
    seconds: int
    """Of each of the three measurements."""
    engine: str

    @classmethod
    def on(cls, folder: Path, nbytes: int, seconds: int) -> Fio:
        """Write the file in `folder`, with the first of ENGINES that works there.

        Raises: RunError if fio is not installed, or with its last lines if no engine works.
        """
        path = folder / FILE
        best, second = (cls(path, nbytes, seconds, engine) for engine in ENGINES)
        try:
            best.run("write", {})
        except RunError:  # containers may forbid io_uring
            second.run("write", {})
            return second
        return best

    def measure(self, percent: int) -> Bandwidth:
        """Measure the disk's bandwidths; `percent` of the mixed bytes are reads."""
        timed = {"runtime": self.seconds, "time_based": 1, "ramp_time": "100ms"}
        read, _ = self.run("read", timed)
        _, written = self.run("write", timed)
        mixed = sum(self.run("rw", {**timed, "rwmixread": percent}))
        return Bandwidth(read, written, mixed)

    def run(self, pattern: str, more: Mapping[str, object]) -> tuple[float, float]:
        """Run one job over the file; return (read, written) bytes per second."""
        job = {
            "name": "floor",
            "filename": self.path,
            "size": self.nbytes,
            "rw": pattern,
            "ioengine": self.engine,
            "direct": 1,
            "bs": "1m",
            "iodepth": 32,
            "scramble_buffers": 0,
        }
        return rates(launch({**job, **more}, HUGE_PAGES))

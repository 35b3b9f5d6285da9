"""The speed of a disk by fio, which is no part of Infinity: what its own transfers are held against.

O_DIRECT, requests of 1 MiB, 32 in flight, from one process, one after the other through a file that is
written beforehand: writing into blocks that are not allocated yet measures the filesystem.
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
FILE = "disk.bin"
"""The file's name, whoever has written it."""
DESIGN_READ, DESIGN_WRITTEN = 14.0, 12.0
"""Bytes per parameter in a step with exact state: the mix where no run has shown one."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second of a disk: reading alone, writing alone, and both at once, added."""

    read: float
    write: float
    mixed: float


def mean(one: Bandwidth, other: Bandwidth) -> Bandwidth:
    """Return the mean of two measurements."""
    return Bandwidth(
        (one.read + other.read) / 2, (one.write + other.write) / 2, (one.mixed + other.mixed) / 2
    )


def read_percent(read: float, written: float) -> int:
    """Return the share of reads, 1 to 99, in what was moved; the design's mix where nothing was."""
    if read + written == 0:
        read, written = DESIGN_READ, DESIGN_WRITTEN
    return min(99, max(1, round(100 * read / (read + written))))


def job_of(text: str) -> dict[str, Any]:
    """Return the one job of fio's JSON, warnings before it passed over.

    Raises: RunError where there is no JSON, or where it reports an error.
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
    """Find fio.

    Raises: RunError with the cure where it is not installed.
    """
    found = shutil.which("fio")
    if found is None:
        raise RunError("fio is not installed: apt install fio")
    return found


def launch(job: Mapping[str, object], variables: Mapping[str, str] | None = None) -> str:
    """Run fio with one job, of these parameters, and more `variables` in its environment; return its JSON.

    Raises: RunError with fio's last lines.
    """
    arguments = [f"--{key}={value}" for key, value in job.items()]
    done = subprocess.run(  # noqa: S603 (fio, with arguments written in this package)
        [program(), *arguments, "--thread", "--output-format=json"],  # its processes would outlive it
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
    """fio over one file, which exists already."""

    path: Path
    nbytes: int
    seconds: int
    """Of each of the three measurements."""
    engine: str

    @classmethod
    def on(cls, folder: Path, nbytes: int, seconds: int) -> Fio:
        """Write the file into `folder`, with the first of ENGINES that works there.

        Raises: SystemExit where fio is not installed; RunError with its last lines where no engine works.
        """
        if shutil.which("fio") is None:
            raise SystemExit("fio is not installed, and the floor is what it measures: apt install fio")
        path = folder / FILE
        best, second = (cls(path, nbytes, seconds, engine) for engine in ENGINES)
        try:
            best.run("write", {})
        except RunError:  # containers may forbid io_uring
            second.run("write", {})
            return second
        return best

    def measure(self, percent: int) -> Bandwidth:
        """Return the disk's bandwidths now, the mixed one with `percent` of the bytes read."""
        timed = {"runtime": self.seconds, "time_based": 1}
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
        }
        return rates(launch({**job, **more}))

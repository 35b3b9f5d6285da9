"""The movers of `infinity bench io`: our engines and, on the same blocks of the same file, other programs.

A mover gets a `Workload` and returns a `Measurement`. fio and the kernel's aio get requests of the size of
our pieces, and as many of them in flight, so that the kernel sees the same requests.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from infinity import aio
from infinity.aio.measure import MIXED, WRITE, Moved, RequestStream, move
from infinity.bench.aio import fio, libaio
from infinity.bench.engine.runs import RunError

PERCENTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9}
FIO_ENGINES = ("io_uring", "libaio")
PEERS = ("fio", "fio-as-is", "libaio")
"""The names for `peers`. fio has its buffers in huge pages, like our engines; fio-as-is in 4 KiB pages."""
MOST_THREADS = 256
"""The limit for an engine without io_uring."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a measurement."""

    verb: str
    """"read", "write" or "mixed"."""
    request_nbytes: int
    piece_nbytes: int
    """The size into which our engines cut requests."""
    depth: int
    """Pieces in flight."""
    in_flight: int
    """Requests in flight."""

    @property
    def block_nbytes(self) -> int:
        """The largest transfer of our engine in one system call: the peers' request size."""
        return min(self.request_nbytes, self.piece_nbytes)

    @property
    def peers_depth(self) -> int:
        """Blocks in flight."""
        each = math.ceil(self.request_nbytes / self.piece_nbytes)
        return min(self.depth, self.in_flight * each)

    @property
    def together(self) -> int:
        """How many requests may end before more must be submitted to keep that depth."""
        busy = math.ceil(self.peers_depth * self.block_nbytes / self.request_nbytes)
        return max(1, self.in_flight - busy)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of one measurement."""

    bytes_per_s: float
    cpu_s_per_gb: float
    """Seconds of CPU time, user and system, per 10⁹ bytes."""
    latency_s: Mapping[str, float]
    """Latencies of a request, by the names of PERCENTILES."""


def sample(moved: Sequence[Moved], cpu_s: float) -> Measurement:
    """Combine streams that ran at the same time, and their CPU time."""
    nbytes = sum(one.nbytes for one in moved)
    latencies_s = [latency for one in moved for latency in one.latencies_s]
    return Measurement(
        nbytes / max(one.wall_s for one in moved), cpu_s / nbytes * 1e9, percentiles(latencies_s)
    )


def percentiles(latencies_s: Sequence[float]) -> dict[str, float]:
    """Return each of PERCENTILES: the smallest latency that this percentage of requests does not exceed."""
    ordered = sorted(latencies_s)
    return {
        name: ordered[max(0, math.ceil(percent * len(ordered) / 100) - 1)]
        for name, percent in PERCENTILES.items()
    }


@dataclass(frozen=True, slots=True)
class MeasuredFile:
    """A nameless file on the disk to measure."""

    folder: str
    direct: aio.File
    """Opened with O_DIRECT, if the filesystem supports it."""
    buffered: aio.File
    """The same blocks through the page cache."""
    nbytes: int


@contextmanager
def opened(folder: str, nbytes: int) -> Iterator[MeasuredFile]:
    """Create a file of `nbytes` in a folder and write its blocks, since first writes are slow.

    Raises: aio.StorageFullError, leaving nothing behind; aio.EngineUnavailableError if no engine works.
    """
    with _best_engine(folder) as engine, engine.open_nameless(folder) as direct:
        direct.allocate(0, nbytes)
        fill = RequestStream(WRITE, min(4 << 20, nbytes), 16)
        move(engine, direct, fill.memory(), fill, nbytes, seconds=math.inf, at_most=nbytes)
        fd = os.open(f"/proc/self/fd/{direct.fd}", os.O_RDWR | os.O_CLOEXEC)
        with aio.File(engine, fd, direct.path, direct=False) as buffered:
            yield MeasuredFile(folder, direct, buffered, nbytes)


def _best_engine(folder: str) -> aio.IoEngine:
    """Open the best kind of engine that works in a folder, whatever INFINITY_AIO says."""
    refusals = []
    for kind in aio.KINDS:
        try:
            return aio.open_engine(folder, kind)
        except aio.EngineUnavailableError as error:
            refusals.append(error)
    raise refusals[-1]


class Mover(Protocol):
    """Moves bytes and measures it."""

    @property
    def name(self) -> str:
        """Its name in the table and on the command line."""

    def measure(self, places: Sequence[MeasuredFile], work: Workload, seconds: float) -> Measurement:
        """Run the workload for `seconds` on the files of all places at once. Raises: RunError, OSError."""


@dataclass(frozen=True, slots=True)
class Ours:
    """An engine of infinity.aio, one for each place."""

    kind: str
    ring: str | None = None
    """The kind of ring; None: the best that the kernel supports."""
    huge: bool = True
    """Whether requests lie in huge pages."""

    @classmethod
    def of(cls, name: str, *, huge: bool) -> Ours:
        """Parse a name such as "threads", or "io_uring:coop": a kind and a ring."""
        kind, _, ring = name.partition(":")
        return cls(kind, ring or None, huge)

    @property
    def name(self) -> str:
        """The name that `of` parses."""
        return f"{self.kind}:{self.ring}" if self.ring else self.kind

    def engine(self, folder: str, work: Workload) -> aio.IoEngine:
        """Open an engine in a folder.

        Raises: aio.EngineUnavailableError if it does not work there.
        """
        depth, piece_nbytes = work.depth, work.piece_nbytes
        threads = min(depth, MOST_THREADS)
        return aio.open_engine(
            folder, self.kind, depth=depth, threads=threads, piece_nbytes=piece_nbytes, ring=self.ring
        )

    def measure(self, places: Sequence[MeasuredFile], work: Workload, seconds: float) -> Measurement:
        """Move a stream of requests in each place. CPU time is the whole process's, including Python's."""
        stream = RequestStream(work.verb, work.request_nbytes, work.in_flight, work.together)
        with ExitStack() as stack:
            engines = [stack.enter_context(self.engine(place.folder, work)) for place in places]
            memories = [stream.memory(huge=self.huge) for _ in places]
            for engine, memory in zip(engines, memories, strict=True):
                engine.register(memory.address, len(memory), memory)  # as training does with its pool

            def one(index: int) -> Moved:
                engine, place = engines[index], places[index]
                file = place.direct if engine.direct else place.buffered
                return move(engine, file, memories[index], stream, place.nbytes, seconds=seconds)

            cpu_s = time.process_time()
            if len(places) == 1:
                moved = [one(0)]
            else:
                pool = stack.enter_context(ThreadPoolExecutor(len(places)))
                moved = list(pool.map(one, range(len(places))))
            found = sample(moved, time.process_time() - cpu_s)
            if not engines[0].direct:
                for place in places:
                    _forget(place.buffered)
            return found


def _forget(file: aio.File) -> None:
    """Write back and drop a file's pages from the page cache: they would disturb the next measurement."""
    file.sync()
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class Libaio:
    """The kernel's native aio."""

    huge: bool = True

    @property
    def name(self) -> str:
        """As the table has it."""
        return "libaio"

    def measure(self, places: Sequence[MeasuredFile], work: Workload, seconds: float) -> Measurement:
        """Move a stream of blocks."""
        (place,) = places
        stream = RequestStream(work.verb, work.block_nbytes, work.peers_depth)
        memory = stream.memory(huge=self.huge)
        cpu_s = time.process_time()
        moved = libaio.move(place.direct.fd, memory, stream, place.nbytes, seconds)
        return sample([moved], time.process_time() - cpu_s)


@dataclass(frozen=True, slots=True)
class FioPeer:
    """fio, with one of its engines. Its CPU time is the job's, without start and end of the program."""

    engine: str
    huge: bool = True
    title: str = "fio"

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.title} {self.engine}"

    def measure(self, places: Sequence[MeasuredFile], work: Workload, seconds: float) -> Measurement:
        """Run one job on the same file, which this process has open."""
        (place,) = places
        job = {
            "name": "infinity",
            "filename": f"/proc/{os.getpid()}/fd/{place.direct.fd}",
            "size": place.nbytes,
            "direct": int(place.direct.direct),
            "ioengine": self.engine,
            "rw": "rw" if work.verb == MIXED else work.verb,
            "bs": work.block_nbytes,
            "iodepth": work.peers_depth,
            "runtime": f"{round(seconds * 1000)}ms",
            "ramp_time": "100ms",  # its buffers are new, and page faults are not part of a transfer
            "time_based": 1,
            "fallocate": "none",
            "scramble_buffers": 0,  # for fio's best speed: else it changes every block before writing it
            "unified_rw_reporting": "mixed",
            "clat_percentiles": 0,
            "lat_percentiles": 1,
            "percentile_list": ":".join(str(percent) for percent in PERCENTILES.values()),
        }
        found = fio.job_of(fio.launch(job, fio.HUGE_PAGES if self.huge else {}))
        try:
            return _sample_of(found)
        except (KeyError, ZeroDivisionError) as error:
            raise RunError(f"fio with {self.engine} wrote no measurement ({error!r})") from error


def _sample_of(job: Mapping[str, Any]) -> Measurement:
    """Read the job of fio's JSON."""
    moved = job["mixed"]
    gigabytes = moved["io_bytes"] / 1e9
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    latency_s = {
        name: moved["lat_ns"]["percentile"][f"{percent:f}"] / 1e9 for name, percent in PERCENTILES.items()
    }
    return Measurement(float(moved["bw_bytes"]), cpu_s / gigabytes, latency_s)


def peers(name: str, folder: str, *, huge: bool) -> list[Mover]:
    """Return the movers of --peer `name`; fio without io_uring if the kernel refuses that.

    Raises: RunError if fio is not installed.
    """
    if name == "libaio":
        return [Libaio(huge)]
    fio.program()
    engines: tuple[str, ...] = FIO_ENGINES
    try:
        aio.open_engine(folder, "io_uring").close()
    except aio.EngineUnavailableError:
        engines = engines[1:]
    return [FioPeer(engine, huge and name == "fio", name) for engine in engines]

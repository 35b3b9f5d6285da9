"""Measures a disk's bandwidth and its best queue depth and piece size; the result is kept in a cache.

[Note: what is measured]
A step reads and writes at the same time, so the depth (pieces in flight) and the piece size are chosen for
the best rate of half reads, half writes. Reads alone and writes alone are then measured with that choice, and
the mix once more while every core computes: the thread that asks the drive waits for a core then, and the
drive for it (measured on two cores with 16 pieces of 256 KiB: 3.2 GB/s in the place of 3.9). What the
engine's threads take of these cores for each byte is counted meanwhile. All measurements use the engine that
training uses, on a nameless file whose blocks have been written once, since new blocks are slow. Among rates
within 5 % of the best the one with the least bytes in flight wins: a deep queue makes a record that is needed
now wait longer. But there are enough to keep the drive busy for a slice of the scheduler's: so long may the
thread that asks for more wait for a core (on two cores, steps of 64 and 256 tokens took 10 % less time with
16 MiB in flight than with 4, which were as fast on an idle machine). Of those with as much in flight it is
the one with the largest pieces: each takes 2.4 us of a core that the model computes on, and drives split what
is too large for them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from infinity import aio
from infinity.aio.measure import MIXED, READ, WRITE, RequestStream, move
from infinity.errors import UnsupportedError
from infinity.sizes import format_size

logger = logging.getLogger("infinity")

_FILE_NBYTES, _LEAST_FILE_NBYTES = 256 << 20, 32 << 20
_REQUEST_NBYTES = 4 << 20
# (piece_nbytes, depth), the likely best first: a slow disk leaves no time for the others. No piece is larger
# than the smallest field of a full tile; otherwise training would have fewer bytes in flight than measured.
_OF_RING = tuple(
    (n << 10, depth) for n, depth in [(1024, 32), (1024, 16), (1024, 8), (512, 32), (512, 16), (512, 8)]
)
_CHOICES = {"io_uring": _OF_RING, "threads": tuple((nbytes, depth // 2) for nbytes, depth in _OF_RING)}
_DEFAULT_DEPTHS = {"io_uring": 32, "threads": 8, "buffered": 8}
_DEFAULT_PIECE_NBYTES = 1 << 20
_FILL_S, _TRIAL_S, _TRIALS_S, _ALONE_S, _BESIDE_S = 0.4, 0.06, 1.2, 0.15, 0.4
_EQUAL = 0.95
_COVERED_S = 0.004
"""A slice of Linux's scheduler, about."""
_CACHE = "disks.2.json"
"""The number changes with how disks are measured: each is measured anew then."""
_COMPUTING = "infinity-computing"
_HASHED_NBYTES = 8 << 20
"""At once: some milliseconds, as an operation of a model takes."""


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """A disk's bandwidth, and the depth and piece size that reach it. A rate of 0 means: not known."""

    read: float
    """Bytes per second, reading alone."""
    write: float
    """Bytes per second, writing alone."""
    mixed: float
    """Bytes per second in total, reads and writes half and half."""
    depth: int
    """Pieces in flight at once."""
    piece_nbytes: int
    """Bytes of a piece: requests are cut into these."""
    engine: str
    """The kind of I/O engine."""
    date: str
    """The day of the measurement, "2026-05-01"; "" for none."""
    beside: float = 0.0
    """Bytes per second as `mixed`, while every core computes. A rate of 0, as above."""
    taken: float = 0.0
    """Seconds of a core that the engine's threads take for each of these bytes, as above."""

    def __post_init__(self) -> None:
        """Check values that may come from a damaged cache.

        Raises: ValueError or TypeError.
        """
        if not all(math.isfinite(rate) and rate >= 0 for rate in self._rates):
            raise ValueError(f"rates {self._rates}: expected B/s, finite and >= 0")
        if type(self.depth) is not int or not 1 <= self.depth <= 256:  # the limit of both engines
            raise ValueError(f"depth is {self.depth!r}, and must be from 1 to 256")
        size = self.piece_nbytes
        if type(size) is not int or not aio.BLOCK <= size <= 1 << 30 or size % aio.BLOCK:
            raise ValueError(f"piece_nbytes is {size!r}, and must be whole blocks of {aio.BLOCK} B, to 1 GiB")
        if self.engine not in aio.KINDS or not isinstance(self.date, str):
            raise ValueError(
                f"engine {self.engine!r}, date {self.date!r}: expected one of {aio.KINDS} and a text"
            )

    @property
    def _rates(self) -> tuple[float, ...]:
        return self.read, self.write, self.mixed, self.beside, self.taken


def default_speed(engine_kind: str) -> DiskSpeed:
    """Return the settings for a disk that was not measured: pieces of 1 MiB, 32 in flight (threads: 8)."""
    return DiskSpeed(0, 0, 0, _DEFAULT_DEPTHS[engine_kind], _DEFAULT_PIECE_NBYTES, engine_kind, "")


def measured(folder: str, engine_kind: str | None = None) -> DiskSpeed | None:
    """Return the cached speed of a folder's filesystem; None if there is none, or it is damaged.

    engine_kind: the engine of the measurement; by default INFINITY_AIO's, else the best one measured.
    """
    try:
        place = _identity(folder)
    except (OSError, ValueError):
        return None
    asked = engine_kind or os.environ.get("INFINITY_AIO")
    entries = _cached()
    for kind in (asked,) if asked else aio.KINDS:
        if speed := entries.get(f"{place} {kind}"):
            return speed
    return None


def speed_of(folder: str, engine_kind: str | None = None) -> DiskSpeed:
    """Return a folder's speed: from the cache, else measured now, in about 2 s.

    Returns `default_speed` with INFINITY_MEASURE=0, with the engine "buffered", and if measuring fails, which
    is logged.

    Raises: aio.EngineUnavailableError if the engine named here or by INFINITY_AIO does not work.
    """
    named = engine_kind or os.environ.get("INFINITY_AIO") or ""
    kind = named
    try:
        with aio.open_engine(folder, engine_kind) as engine:
            kind = engine.kind
        if known := measured(folder, kind):
            return known
        if os.environ.get("INFINITY_MEASURE") == "0" or kind == "buffered":
            return default_speed(kind)
        with _alone():  # a second process waits here for the first, and finds its result
            return measured(folder, kind) or _measure(folder, kind)
    except (OSError, ValueError) as error:
        if named and isinstance(error, aio.EngineUnavailableError):
            raise  # training could not open it either
        speed = default_speed(kind if kind in aio.KINDS else aio.KINDS[0])
        logger.warning(
            "the disk of %s was not measured: %s\n  continuing with %d requests of %s in flight",
            *(folder, error, speed.depth, format_size(speed.piece_nbytes)),
        )
        return speed


def speed_today(folder: str) -> DiskSpeed:
    """Return a folder's speed as `speed_of` does, but measured anew where it was cached on another day: what
    a disk that others use gives may change by a third. A disk that cannot be measured now keeps its speed.

    Raises: aio.EngineUnavailableError as `speed_of` does.
    """
    speed = speed_of(folder)
    if speed.date in ("", today()) or os.environ.get("INFINITY_MEASURE") == "0":
        return speed
    try:
        return measure(folder, speed.engine)
    except (OSError, ValueError, UnsupportedError) as error:
        logger.warning(
            "the disk of %s was not measured anew: %s\n  continuing with its speed of %s",
            *(folder, error, speed.date),
        )
        return speed


def measure(folder: str, engine_kind: str | None = None) -> DiskSpeed:
    """Measure a folder's disk now, in about 2 s (a slow disk: some more), and renew the cache.

    Raises: aio.StorageFullError for too little space; aio.EngineUnavailableError for a folder that is not
    writable or an engine that does not work there; aio.IoError; UnsupportedError for the engine "buffered".
    """
    with _alone():
        return _measure(folder, engine_kind)


# Measuring


def today() -> str:
    """Return the date of a measurement made now."""
    return time.strftime("%Y-%m-%d")


def _measure(folder: str, engine_kind: str | None) -> DiskSpeed:
    memory = RequestStream(MIXED, _REQUEST_NBYTES, 4).memory()
    with aio.open_engine(folder, engine_kind) as engine, engine.open_nameless(folder) as file:
        kind = engine.kind
        if kind not in _CHOICES:
            raise UnsupportedError(
                f"{folder}: the I/O engine {kind!r} goes through the page cache, so this would measure "
                "memory, not the disk. Unset INFINITY_AIO, or name a folder where O_DIRECT works."
            )
        file.allocate(0, _room(folder))
        nbytes, _ = _move(engine, file, memory, WRITE, file.nbytes, _FILL_S, file.nbytes)
        mixed, depth, piece_nbytes = best(_trials(folder, kind, file, memory, nbytes))
        with aio.open_engine(folder, kind, depth=depth, threads=depth, piece_nbytes=piece_nbytes) as chosen:
            read, write = (
                moved / wall_s
                for moved, wall_s in (
                    _move(chosen, file, memory, verb, nbytes, _ALONE_S) for verb in (READ, WRITE)
                )
            )
            before_s = _others_s()
            with _computing() as computed_s:
                moved, wall_s = _move(chosen, file, memory, MIXED, nbytes, _BESIDE_S)
            taken_s = max(0.0, _others_s() - before_s - sum(computed_s))
    beside, taken = moved / wall_s, taken_s / moved
    speed = DiskSpeed(read, write, mixed, depth, piece_nbytes, kind, today(), beside, taken)
    _keep(folder, speed)
    return speed


def _others_s() -> float:
    """Return the CPU seconds of this process's other threads."""
    return time.process_time() - time.thread_time()


@contextlib.contextmanager
def _computing() -> Iterator[list[float]]:
    """Keep every core that this process may use busy, by threads that need the interpreter seldom. In the end
    the list has the CPU seconds of each.
    """
    ended, content, taken_s = threading.Event(), bytes(_HASHED_NBYTES), list[float]()

    def compute() -> None:
        while not ended.is_set():
            hashlib.sha256(content).digest()  # without the interpreter's lock
        taken_s.append(time.thread_time())

    cores = len(os.sched_getaffinity(0))
    threads = [threading.Thread(target=compute, name=_COMPUTING, daemon=True) for _ in range(cores)]
    for one in threads:
        one.start()
    try:
        yield taken_s
    finally:
        ended.set()
        for one in threads:
            one.join()


def _trials(
    folder: str, kind: str, file: aio.File, memory: aio.AlignedMemory, nbytes: int
) -> dict[tuple[int, int], float]:
    """Return the mixed rate, in bytes per second, of each (depth, piece_nbytes) for which there was time.

    There are two rounds, as the speed of a shared disk varies.
    """
    sums: dict[tuple[int, int], tuple[int, float]] = {}
    began_s = time.perf_counter()
    for piece_nbytes, depth in 2 * _CHOICES[kind]:
        with aio.open_engine(folder, kind, depth=depth, threads=depth, piece_nbytes=piece_nbytes) as engine:
            moved, wall_s = _move(engine, file, memory, MIXED, nbytes, _TRIAL_S)
        before, before_s = sums.get((depth, piece_nbytes), (0, 0.0))
        sums[depth, piece_nbytes] = before + moved, before_s + wall_s
        if time.perf_counter() - began_s > _TRIALS_S:
            break
    return {choice: moved / wall_s for choice, (moved, wall_s) in sums.items()}


def _room(folder: str) -> int:
    """Return the size of the file to measure with: 256 MiB, or a quarter of the free space.

    Raises: aio.StorageFullError if that is less than 32 MiB.
    """
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    nbytes = min(_FILE_NBYTES, free // 4 // _REQUEST_NBYTES * _REQUEST_NBYTES)
    if nbytes < _LEAST_FILE_NBYTES:
        raise aio.StorageFullError.of_file(errno.ENOSPC, folder, needed=4 * _LEAST_FILE_NBYTES, free=free)
    return nbytes


def _move(
    engine: aio.IoEngine,
    file: aio.File,
    memory: aio.AlignedMemory,
    verb: str,
    nbytes: int,
    seconds: float,
    at_most: int = 1 << 62,
) -> tuple[int, float]:
    """Stream over the first `nbytes` of a file; return the bytes moved and the seconds taken."""
    in_flight = engine.depth * engine.piece_nbytes // _REQUEST_NBYTES + 2  # the engine never runs dry
    stream = RequestStream(verb, _REQUEST_NBYTES, in_flight)
    moved = move(engine, file, memory, stream, nbytes, seconds=seconds, at_most=at_most)
    return moved.nbytes, moved.wall_s


def best(rates: dict[tuple[int, int], float]) -> tuple[float, int, int]:
    """Return (rate, depth, piece_nbytes) with the least bytes in flight among those as fast as the best that
    keep the drive busy for _COVERED_S (where none does, that with the most), and of these the one with the
    largest pieces.
    """
    most = max(rates.values())
    good = [choice for choice, rate in rates.items() if rate >= _EQUAL * most]
    covered = min(_COVERED_S * most, max(map(math.prod, good)))
    deep = [choice for choice in good if math.prod(choice) >= covered]
    depth, piece_nbytes = min(deep, key=lambda choice: (math.prod(choice), choice[0]))
    return rates[depth, piece_nbytes], depth, piece_nbytes


# The cache


def cache_folder() -> Path:
    """Return the folder of measurements: INFINITY_CACHE, or one in the user's home.

    Raises: FileNotFoundError without a home.
    """
    if named := os.environ.get("INFINITY_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infinity"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "no home folder: set INFINITY_CACHE") from error


def _identity(folder: str) -> str:
    """Name the filesystem that holds a folder: all its folders share one entry."""
    device, status = os.stat(folder).st_dev, os.statvfs(folder)
    kind = filesystem(Path(folder).resolve())
    return f"{os.major(device)}:{os.minor(device)} {kind} {status.f_blocks * status.f_frsize}"


IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""Filesystems whose files take host memory."""
OVER_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "ceph", "fuse.sshfs", "fuse.glusterfs"}
)
"""Filesystems whose files are on another machine."""


def filesystem(folder: Path) -> str:
    """Name the type of the filesystem that holds `folder`."""
    best, kind = 0, "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        left, _, right = line.partition(" - ")
        place = Path(left.split()[4].replace("\\040", " "))
        if folder.is_relative_to(place) and len(place.parts) >= best:
            best, kind = len(place.parts), right.split()[0]
    return kind


def _cached() -> dict[str, DiskSpeed]:
    """Return the valid entries of the cache."""
    try:
        content = json.loads((cache_folder() / _CACHE).read_text())
        entries = dict(content)
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    found = {}
    for key, entry in entries.items():
        with contextlib.suppress(TypeError, ValueError):
            found[key] = DiskSpeed(**entry)
    return found


def keep(folder: str, speed: DiskSpeed) -> None:
    """Store a measurement in the cache atomically, replacing an older one of the same engine.

    Raises: OSError if the cache cannot be written.
    """
    with _alone():
        _put(folder, speed)


def check_cache() -> None:
    """Check that a measurement can be stored, before time is spent on it.

    Raises: OSError naming the folder that cannot be created or written.
    """
    place = cache_folder()
    place.mkdir(parents=True, exist_ok=True)
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "no permission to write to the cache", str(place))


def _put(folder: str, speed: DiskSpeed) -> None:
    entries = {**_cached(), f"{_identity(folder)} {speed.engine}": speed}
    text = json.dumps({key: asdict(entry) for key, entry in entries.items()}, indent=1)
    place = cache_folder()
    place.mkdir(parents=True, exist_ok=True)
    fd, unfinished = tempfile.mkstemp(prefix="disks.", dir=place)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text + "\n")
        Path(unfinished).replace(place / _CACHE)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def _keep(folder: str, speed: DiskSpeed) -> None:
    """Store a measurement in the cache; a failure is logged."""
    try:
        _put(folder, speed)
    except OSError as error:
        logger.warning("the measurement of %s could not be cached for the next start: %s", folder, error)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let one process at a time measure: two would halve each other's rates, and cache them."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # without a cache, or locks in it, every process measures
            place = cache_folder()
            place.mkdir(parents=True, exist_ok=True)
            fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield

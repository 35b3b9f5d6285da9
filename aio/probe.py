"""Chooses the engine that works in a folder, by a real request instead of version numbers."""

import errno
import os
from typing import NamedTuple

from infinity.aio.engine import IoEngine
from infinity.aio.errors import STARTING, TRYING, EngineUnavailableError, IoEngineFailedError
from infinity.aio.files import Folder, opened_folder
from infinity.aio.library import BLOCK, KIND_IO_URING, KIND_THREADS, RINGS, ffi, load
from infinity.aio.memory import AlignedMemory


class _EngineKind(NamedTuple):
    backend: int
    direct: bool


_CHAIN = {
    "io_uring": _EngineKind(KIND_IO_URING, direct=True),
    "threads": _EngineKind(KIND_THREADS, direct=True),
    "buffered": _EngineKind(KIND_THREADS, direct=False),
}

KINDS = tuple(_CHAIN)
"""The kinds of engine, best first."""

_LARGEST_DEPTH, _LARGEST_THREADS, _LARGEST_PIECE = 4096, 256, 1 << 30


def open_engine(
    folder: Folder,
    kind: str | None = None,
    *,
    depth: int = 32,
    threads: int = 8,
    piece_nbytes: int = 1 << 20,
    ring: str | None = None,
) -> IoEngine:
    """Start the best engine that works on the files of a folder.

    Args:
        folder: the folder of the files; the engine is tried on a nameless file there.
        kind: one of KINDS; by default the environment variable INFINITY_AIO, else the first of KINDS that
        works.
        depth: pieces that io_uring keeps in flight.
        threads: number of threads of the other kinds, each with one piece in flight.
        piece_nbytes: the size of the pieces into which requests are split, in whole blocks.
        ring: the kind of io_uring's ring, one of RINGS; by default the first that the kernel supports.

    Raises:
        ValueError: an unknown kind or ring, or a number out of range.
        EngineUnavailableError: the requested kind, or every kind, does not work here.
    """
    _check_numbers(depth, threads, piece_nbytes)
    asked, by = (kind, "asked for") if kind else (os.environ.get("INFINITY_AIO"), "asked for by INFINITY_AIO")
    if asked and asked not in _CHAIN:
        raise ValueError(f"engine {asked!r}, {by}, is unknown: choose one of {', '.join(KINDS)}")
    if ring and ring not in RINGS:
        raise ValueError(f"ring {ring!r} is unknown: choose one of {', '.join(RINGS)}")
    options = {"depth": depth, "threads": threads, "piece_nbytes": piece_nbytes}  # as in struct aio_options
    options["ring"] = RINGS.index(ring) + 1 if ring else 0
    with opened_folder(folder) as (folder_fd, path):
        if asked:
            return _open(asked, f"{asked}: {by}", options, folder_fd, path)
        return _open_first(options, folder_fd, path)


def open_reader(kind: str | None = None, *, depth: int = 8, piece_nbytes: int = 1 << 20) -> IoEngine:
    """Start an engine for files that are only read, of any folder: nothing is written to try it.

    Args:
        kind: one of KINDS; by default the environment variable INFINITY_AIO, else the first of KINDS that
        starts.
        depth: pieces in flight at once.
        piece_nbytes: the size of the pieces into which requests are split, in whole blocks.

    Raises:
        ValueError: an unknown kind, or a number out of range.
        EngineUnavailableError: the requested kind, or every kind, does not work here.
    """
    _check_numbers(depth, depth, piece_nbytes)
    asked = kind or os.environ.get("INFINITY_AIO")
    if asked and asked not in _CHAIN:
        raise ValueError(f"engine {asked!r} is unknown: choose one of {', '.join(KINDS)}")
    options = {"depth": depth, "threads": depth, "piece_nbytes": piece_nbytes, "ring": 0}
    refusal: EngineUnavailableError | None = None
    for one in (asked,) if asked else KINDS:
        try:
            return _start(one, f"{one}: it starts here", options, "files to be read")
        except EngineUnavailableError as error:
            refusal = error
    raise refusal or AssertionError("no kind of engine was tried")


def _check_numbers(depth: int, threads: int, piece_nbytes: int) -> None:
    if not 1 <= depth <= _LARGEST_DEPTH:
        raise ValueError(f"depth is {depth}, and must be from 1 to {_LARGEST_DEPTH}")
    if not 1 <= threads <= _LARGEST_THREADS:
        raise ValueError(f"threads is {threads}, and must be from 1 to {_LARGEST_THREADS}")
    if not BLOCK <= piece_nbytes <= _LARGEST_PIECE or piece_nbytes % BLOCK:
        raise ValueError(f"piece_nbytes is {piece_nbytes}, and must be whole blocks of {BLOCK} B, to 1 GiB")


def _open_first(options: dict[str, int], folder_fd: int, path: str) -> IoEngine:
    refusals: list[EngineUnavailableError] = []
    for kind in KINDS:
        why_not = "; ".join(f"{e.kind} does not work here ({_shortly(e)})" for e in refusals)
        reason = f"{kind}: {why_not or 'the first choice, and it works here'}"
        try:
            return _open(kind, reason, options, folder_fd, path)
        except EngineUnavailableError as error:
            refusals.append(error)
    raise refusals[-1]


def _shortly(error: EngineUnavailableError) -> str:
    """Summarise an error in one line: what failed, and the likely cause."""
    what, *details = str(error).splitlines()
    cause = next((line.strip() for line in details if "likely cause" in line), "")
    return f"{what.split(': ', 1)[1]}; {cause}"


def _open(kind: str, reason: str, options: dict[str, int], folder_fd: int, path: str) -> IoEngine:
    """Start one kind of engine and try it. Raises: EngineUnavailableError."""
    engine = _start(kind, reason, options, path)
    try:
        _try(engine, folder_fd)
    except OSError as error:
        engine.close()
        step = STARTING if isinstance(error, IoEngineFailedError) else TRYING
        raise EngineUnavailableError.of_kind(kind, error.errno or errno.EIO, step, path) from error
    except BaseException:
        engine.close()
        raise
    return engine


def _start(kind: str, reason: str, options: dict[str, int], path: str) -> IoEngine:
    """Start one kind of engine. Raises: EngineUnavailableError."""
    library = load()
    backend, direct = _CHAIN[kind]
    opened = ffi.new("struct aio_engine **")
    result = library.aio_open(ffi.new("struct aio_options *", {"kind": backend, **options}), opened)
    if result < 0:
        raise EngineUnavailableError.of_kind(kind, -result, STARTING, path)
    depth = options["depth" if backend == KIND_IO_URING else "threads"]
    pointer = ffi.gc(opened[0], library.aio_free)
    return IoEngine(kind, reason, pointer, direct=direct, depth=depth, piece_nbytes=options["piece_nbytes"])


def _try(engine: IoEngine, folder_fd: int) -> None:
    """Write one block to a nameless file, read it back and compare."""
    memory = AlignedMemory(2 * BLOCK)
    memory.view[:BLOCK] = os.urandom(BLOCK)
    with engine.open_nameless(folder_fd) as file:
        engine.write(file, 0, memory.address, BLOCK, what="a trial block", owner=memory).wait()
        engine.read(file, 0, memory.address + BLOCK, BLOCK, what="a trial block", owner=memory).wait()
    if memory.view[:BLOCK] != memory.view[BLOCK:]:
        raise OSError(errno.EIO, "a trial block was read back with other bytes than were written to it")

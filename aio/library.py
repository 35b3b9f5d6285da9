"""The C library behind a typed face: loaded once, from the very header the compiler read."""

import enum
import functools
from pathlib import Path
from typing import Any, Protocol, cast

import cffi

BLOCK = 4096
"""Alignment, in bytes, of address, offset and nbytes on files opened with O_DIRECT."""

SLICE_MS = 100
"""Longest wait inside one C call, in milliseconds: Python handles signals between calls."""

# What aio.h calls AIO_...; plain numbers here, because cffi's constants cost a dictionary look-up per use.
KIND_IO_URING, KIND_THREADS = 1, 2
WRITE, ALIGNED = 1, 4
RINGS = ("defer", "coop", "plain")
"""Kinds of rings, by how they learn of completions, the cheapest first; aio.h numbers them from 1."""
IDLE, IN_FLIGHT, DONE = 0, 1, 2
REGISTERED_NBYTES = 1 << 30
END_OF_FILE = 4096


class Priority(enum.IntEnum):
    """The order in which an engine starts waiting requests; among equals, the oldest first.

    The values are aio.h's flags.
    """

    URGENT = 2
    """Before all others: a thread waits for it."""
    NORMAL = 0
    BEHIND = 8
    """After all others, except for one piece in four, so that these requests keep making progress."""


CData = Any
"""A cffi object: a pointer to, or the memory of, a C struct."""

ffi: Any = cffi.FFI()


class AioLibrary(Protocol):
    """The functions of aio.h; the header says what each does.  Failures come back as -errno."""

    # ruff: disable[D102]
    def aio_abi(self) -> int: ...
    def aio_open(self, options: CData, engine: CData, /) -> int: ...
    def aio_ring(self, engine: CData, /) -> int: ...
    def aio_stop(self, engine: CData, /) -> None: ...
    def aio_stopped(self, engine: CData, timeout_ms: int, /) -> int: ...
    def aio_join(self, engine: CData, /) -> int: ...
    def aio_free(self, engine: CData, /) -> None: ...
    def aio_register(self, engine: CData, address: int, nbytes: int, /) -> int: ...
    def aio_submit(self, engine: CData, requests: CData, count: int, /) -> int: ...
    def aio_done(self, request: CData, /) -> int: ...
    def aio_wait(self, engine: CData, request: CData, timeout_ms: int, /) -> int: ...
    def aio_wait_idle(self, engine: CData, timeout_ms: int, /) -> int: ...
    def aio_wait_change(self, engine: CData, seen: int, timeout_ms: int, /) -> int: ...
    def aio_statistics(self, engine: CData, statistics: CData, /) -> None: ...
    def aio_allocate(self, fd: int, offset: int, nbytes: int, /) -> int: ...
    def aio_inject(self, engine: CData, nth: int, result: int, /) -> int: ...
    def aio_hold(self, engine: CData, held: int, /) -> None: ...

    # ruff: enable[D102]


@functools.cache
def load() -> AioLibrary:
    """Load the compiled library that lies beside this file.

    Raises:
        ImportError: it was not built, or was built from another version of aio.h.
    """
    folder = Path(__file__).resolve().parent
    header = (folder / "aio.h").read_text()
    ffi.cdef("\n".join(line for line in header.splitlines() if not line.startswith("#")))
    path = folder / "_aio.so"
    try:
        library = ffi.dlopen(str(path))
    except OSError as error:
        raise ImportError(
            f"infinity.aio's C library cannot be loaded: {error}\n"
            f"  likely cause: {path.name} was not built for this checkout or machine\n"
            f"  try: `python setup.py build_c` in a checkout, else install the package again",
            path=str(path),
        ) from error
    # A struct whose size changed under a stale library would corrupt memory, not raise.
    request_nbytes, statistics_nbytes = (ffi.sizeof(f"struct aio_{x}") for x in ("request", "statistics"))
    expected = library.AIO_ABI * 100_000 + request_nbytes * 100 + statistics_nbytes
    if library.aio_abi() != expected:
        raise ImportError(
            f"{path} was built from another version of aio.h ({library.aio_abi()}, not {expected})\n"
            f"  try: build it again",
            path=str(path),
        )
    return cast("AioLibrary", library)

"""The end of an engine, and memory that must outlive it because the kernel may still use it."""

import os
import time
from dataclasses import dataclass

from infinity.aio.batch import RequestBatch
from infinity.aio.library import SLICE_MS, AioLibrary, CData

EXIT_TIMEOUT_S = 60.0
"""Seconds that the interpreter's exit, or the collection of an open engine, waits for requests in flight."""


@dataclass(frozen=True, slots=True)
class Native:
    """The part of an engine that may outlive its IoEngine: the C engine and its requests, in their order."""

    library: AioLibrary
    pointer: CData
    in_flight: dict[RequestBatch, None]
    pid: int

    def submit_all(self) -> None:
        """Submit what others were to follow, and have not."""
        for batch in list(self.in_flight):
            batch.submit(self.library, self.pointer)


abandoned: list[Native] = []  # engines whose requests never ended: their memory is never reused


def end(native: Native, timeout_s: float | None) -> bool:
    """Stop an engine; returns whether its threads have ended. In a forked child it has none to stop."""
    if native.pid != os.getpid():
        return True
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    native.submit_all()
    native.library.aio_stop(native.pointer)
    while not native.library.aio_stopped(native.pointer, SLICE_MS):
        if end_s is not None and time.monotonic() >= end_s:
            return False
    native.library.aio_join(native.pointer)
    return True


def end_forgotten(native: Native) -> None:
    """End the engine of an IoEngine that was collected, or that was open at exit."""
    over = end(native, EXIT_TIMEOUT_S)
    if not over or not all(batch.has_ended(native.library) for batch in native.in_flight):
        abandoned.append(native)

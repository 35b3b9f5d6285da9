"""The handle of one request, to wait for it."""

import errno
import os
import time
from typing import Protocol

from infinity.aio.batch import RequestBatch, has_ended
from infinity.aio.errors import ForkedError, IoEngineFailedError, IoError, IoTimeoutError, name_of
from infinity.aio.library import IDLE, IN_FLIGHT, SLICE_MS, WRITE, AioLibrary, CData


class Submitter(Protocol):
    """The part of an engine that its completions use."""

    library: AioLibrary
    pid: int
    hang_s: float

    @property
    def pointer(self) -> CData:
        """The C engine."""

    def submit(self, batch: RequestBatch) -> int:
        """Submit the requests of a batch that are still gathered."""

    def submit_gathered(self) -> None:
        """Submit all requests that are still gathered."""

    def release(self, batch: RequestBatch) -> bool:
        """Forget the requests of a batch, if all are over."""

    def refusal(self, number: int) -> Exception:
        """Return the error of a request that was refused."""

    def hangs(self, what: str) -> Exception:
        """Return the error of a request that has not ended after `hang_s`."""


class Named(Protocol):
    """The file of a request."""

    path: str


LEAST_WAIT_S = 5.0
"""Every wait lasts at least so many seconds before it reports a hang, even if the request began long ago."""


class Completion:
    """A read or write that may be in flight.

    Dropping a pending one is harmless: the engine keeps the request and its owner until the kernel is done.
    """

    __slots__ = ("_batch", "_engine", "_file", "_is_over", "_request", "what")

    def __init__(
        self, engine: Submitter, batch: RequestBatch, request: CData, file: Named, what: str
    ) -> None:
        self._engine = engine
        self._batch = batch
        self._request = request
        self._is_over = False  # cached: of the batch, others may run longer
        self._file = file
        self.what = what

    @property
    def done(self) -> bool:
        """Whether the request has ended, successfully or not, without waiting."""
        if self._is_over or self._batch.is_over:
            return True
        state = self._request.state
        if state == IN_FLIGHT:
            return False
        if state == IDLE:
            self._engine.submit(self._batch)
        if has_ended(self._engine.library, self._request):
            self._see_over()
        return self._is_over

    def _see_over(self) -> None:
        self._is_over = True
        self._engine.release(self._batch)

    @property
    def began_s(self) -> float:
        """When the engine accepted the request, in seconds of CLOCK_MONOTONIC (`time.perf_counter`)."""
        if self._request.state == IDLE:
            self._engine.submit(self._batch)
        return float(self._request.began_ns) / 1e9

    @property
    def ended_s(self) -> float | None:
        """When the request ended, on the same clock; None while it runs."""
        if not self.done:
            return None
        return float(self._request.ended_ns) / 1e9

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the request has ended; with `None`, at most until the engine's `hang_s` after it began.

        Time in which the process is stopped (Ctrl-Z, a frozen container) does not count as waiting.

        If a signal raises an exception meanwhile (KeyboardInterrupt), the request stays in flight.

        Raises:
            IoError: it failed; every call raises the same error.
            IoTimeoutError: it is still in flight after `timeout_s` seconds, or the disk hangs.
            IoEngineFailedError: it will never end, because the engine failed.
            ForkedError: it was submitted by the parent of this process.
        """
        if not (self._batch.is_over or self.done):
            self._wait(timeout_s)
            self._see_over()
        if self._request.error:
            raise self._error()

    def _wait(self, timeout_s: float | None) -> None:
        engine, request = self._engine, self._request
        if engine.pid != os.getpid():
            raise ForkedError(f"{self!r} was submitted by process {engine.pid}: wait for it there")
        engine.submit_gathered()
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        patience_s = max(
            engine.hang_s - (time.perf_counter() - self.began_s), min(engine.hang_s, LEAST_WAIT_S)
        )
        while True:
            left_s = patience_s if end_s is None else end_s - time.monotonic()
            slice_ms = min(SLICE_MS, max(0, round(left_s * 1000)))
            result = engine.library.aio_wait(engine.pointer, request, slice_ms)
            if result > 0:
                return
            if result < 0:
                raise IoEngineFailedError.of_engine(-result)
            if end_s is not None and time.monotonic() >= end_s:
                raise IoTimeoutError(errno.ETIMEDOUT, f"not done after {timeout_s} s: {self!r}")
            patience_s -= slice_ms / 1000  # not the clock, which also runs while the process is stopped
            if end_s is None and patience_s < 0.001:
                raise engine.hangs(repr(self))

    def _error(self) -> Exception:
        request = self._request
        if not request.began_ns:
            return self._engine.refusal(request.error)
        return IoError.of_request(
            request.error,
            self._verb,
            self._file.path,
            offset=request.offset,
            nbytes=request.nbytes,
            failed_at=request.error_offset,
            what=self.what,
        )

    @property
    def _verb(self) -> str:
        return "write" if self._request.flags & WRITE else "read"

    def __repr__(self) -> str:
        request = self._request
        if self._engine.library.aio_done(request):
            state = f"failed: {name_of(request.error)}" if request.error else "done"
        else:
            state = "in flight"
        return (
            f"<Completion {self._verb} of {self.what or 'unnamed data'}, {request.nbytes} B"
            f" at {request.offset} of {self._file.path}, {state}>"
        )

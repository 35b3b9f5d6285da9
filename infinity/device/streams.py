"""All that Infinity asks of torch.cuda, in one place, and the host memory that CUDA copies from and to.

`Streams` is small so that a test can stand in for it and see every access in its order. `TorchStreams` has
not run on a GPU yet.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from infinity.device.buffers import Buffers
from infinity.sizes import format_size
from infinity.storage.memory import Arena

logger = logging.getLogger("infinity")

SPARE_NBYTES = 256 << 20
"""Host buffers of downloads that are over stay for the next ones: up to this many bytes, or what the budget
has left for gradients where that is more, beside those made ahead.
"""


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the stream is past it."""

    def synchronize(self) -> None:
        """Make the host wait until the stream is past it."""


class Streams(Protocol):
    """All that is asked of torch.cuda. Streams are what `open` and `current` return; nobody looks inside."""

    def open(self) -> Any:
        """Return a new stream."""

    def current(self) -> Any:
        """Return the stream on which the calling thread computes."""

    def enter(self, stream: Any) -> None:
        """Let the calling thread compute on `stream` from now on."""

    def record(self, stream: Any) -> Event:
        """Return an event behind all that is queued on `stream`."""

    def wait(self, stream: Any, event: Event) -> None:
        """Put what is queued on `stream` from now on behind `event`. The host does not wait."""

    def copy(self, stream: Any, to: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between host and device; both contiguous, of one dtype."""

    def keep(self, stream: Any, tensor: torch.Tensor) -> None:
        """Once dropped, the memory of `tensor` is not given out before what is queued on `stream` then."""

    def lock(self, address: int, nbytes: int) -> str:
        """Page-lock host memory; return why that failed, empty if it did not."""

    def unlock(self, address: int) -> None:
        """Undo `lock`."""


class TorchStreams:
    """Streams of torch.cuda, on one device."""

    def __init__(self, device: torch.device) -> None:
        """Use `device`, which has an index."""
        self._device = device

    def open(self) -> torch.cuda.Stream:
        """See Streams."""
        return torch.cuda.Stream(self._device)

    def current(self) -> torch.cuda.Stream:
        """See Streams."""
        return torch.cuda.current_stream(self._device)

    def enter(self, stream: torch.cuda.Stream) -> None:
        """See Streams."""
        torch.cuda.set_stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """See Streams; who waits for the event leaves its core to others."""
        event: torch.cuda.Event = stream.record_event(torch.cuda.Event(blocking=True))
        return event

    def wait(self, stream: torch.cuda.Stream, event: Any) -> None:
        """See Streams."""
        stream.wait_event(event)

    def copy(self, stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor) -> None:
        """See Streams."""
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def keep(self, stream: torch.cuda.Stream, tensor: torch.Tensor) -> None:
        """See Streams."""
        tensor.record_stream(stream)

    def lock(self, address: int, nbytes: int) -> str:
        """See Streams."""
        runtime: Any = torch.cuda.cudart()
        return self._apart("infinity-pin", lambda: runtime.cudaHostRegister(address, nbytes, 0))

    def unlock(self, address: int) -> None:
        """See Streams."""
        runtime: Any = torch.cuda.cudart()
        failure = self._apart("infinity-unpin", lambda: runtime.cudaHostUnregister(address))
        if failure:
            logger.debug("unlocking host memory: %s", failure)

    def _apart(self, name: str, call: Callable[[], Any]) -> str:
        """Call the runtime for this device in a thread of its own; return why that failed.

        CUDA remembers a failure in the thread that met it, and the next kernel launched there is taken to
        have failed; torch has no way to make it forget. A new thread, on the other hand, is on device 0.
        """
        runtime: Any = torch.cuda.cudart()
        failures: list[str] = []

        def run() -> None:
            with torch.cuda.device(self._device):
                code = int(call())
            if code:
                failures.append(f"{runtime.cudaGetErrorString(runtime.cudaError(code))} ({code})")

        thread = threading.Thread(target=run, name=name)
        thread.start()
        thread.join()
        return failures[0] if failures else ""


class HostMemory(Buffers):
    """Host memory that copies need not wait for: what `pin` is told of, and buffers to download into."""

    def __init__(self, streams: Streams) -> None:
        """Open one stream for each direction."""
        super().__init__()
        self._closed = False
        self._ahead: dict[int, int] = {}
        self._ahead_nbytes = 0
        self.pageable_reason = ""
        """Why some memory could not be page-locked; empty if all could."""
        self.up, self.down = streams.open(), streams.open()
        """The streams of uploads and of downloads."""
        self._streams = streams
        self._pinned: set[int] = set()

    @property
    def spare_nbytes(self) -> int:
        """See Buffers and SPARE_NBYTES; nothing once it is closed."""
        return 0 if self._closed else self._ahead_nbytes + max(SPARE_NBYTES, super().spare_nbytes)

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock existing memory; the first failure is logged."""
        if not nbytes:
            return
        failure = self._streams.lock(address, nbytes)
        if not failure:
            self._pinned.add(address)
        elif not self.pageable_reason:
            self.pageable_reason = failure
            logger.warning(
                "%s of host memory cannot be page-locked: %s. Copies from and to it make the host wait. "
                "Likely cause: a limit on locked memory. Raise it (ulimit -l unlimited; docker run --ulimit "
                "memlock=-1), or give Config a smaller host_memory.",
                format_size(nbytes),
                failure,
            )

    def unpin(self, address: int) -> None:
        """Undo `pin`; nothing for memory that is not page-locked."""
        if address in self._pinned:
            self._pinned.discard(address)
            self._streams.unlock(address)

    def prepare(self, nbytes: int, count: int) -> bool:
        """See Buffers; those that are made here stay."""
        more = count - self._ahead.get(nbytes, 0)
        if more > 0:
            self._ahead[nbytes] = count
            self._ahead_nbytes += more * nbytes
        return super().prepare(nbytes, count)

    def was_made(self, arena: Arena) -> None:
        """Page-lock it."""
        self.pin(arena.address, arena.nbytes)

    def are_dropped(self, arenas: Sequence[Arena]) -> None:
        """Undo that."""
        pinned = [arena.address for arena in arenas if arena.address in self._pinned]
        if pinned:  # nobody may have waited for a download to one, or for an upload of what was offloaded
            self.synchronize()
        for address in pinned:
            self.unpin(address)

    def synchronize(self) -> None:
        """Return when every copy begun so far is over."""
        for stream in (self.up, self.down):
            self._streams.record(stream).synchronize()

    def close(self) -> None:
        """Undo every `pin`, once nothing is copied any more. Buffers still lent stay readable."""
        self._closed = True
        self.trim(0)
        for address in list(self._pinned):
            self.unpin(address)

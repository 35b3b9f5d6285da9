"""The only streams written for a vendor: CUDA's, and ROCm's, which torch calls CUDA as well."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from infinity.device.streams import AcceleratorStreams

logger = logging.getLogger("infinity")


class CudaStreams(AcceleratorStreams):
    """Streams of torch.cuda: only their events let the host sleep, and only its runtime locks memory."""

    def open(self) -> torch.cuda.Stream:
        """See Streams."""
        return torch.cuda.Stream(self._device)

    def current(self) -> torch.cuda.Stream:
        """See Streams."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """See Streams; a host thread that waits for the event sleeps."""
        event: torch.cuda.Event = stream.record_event(torch.cuda.Event(blocking=True))
        return event

    def copy(self, stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor) -> None:
        """See Streams."""
        with torch.cuda.stream(stream):  # torch.Stream is a context manager only since torch 2.7
            to.copy_(source, non_blocking=True)

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
        """Call the CUDA runtime in a new thread; return the reason if it failed, else an empty text.

        CUDA keeps the last error of each thread, and torch would report it at the next kernel launch and has
        no way to clear it. A new thread starts on device 0, so it selects this device first.
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

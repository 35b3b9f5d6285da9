"""Memory that units are resident in.

[Note: blocks]
Where the CPU computes, a unit is resident in memory of our own: page-aligned, so that the disk reads into it
and writes from it, and reused, because the kernel takes longer to hand out fresh pages than a copy takes.
Blocks are reused by exact size: a model has few. What is free counts with what waits for its use; beyond that
share the oldest go back to the system. On another device torch's allocator does all this.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

import torch

from infinity.device import Device
from infinity.memory import Arena


class Blocks(Protocol):
    """Where the memory of resident units comes from. `flat`: a unit's storage, 1-D, 16-bit."""

    def take(self, numel: int) -> torch.Tensor:
        """Return memory for `numel` elements; their content is undefined."""

    def give(self, flat: torch.Tensor) -> None:
        """Take memory back that nobody uses any more."""

    def trim(self, nbytes: int) -> None:
        """Keep at most `nbytes` that nobody uses."""


def wrap(memory: object, numel: int) -> torch.Tensor:
    """Return a bf16 tensor over an object's memory, which it keeps alive."""
    with torch.inference_mode(mode=False), torch.no_grad():
        if not numel:
            return torch.empty(0, dtype=torch.bfloat16)
        return torch.frombuffer(memory, dtype=torch.bfloat16, count=numel)


class HostBlocks:
    """Blocks in host memory; see [Note: blocks]. Safe from any thread."""

    def __init__(self) -> None:
        """Without any."""
        self._free: deque[torch.Tensor] = deque()
        self._free_nbytes = 0
        self._lock = threading.Lock()

    def take(self, numel: int) -> torch.Tensor:
        """Reuse the block given last, for its cache, or map a new one."""
        with self._lock:
            for at in range(len(self._free) - 1, -1, -1):
                if self._free[at].numel() == numel:
                    flat = self._free[at]
                    del self._free[at]
                    self._free_nbytes -= flat.nbytes
                    return flat
        return wrap(Arena(max(2 * numel, 1)).map, numel)

    def give(self, flat: torch.Tensor) -> None:
        """Keep it for reuse."""
        with self._lock:
            self._free.append(flat)
            self._free_nbytes += flat.nbytes

    def trim(self, nbytes: int) -> None:
        """Give the oldest back to the system."""
        with self._lock:
            while self._free_nbytes > max(0, nbytes):
                self._free_nbytes -= self._free.popleft().nbytes


class DeviceBlocks:
    """Memory of another device, from torch's allocator, which reuses it."""

    def __init__(self, device: Device) -> None:
        """Of `device`."""
        self._device = device

    def take(self, numel: int) -> torch.Tensor:
        """Ask torch."""
        with torch.inference_mode(mode=False), torch.no_grad():
            flat = torch.empty(numel, dtype=torch.bfloat16, device=self._device.torch_device)
        self._device.allocated(flat)
        return flat

    def give(self, flat: torch.Tensor) -> None:
        """Leave it to torch."""
        self._device.leaving(flat)

    def trim(self, nbytes: int) -> None:
        """Torch decides."""

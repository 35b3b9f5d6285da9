"""Memory that units are resident in: of our own where the CPU computes, else from torch's allocator."""

from __future__ import annotations

from mmap import mmap
from typing import Protocol

import torch

from infinity.device.buffers import Buffers
from infinity.device.device import Device
from infinity.storage.memory import Ledger


class Blocks(Protocol):
    """Where the memory of resident units comes from. `flat`: a unit's memory, 1-D."""

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for `numel` elements; their content is undefined."""

    def leaving(self, flat: torch.Tensor) -> None:
        """The unit is about to let go of its memory."""


class HostBlocks:
    """Blocks in host memory; those that are free stay as far as a share has room."""

    def __init__(self, share: Ledger) -> None:
        """Without any."""
        self.buffers = Buffers(share)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Borrow a buffer."""
        return self.buffers.lend(numel, dtype)

    def leaving(self, flat: torch.Tensor) -> None:
        """A buffer comes back by itself."""


class DeviceBlocks:
    """Memory of another device, from torch's allocator, which reuses it."""

    def __init__(self, device: Device) -> None:
        """Of `device`."""
        self._device = device

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Ask torch."""
        with torch.inference_mode(mode=False), torch.no_grad():
            flat = torch.empty(numel, dtype=dtype, device=self._device.torch_device)
        self._device.allocated(flat)
        return flat

    def leaving(self, flat: torch.Tensor) -> None:
        """Order what follows behind the uploads that may still write to it."""
        self._device.leaving(flat)


def wrap(memory: mmap, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over mapped memory, which it keeps alive."""
    with torch.inference_mode(mode=False), torch.no_grad():
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=numel)

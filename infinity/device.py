"""The device that computes: where units become resident, and how bytes get there and back.

On the CPU an upload is one copy in memory. On CUDA it is a copy from a pinned slot on a stream of its own;
the stream that computes waits for its event. The CUDA class has not run on a GPU yet.
"""

from __future__ import annotations

from typing import Protocol

import torch

from infinity import kernels
from infinity.errors import ConfigError
from infinity.memory import view


class Device(Protocol):
    """What the lane and the executor ask of a device."""

    torch_device: torch.device

    def upload(self, flat: torch.Tensor, start: int, address: int, numel: int) -> None:
        """Copy `numel` 16-bit elements at `address` to `flat[start:]`; the memory at `address` is free
        afterwards.
        """

    def arrived(self) -> None:
        """Make later work of the calling thread's stream see every upload so far."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` contiguous and in host memory (itself where it is)."""


class CpuDevice:
    """The CPU computes."""

    def __init__(self) -> None:
        """Nothing to open."""
        self.torch_device = torch.device("cpu")

    def upload(self, flat: torch.Tensor, start: int, address: int, numel: int) -> None:
        """One copy in memory."""
        kernels.copy(2 * numel, flat.data_ptr() + 2 * start, address)

    def arrived(self) -> None:
        """Copies on the CPU are over when they return."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, made contiguous if it is not."""
        return tensor.contiguous()


class CudaDevice:
    """One CUDA device computes."""

    def __init__(self, name: str) -> None:
        """Open a copy stream on `name`."""
        self.torch_device = torch.device(name)
        self._stream = torch.cuda.Stream(self.torch_device)

    def upload(self, flat: torch.Tensor, start: int, address: int, numel: int) -> None:
        """Copy on the copy stream, and wait: the slot is reused as soon as this returns."""
        host = torch.frombuffer(view(address, 2 * numel), dtype=flat.dtype)
        with torch.cuda.stream(self._stream):
            flat[start : start + numel].copy_(host, non_blocking=True)
        self._stream.synchronize()

    def arrived(self) -> None:
        """Order the current stream behind the copy stream."""
        torch.cuda.current_stream(self.torch_device).wait_stream(self._stream)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to host memory."""
        return tensor.contiguous().cpu()


def open_device(name: str) -> Device:
    """Return the device called `name`.

    Raises: ConfigError for a CUDA device that is not there.
    """
    if name == "cpu":
        return CpuDevice()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (torch.device(name).index or 0) >= count:
        raise ConfigError(
            f"device={name!r}: torch {torch.__version__} sees {count} CUDA devices; use device='cpu'"
        )
    return CudaDevice(name)

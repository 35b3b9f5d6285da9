"""deepspeed.accelerator: the device that computes. Other calls are those of torch.cuda or torch.cpu."""

from __future__ import annotations

import functools
from typing import Any

import psutil
import torch

from infinity.deepspeed.launch import local_rank


class Accelerator:
    """A GPU: the calls that torch.cuda does not have, or has under another name."""

    kind = "cuda"
    backend = "nccl"
    module: Any = torch.cuda

    def __getattr__(self, name: str) -> Any:
        """Look up a name in torch.cuda or torch.cpu."""
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(
                f"get_accelerator() has no {name!r}, nor has torch.{self.kind}; ask torch, with "
                "get_accelerator().device_name()"
            ) from None

    def is_synchronized_device(self) -> bool:
        """Whether an operation is complete when its call returns."""
        return False

    def device_name(self, device_index: int | None = None) -> str:
        """Return the name that torch.device takes."""
        return self.kind if device_index is None else f"{self.kind}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Return torch's device, which is a context manager."""
        return torch.device(self.device_name(device_index))

    def current_device_name(self) -> str:
        """Return the name of this rank's device."""
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        """Return torch.distributed's backend for the device."""
        return self.backend

    def is_fp16_supported(self) -> bool:
        """Whether models may compute in fp16."""
        return True

    def is_triton_supported(self) -> bool:
        """Whether Triton's kernels run."""
        return False

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the types that models may compute in."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device's memory, or the machine's."""
        return int(torch.cuda.get_device_properties(device_index or 0).total_memory)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return the tensor in pinned memory, where there is a GPU."""
        return tensor.pin_memory()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type == self.kind


class CpuAccelerator(Accelerator):
    """The CPU: torch.cuda's calls, with the process and the machine in the place of a device."""

    kind = "cpu"
    backend = "gloo"
    module = torch.cpu

    def is_synchronized_device(self) -> bool:
        """Return True."""
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cpu"."""
        return self.kind

    def current_device(self) -> int:
        """Return this rank's number on the machine."""
        return local_rank()

    def is_bf16_supported(self) -> bool:
        """Return True."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Seed this rank's random numbers."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes in use by this process."""
        return int(psutil.Process().memory_info().rss)

    max_memory_allocated = memory_allocated

    def empty_cache(self, device_index: int | None = None) -> None:
        """Do nothing."""

    reset_peak_memory_stats = empty_cache

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the machine's memory."""
        return int(psutil.virtual_memory().total)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return the tensor as it is."""
        return tensor


@functools.cache
def get_accelerator() -> Accelerator:
    """Return the device that computes on this machine."""
    return Accelerator() if torch.cuda.is_available() else CpuAccelerator()


__all__ = ["Accelerator", "get_accelerator"]

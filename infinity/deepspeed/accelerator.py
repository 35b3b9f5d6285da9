"""deepspeed.accelerator: the device that computes. Other calls are those of torch.cuda or torch.cpu."""

from __future__ import annotations

import functools
from typing import Any

import psutil
import torch

from infinity.deepspeed.launch import local_rank


class Accelerator:
    """The GPU, or the CPU on a machine without one."""

    def __init__(self, kind: str) -> None:
        """kind: "cuda" or "cpu"."""
        self._kind = kind
        self._module: Any = torch.cuda if kind == "cuda" else torch.cpu

    def __getattr__(self, name: str) -> Any:
        """Look up a name in torch.cuda or torch.cpu."""
        try:
            return getattr(self._module, name)
        except AttributeError:
            raise AttributeError(
                f"get_accelerator() has no {name!r}, nor has torch.{self._kind}; ask torch, with "
                "get_accelerator().device_name()"
            ) from None

    @property
    def _gpu(self) -> bool:
        return self._kind == "cuda"

    def is_available(self) -> bool:
        """Return True."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether an operation is complete when its call returns."""
        return not self._gpu

    def device_name(self, device_index: int | None = None) -> str:
        """Return the name that torch.device takes."""
        return self._kind if device_index is None or not self._gpu else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Return torch's device, which is a context manager."""
        return torch.device(self.device_name(device_index))

    def device_count(self) -> int:
        """Return the number of devices on this machine."""
        return torch.cuda.device_count() if self._gpu else 1

    def current_device(self) -> int:
        """Return the number of this rank's device; on a CPU the rank on the machine."""
        return torch.cuda.current_device() if self._gpu else local_rank()

    def current_device_name(self) -> str:
        """Return the name of this rank's device."""
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        """Make the device of this number this rank's."""
        if self._gpu:
            torch.cuda.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device is idle."""
        if self._gpu:
            torch.cuda.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """Return torch.distributed's backend for the device."""
        return "nccl" if self._gpu else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether models may compute in bf16."""
        return torch.cuda.is_bf16_supported() if self._gpu else True

    def is_fp16_supported(self) -> bool:
        """Whether models may compute in fp16."""
        return True

    def is_triton_supported(self) -> bool:
        """Whether Triton's kernels run."""
        return False

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the types that models may compute in."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def manual_seed(self, seed: int) -> None:
        """Seed this rank's random numbers."""
        (torch.cuda.manual_seed if self._gpu else torch.manual_seed)(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the random numbers of all devices."""
        (torch.cuda.manual_seed_all if self._gpu else torch.manual_seed)(seed)

    def empty_cache(self) -> None:
        """Free the memory that torch caches."""
        if self._gpu:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes in use, on the device or by this process."""
        return torch.cuda.memory_allocated(device_index) if self._gpu else psutil.Process().memory_info().rss

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the most bytes in use so far; on a CPU those in use now."""
        return torch.cuda.max_memory_allocated(device_index) if self._gpu else self.memory_allocated()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Restart max_memory_allocated."""
        if self._gpu:
            torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device's memory, or the machine's."""
        if self._gpu:
            return int(torch.cuda.get_device_properties(device_index or 0).total_memory)
        return int(psutil.virtual_memory().total)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return the tensor in pinned memory, where there is a GPU."""
        return tensor.pin_memory() if self._gpu else tensor

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type == self._kind


@functools.cache
def get_accelerator() -> Accelerator:
    """Return the device that computes on this machine."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")


__all__ = ["Accelerator", "get_accelerator"]

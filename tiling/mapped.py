"""Large tensors of the CPU's, in memory of their own.

[Note: mapped tensors]
Once malloc has seen blocks of some MiB freed, it takes such blocks from its heap. There small objects settle
in what was freed, the next block of the same size no longer fits, and the heap grows: by twice what a tiled
layer ever holds at a time (measured: 40 MiB for 19). So what tiles and slices make and let go of in turn is
mapped: it takes what it fills, in huge pages where the kernel has them, and goes when its tensor does. What
others' operations make between is malloc's; of that the holes are given back, slice by slice.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Sequence

import torch

LARGE_NBYTES = 1 << 20
"""Of a tensor that is mapped, at least."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a contiguous tensor of any values."""
    found = _mapped(shape, dtype, device)
    return torch.empty(shape, dtype=dtype, device=device) if found is None else found


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a contiguous tensor of zeros: fresh pages are nothing else."""
    found = _mapped(shape, dtype, device)
    return torch.zeros(shape, dtype=dtype, device=device) if found is None else found


def give_back() -> None:
    """Have malloc give the pages back of which it uses nothing (glibc; elsewhere nothing happens)."""
    _malloc_trim()(0)


@functools.cache
def _malloc_trim() -> Callable[[int], object]:
    found: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
    return found


def _mapped(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    numel = math.prod(shape)
    if device.type != "cpu" or numel * dtype.itemsize < LARGE_NBYTES:
        return None
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    storage = torch.frombuffer(memory, dtype=dtype, count=numel).untyped_storage()
    # Not a view: to write into a view is another thing for autograd, which copies its gradient.
    found: torch.Tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape))  # type: ignore[call-overload]
    return found

"""Large tensors of the CPU's, in memory of their own.

[Note: mapped tensors]
Once malloc has seen blocks of some MiB freed, it takes such blocks from its heap. There small objects settle
in what was freed, the next block of the same size no longer fits, and the heap grows: by twice what a tiled
layer ever holds at a time (measured: 40 MiB for 19). So what tiles and slices make and let go of in turn is
mapped: it takes what it fills, in huge pages where the kernel has them, and goes when its tensor does. What
others' operations make between is malloc's; of that the holes are given back, slice by slice.

The kernel fills fresh pages with zeros: of a layer in fp32, a twentieth of its time went there. So where
tensors of one size follow one another, a `Room` lends each the memory of the one before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import weakref
from collections.abc import Callable, Sequence

import numpy as np
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


class Room:
    """Memory for tensors of which, as a rule, one has gone before the next is made. It is held until then."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._lent: weakref.ref[object] | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous tensor of any values: where the last one was, if that is gone and as large."""
        nbytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or nbytes < LARGE_NBYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        free = self._lent is None or self._lent() is None
        if self._memory is None or not free or len(self._memory) != nbytes:
            self._memory = None  # before there is more
            self._memory = _map(nbytes)
        lent = np.frombuffer(self._memory, np.uint8)  # lives as long as the tensor's storage
        self._lent = weakref.ref(lent)
        return _tensor(lent, shape, dtype)

    def clear(self) -> None:
        """Hold nothing: what is lent goes with its tensor."""
        self._memory = self._lent = None


def _mapped(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < LARGE_NBYTES:
        return None
    return _tensor(_map(nbytes), shape, dtype)


def _map(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _tensor(memory: object, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    # Not a view: to write into a view is another thing for autograd, which copies its gradient.
    found: torch.Tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape))  # type: ignore[call-overload]
    return found

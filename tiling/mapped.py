"""Large CPU tensors in memory mappings of their own.

[Note: mapped tensors]
Once blocks of some MiB have been freed, malloc serves such blocks from its heap. Small objects then settle in
the gaps, the next block of the same size no longer fits, and the heap grows: by twice what a tiled layer ever
holds at a time (measured: 40 MiB for 19). The tensors that tiles and slices allocate and free in turn are
therefore mapped: a mapping takes the memory that the tensor fills, in huge pages where the kernel has them,
and ends with the tensor.

The kernel fills new pages with zeros, which cost a twentieth of the time of an fp32 layer. Where tensors of
one size follow one another, a `ReusableBuffer` gives each the memory of the one before; a `BufferPool` does
the same where several exist at a time. A mapping is populated at once by the thread that makes it: two
threads that fault on the same huge page at once may need milliseconds, twenty times as long.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

LARGE_NBYTES = 1 << 20
"""The smallest tensor that is mapped."""
HUGE_NBYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python's mmap has no name for it


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised contiguous tensor."""
    nbytes = math.prod(shape) * dtype.itemsize
    if _is_small(nbytes, device):
        return torch.empty(shape, dtype=dtype, device=device)
    return _tensor(_map(nbytes), shape, dtype)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a contiguous tensor of zeros. A new mapping is zero already."""
    if _is_small(math.prod(shape) * dtype.itemsize, device):
        return torch.zeros(shape, dtype=dtype, device=device)
    return empty(shape, dtype, device)


def _is_small(nbytes: int, device: torch.device) -> bool:
    """Whether a tensor is allocated as usual: it is small, or not on the CPU."""
    return device.type != "cpu" or nbytes < LARGE_NBYTES


class Allocator(Protocol):
    """Provides memory for results."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor."""
        ...


class ReusableBuffer:
    """Memory for tensors of one size that usually exist one after another. It is kept between them."""

    def __init__(self) -> None:
        self._memory: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._lent: weakref.ref[object] | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised contiguous tensor, in the last one's memory if that is free and fits."""
        nbytes = math.prod(shape) * dtype.itemsize
        if _is_small(nbytes, device):
            return torch.empty(shape, dtype=dtype, device=device)
        if self._memory is None or not self.is_free() or len(self._memory) != nbytes:
            self._memory = None  # frees the old memory before there is more
            self._memory = _map(nbytes)
        lent = self._memory[:]  # lives as long as the tensor's storage
        self._lent = weakref.ref(lent)
        return _tensor(lent, shape, dtype)

    def is_free(self) -> bool:
        """Whether the last tensor has been freed, or there was none."""
        return self._lent is None or self._lent() is None

    def clear(self) -> None:
        """Drop the memory; a tensor in it keeps it for as long as it lives."""
        self._memory = self._lent = None


class BufferPool:
    """Memory for tensors of several sizes that are allocated and freed in turn, some at the same time.

    The pool holds at most 9/8 of the largest number of bytes in use at one time; the eighth keeps a small
    tensor from evicting a large buffer.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[int, ReusableBuffer]] = []  # with their bytes; the last one used comes last
        self._most = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised contiguous tensor, if possible in the memory of a freed one of its size."""
        nbytes = math.prod(shape) * dtype.itemsize
        if _is_small(nbytes, device):
            return torch.empty(shape, dtype=dtype, device=device)
        free = [one for one in self._buffers if one[1].is_free()]
        found = next((one for one in reversed(free) if one[0] == nbytes), None)
        if found is None:
            self._make_space(nbytes, free)
            found = nbytes, ReusableBuffer()
        else:
            self._buffers.remove(found)
        self._buffers.append(found)
        return found[1].empty(shape, dtype, device)

    def clear(self) -> None:
        """Drop all memory, as ReusableBuffer does."""
        self._buffers.clear()

    def _make_space(self, nbytes: int, free: list[tuple[int, ReusableBuffer]]) -> None:
        """Drop the buffers that have been free for longest, before the pool grows beyond its limit."""
        held = nbytes + sum(size for size, _ in self._buffers)
        self._most = max(self._most, held - sum(size for size, _ in free))
        for one in free:
            if held <= self._most * 9 // 8:
                break
            self._buffers.remove(one)
            held -= one[0]


def _map(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Map memory aligned to a huge page, in huge pages as far as it fills them."""
    memory = mmap.mmap(-1, nbytes + HUGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_NBYTES
    full = nbytes // HUGE_NBYTES * HUGE_NBYTES
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE) if full else ():
        with contextlib.suppress(OSError):  # the kernel does not know this advice
            memory.madvise(advice, start, full)
    return np.frombuffer(memory, np.uint8, nbytes, start)


def _tensor(memory: object, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    # Not a view: autograd treats writes into a view differently, and would copy its gradient.
    found: torch.Tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape))  # type: ignore[call-overload]
    return found

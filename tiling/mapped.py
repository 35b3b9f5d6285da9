"""Large tensors of the CPU's, in memory of their own.

[Note: mapped tensors]
Once malloc has seen blocks of some MiB freed, it takes such blocks from its heap. There small objects settle
in what was freed, the next block of the same size no longer fits, and the heap grows: by twice what a tiled
layer ever holds at a time (measured: 40 MiB for 19). So what tiles and slices make and let go of in turn is
mapped: it takes what it fills, in huge pages where the kernel has them, and goes when its tensor does.

The kernel fills fresh pages with zeros: of a layer in fp32, a twentieth of its time went there. So where
tensors of one size follow one another, a `ReusableBuffer` lends each the memory of the one before, and a
`BufferPool` does so where there are several at a time. What is mapped is filled by the thread that maps it:
two that run into the same huge page at once may take milliseconds over it, twenty times as long.
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
"""Of a tensor that is mapped, at least."""
HUGE_NBYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # of Linux 5.14 on; Python's mmap has no name for it


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a contiguous tensor of any values."""
    found = _mapped(shape, dtype, device)
    return torch.empty(shape, dtype=dtype, device=device) if found is None else found


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a contiguous tensor of zeros: fresh pages are nothing else."""
    found = _mapped(shape, dtype, device)
    return torch.zeros(shape, dtype=dtype, device=device) if found is None else found


class Lender(Protocol):
    """Who has memory for a result."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of any values."""
        ...


class ReusableBuffer:
    """Memory for tensors of which, as a rule, one has gone before the next is made. It is held until then."""

    def __init__(self) -> None:
        self._memory: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._lent: weakref.ref[object] | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous tensor of any values: where the last one was, if that is gone and as large."""
        nbytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or nbytes < LARGE_NBYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        if self._memory is None or not self.is_free() or len(self._memory) != nbytes:
            self._memory = None  # before there is more
            self._memory = _map(nbytes)
        lent = self._memory[:]  # lives as long as the tensor's storage
        self._lent = weakref.ref(lent)
        return _tensor(lent, shape, dtype)

    def is_free(self) -> bool:
        """Whether the tensor lent last has gone, if there was one."""
        return self._lent is None or self._lent() is None

    def clear(self) -> None:
        """Hold nothing: what is lent goes with its tensor."""
        self._memory = self._lent = None


class BufferPool:
    """Memory for tensors of several sizes, made and let go of in turn, of which some are there at a time.

    At most as much is held as was lent at one time, and an eighth: for a small one no large one goes.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[int, ReusableBuffer]] = []  # bytes, and where; those lent last come last
        self._most = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous tensor of any values, where one as large was that has gone."""
        nbytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or nbytes < LARGE_NBYTES:
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
        """Hold nothing, as there."""
        self._buffers.clear()

    def _make_space(self, nbytes: int, free: list[tuple[int, ReusableBuffer]]) -> None:
        """Let go of what is free for longest, before there is more than was lent at one time."""
        held = nbytes + sum(size for size, _ in self._buffers)
        self._most = max(self._most, held - sum(size for size, _ in free))
        for one in free:
            if held <= self._most * 9 // 8:
                break
            self._buffers.remove(one)
            held -= one[0]


def _mapped(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < LARGE_NBYTES:
        return None
    return _tensor(_map(nbytes), shape, dtype)


def _map(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Map memory that begins where a huge page does, and is of huge pages as far as it fills them."""
    memory = mmap.mmap(-1, nbytes + HUGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_NBYTES
    full = nbytes // HUGE_NBYTES * HUGE_NBYTES
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE) if full else ():
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(advice, start, full)
    return np.frombuffer(memory, np.uint8, nbytes, start)


def _tensor(memory: object, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    # Not a view: to write into a view is another thing for autograd, which copies its gradient.
    found: torch.Tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape))  # type: ignore[call-overload]
    return found

"""Host memory that is lent as tensors and reused.

[Note: buffers]
Units and gradients are allocated and freed all the time, in a few sizes. With malloc they would either
fragment the heap (measured: twice the memory) or, if mapped and unmapped each time, cost more in page faults
than the copies do (measured: a tenth of a step). So they lie in reused buffers of exactly their size. Buffers
are page-aligned, so that the disk can read into them and write from them directly.

A finalizer returns a buffer when its last tensor is gone. weakref's registry of finalizers lives for ever.
The finalizer therefore refers to the buffer itself, but to `Buffers` only weakly. The number of buffers to
keep comes from ledgers, which hold numbers only. Otherwise a lent buffer would keep the whole engine alive.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence

import torch

from infinity.storage.memory import Arena, Ledger, framed_nbytes


class Buffers:
    """Buffers, each lent for as long as any tensor shares its memory.

    Any thread may borrow a buffer or drop its last tensor. A tensor that outlives this object keeps only its
    own buffer.

    shares: free buffers are kept for reuse as far as these shares of the budget have free bytes.
    """

    def __init__(self, *shares: Ledger) -> None:
        self.shares = shares
        self.made = 0
        """Buffers allocated since the start; constant in the steady state."""
        self.lent_nbytes = 0
        """Bytes of the buffers that are lent now."""
        self._free: list[Arena] = []  # the longest idle first
        self._there: Counter[int] = Counter()  # number of buffers, free or lent, by their bytes
        self._lock = threading.RLock()  # reentrant: a tensor may be collected at any moment, here too
        self._pid = os.getpid()

    def share(self, *shares: Ledger) -> None:
        """Replace the shares that limit the free buffers to keep."""
        self.shares = shares

    @property
    def spare_nbytes(self) -> int:
        """Bytes of free buffers to keep; beyond that the longest idle ones are freed."""
        spare = 0
        for share in self.shares:
            spare += share.free_nbytes
        return spare

    @property
    def free_nbytes(self) -> int:
        """Bytes of free buffers."""
        return sum(arena.nbytes for arena in list(self._free))

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised 1-D tensor in a buffer of its own."""
        return self._tensor(numel, dtype)

    def take_framed(self, numel: int, dtype: torch.dtype, skew_nbytes: int) -> torch.Tensor:
        """Likewise, one that begins `skew_nbytes` behind the begin of a page, in a buffer of `framed_nbytes`:
        the pages in which it begins and ends are its own.
        """
        return self._tensor(numel, dtype, framed_nbytes(numel * dtype.itemsize), skew_nbytes)

    def _tensor(
        self, numel: int, dtype: torch.dtype, buffer_nbytes: int = 0, skew_nbytes: int = 0
    ) -> torch.Tensor:
        own_nbytes = numel * dtype.itemsize
        nbytes = buffer_nbytes or own_nbytes
        with torch.inference_mode(mode=False):
            if not numel:
                return torch.empty(0, dtype=dtype, device="cpu")
            arena = self._take(nbytes) or self._make(nbytes, on_huge_pages=buffer_nbytes > 0)
            self._lend(nbytes)
            memory = (ctypes.c_char * own_nbytes).from_address(arena.address + skew_nbytes)
            # torch keeps `memory` until nothing shares the storage; the finalizer then returns the buffer.
            weakref.finalize(memory, _come_back, weakref.ref(self), arena).atexit = False
            return torch.frombuffer(memory, dtype=dtype)

    def prepare(self, nbytes: int, count: int) -> bool:
        """Make buffers of `nbytes` until there are `count`, free or lent; returns whether one is free now."""
        for _ in range(count - self._there[nbytes]):
            self._give_back(self._make(nbytes))
        with self._lock:
            return any(arena.nbytes == nbytes for arena in self._free)

    def _take(self, nbytes: int) -> Arena | None:
        with self._lock:
            for arena in reversed(list(self._free)):
                # `in`: a garbage collection during this loop may have trimmed it.
                if arena.nbytes == nbytes and arena in self._free:
                    self._free.remove(arena)
                    return arena
        return None

    def _lend(self, nbytes: int) -> None:
        """Count bytes that are lent from now on; fewer if negative."""
        with self._lock:
            self.lent_nbytes += nbytes

    def _make(self, nbytes: int, *, on_huge_pages: bool = False) -> Arena:
        self.made += 1
        self.trim(self.spare_nbytes)
        arena = Arena(nbytes, on_huge_pages=on_huge_pages)
        with self._lock:
            self._there[nbytes] += 1
        self.was_made(arena)
        return arena

    def _come_back(self, arena: Arena) -> None:
        if os.getpid() != self._pid:  # a forked child has not inherited the memory
            return
        self._lend(-arena.nbytes)
        self._give_back(arena)

    def _give_back(self, arena: Arena) -> None:
        with self._lock:
            self._free.append(arena)
        self.trim(self.spare_nbytes)

    def trim(self, nbytes: int) -> None:
        """Keep at most `nbytes` of free buffers."""
        dropped = []
        with self._lock:
            while self._free and self.free_nbytes > nbytes:
                dropped.append(self._free.pop(0))
                self._there[dropped[-1].nbytes] -= 1
            self.are_dropped(dropped)

    def was_made(self, arena: Arena) -> None:
        """Hook: called with each new buffer."""

    def are_dropped(self, arenas: Sequence[Arena]) -> None:
        """Hook: called before buffers are freed."""


def _come_back(lender: weakref.ref[Buffers], arena: Arena) -> None:
    """Return a buffer to its lender; if that is gone, the buffer is freed."""
    buffers = lender()
    if buffers is not None:
        buffers._come_back(arena)  # noqa: SLF001

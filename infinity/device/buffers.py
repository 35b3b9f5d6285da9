"""Host memory that is lent as tensors and reused.

[Note: buffers]
Units and gradients come and go all the time, in a few sizes. Taken from malloc they either leave holes
between what stays (measured: twice the memory) or, mapped and unmapped each time, cost more in page faults
than copies do (measured: a tenth of a step). So they lie in buffers of exactly their size, page-aligned, so
that the disk reads into them and writes from them, and reused.

What is lent says by a finalizer that it is back, and weakref's registry of finalizers lives for ever. So the
finalizer reaches no more than the buffer itself, and all of `Buffers` only weakly; and how many may stay is
asked of ledgers, which are numbers, not of whoever keeps them. Else what an engine lends would keep it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence

import torch

from infinity.storage.memory import Arena, Ledger


class Buffers:
    """Buffers, each lent as long as any tensor shares its memory; they come back by themselves.

    Any thread may borrow, and be the last to let go. Who still has something that was lent when all else is
    gone keeps that alone.
    """

    def __init__(self, *shares: Ledger) -> None:
        """Begin without any. Free buffers stay for reuse as far as `shares` have room."""
        self.shares = shares
        self.made = 0
        """Buffers allocated since the start; in the steady state no more are."""
        self._free: list[Arena] = []  # the longest idle first
        self._there: Counter[int] = Counter()  # buffers, free or lent, by their bytes
        self._lock = threading.RLock()  # a tensor may be collected at any moment, here too
        self._pid = os.getpid()

    def share(self, *shares: Ledger) -> None:
        """Let free buffers stay as far as these shares have room."""
        self.shares = shares

    @property
    def spare_nbytes(self) -> int:
        """Bytes of free buffers that stay; beyond that the one that lay idle the longest goes back to the
        system.
        """
        return sum(share.free_nbytes for share in self.shares)

    @property
    def free_nbytes(self) -> int:
        """Bytes of buffers that nobody uses."""
        return sum(arena.nbytes for arena in list(self._free))

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of undefined content in a buffer of its own."""
        nbytes = numel * dtype.itemsize
        with torch.inference_mode(mode=False), torch.no_grad():
            if not numel:
                return torch.empty(0, dtype=dtype)
            arena = self._take(nbytes) or self._make(nbytes)
            memory = (ctypes.c_char * nbytes).from_address(arena.address)
            # torch keeps `memory` until nothing shares the storage; then the buffer is back.
            weakref.finalize(memory, _come_back, weakref.ref(self), arena).atexit = False
            return torch.frombuffer(memory, dtype=dtype)

    def prepare(self, nbytes: int, count: int) -> bool:
        """Make buffers of `nbytes` until there are `count`, lent ones included; whether one is free now."""
        for _ in range(count - self._there[nbytes]):
            self._give_back(self._make(nbytes))
        with self._lock:
            return any(arena.nbytes == nbytes for arena in self._free)

    def _take(self, nbytes: int) -> Arena | None:
        with self._lock:
            for arena in reversed(list(self._free)):
                if (
                    arena.nbytes == nbytes and arena in self._free
                ):  # a collection meanwhile may have trimmed it
                    self._free.remove(arena)
                    return arena
        return None

    def _make(self, nbytes: int) -> Arena:
        self.made += 1
        self.trim(self.spare_nbytes)
        arena = Arena(nbytes)
        with self._lock:
            self._there[nbytes] += 1
        self.was_made(arena)
        return arena

    def _give_back(self, arena: Arena) -> None:
        if os.getpid() != self._pid:  # a forked child has not inherited the memory
            return
        with self._lock:
            self._free.append(arena)
        self.trim(self.spare_nbytes)

    def trim(self, nbytes: int) -> None:
        """Keep free buffers of `nbytes` at most."""
        dropped = []
        with self._lock:
            while self._free and self.free_nbytes > nbytes:
                dropped.append(self._free.pop(0))
                self._there[dropped[-1].nbytes] -= 1
        self.are_dropped(dropped)

    def was_made(self, arena: Arena) -> None:
        """Called with each new buffer."""

    def are_dropped(self, arenas: Sequence[Arena]) -> None:
        """Called before buffers go back to the system."""


def _come_back(lender: weakref.ref[Buffers], arena: Arena) -> None:
    """Take a buffer back; where nobody is there to take it, it goes back to the system."""
    buffers = lender()
    if buffers is not None:
        buffers._give_back(arena)  # noqa: SLF001

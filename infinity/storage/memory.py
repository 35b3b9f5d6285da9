"""Host memory that Infinity keeps: what is mapped for it, the slots that I/O goes through, and ledgers."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from dataclasses import dataclass

import cffi

_FFI = cffi.FFI()

_INT_MOST = (1 << 31) - 1  # what mallopt takes


class Arena:
    """Page-aligned anonymous memory, not inherited by forked children; given back when dropped."""

    def __init__(self, nbytes: int) -> None:
        """Map `nbytes` bytes, zero until written; pages are taken when they are first touched."""
        self.nbytes = nbytes
        self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_DONTFORK)
        if nbytes >= 1 << 21:
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self._pointer = _FFI.from_buffer(self.map)
        self.address = int(_FFI.cast("uintptr_t", self._pointer))


def view(address: int, nbytes: int) -> memoryview:
    """Return the `nbytes` bytes at `address` as a writable buffer. The caller keeps the memory alive."""
    return memoryview(_FFI.buffer(_FFI.cast("char *", address), nbytes))


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MAPPED_FROM_MOST = 32 << 20  # glibc's limit


def map_large_blocks() -> None:
    """Let malloc map blocks of 1 MiB and more, while a model is built (glibc; elsewhere nothing happens).

    What is built is large and stays for a while: freed, it would leave holes among small objects that stay,
    which count as ours (measured: 0.6 GiB).
    """
    _tell_malloc(1 << 20, 2 << 20)


def reuse_large_blocks(outgoing_nbytes: int) -> None:
    """Let malloc keep what operations free, for the next ones, while a model is trained.

    Mapping it anew costs page faults in every operation, and what is large and stays has buffers of its own.
    outgoing_nbytes: the budget's share of gradients on their way. A backward may end with all of it freed at
    once; the next one wants it again, and it is the budget's all the time.
    """
    _tell_malloc(_MAPPED_FROM_MOST, max(2 * _MAPPED_FROM_MOST, outgoing_nbytes))


def _tell_malloc(mapped_from_nbytes: int, kept_nbytes: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, mapped_from_nbytes)
        mallopt(_M_TRIM_THRESHOLD, min(kept_nbytes, _INT_MOST))


@dataclass(frozen=True, slots=True)
class Slot:
    """A leased piece of the pool; fields of one tile lie in it one behind the other."""

    address: int
    nbytes: int


class Pool:
    """Equal slots in one arena. Used from one thread, the lane that moves records."""

    def __init__(self, slot_nbytes: int, count: int) -> None:
        """Allocate `count` slots of `slot_nbytes` bytes."""
        self.slot_nbytes = slot_nbytes
        self.count = count
        self.nbytes = slot_nbytes * count
        self._arena = Arena(self.nbytes)
        self.address = self._arena.address
        self._ran_out_s = self._refilled_s = 0.0
        self._free = [Slot(self.address + index * slot_nbytes, slot_nbytes) for index in range(count)]

    @property
    def free(self) -> int:
        """Slots not leased."""
        return len(self._free)

    def lease(self) -> Slot:
        """Take a free slot; the caller has seen that there is one."""
        slot = self._free.pop()
        if not self._free:
            self._ran_out_s = time.perf_counter()
        return slot

    def give_back(self, slot: Slot) -> None:
        """Return a slot whose I/O is over."""
        if not self._free:
            self._refilled_s = time.perf_counter()
        self._free.append(slot)

    def lacked_s(self, since_s: float) -> float:
        """Return the seconds, from `since_s` on, of the last time in which no slot was free, now over."""
        return max(0.0, self._refilled_s - max(self._ran_out_s, since_s))


class Ledger:
    """One share of the budget: bytes that may be held, and bytes that are."""

    def __init__(self, limit_nbytes: int) -> None:
        """Open a share of `limit_nbytes`."""
        self.limit_nbytes = limit_nbytes
        self.held_nbytes = 0
        self.peak_nbytes = 0
        self.aside_nbytes = 0
        """Bytes that are promised, and not to be had by `try_reserve`."""
        self._lock = threading.RLock()  # a gradient that is collected gives its bytes back, at any moment
        self._pid = os.getpid()

    def resize(self, limit_nbytes: int) -> None:
        """Let the share be of another size; what is held stays held."""
        self.limit_nbytes = limit_nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes that nobody holds."""
        return self.limit_nbytes - self.held_nbytes

    def try_reserve(self, nbytes: int) -> bool:
        """Take `nbytes` if the share has them."""
        with self._lock:
            if nbytes > self.free_nbytes - self.aside_nbytes:
                return False
            self.reserve_anyway(nbytes)
            return True

    def reserve_anyway(self, nbytes: int) -> None:
        """Take `nbytes` beyond the limit, for what has to exist whatever the budget says."""
        with self._lock:
            self.held_nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.held_nbytes)

    def set_aside(self, nbytes: int) -> None:
        """Promise `nbytes` more (fewer, if negative) to what will be reserved later."""
        with self._lock:
            self.aside_nbytes += nbytes

    def release(self, nbytes: int) -> None:
        """Give back `nbytes` that were reserved. A forked child, whose lock nobody may free, keeps them."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self.held_nbytes -= nbytes

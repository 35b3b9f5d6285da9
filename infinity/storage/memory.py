"""Host memory: mapped arenas, the pool of I/O slots, and the ledgers that count bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from dataclasses import dataclass

import cffi

from infinity.errors import ConfigError
from infinity.sizes import BLOCK, round_up

_FFI = cffi.FFI()

_INT_MOST = (1 << 31) - 1  # what mallopt takes
HUGE = 2 << 20
"""Bytes of a huge page, as most systems have them."""


class Arena:
    """Page-aligned anonymous memory, zero at first; not inherited by forks, and unmapped when dropped."""

    def __init__(self, nbytes: int, *, on_huge_pages: bool = False) -> None:
        """Map it. on_huge_pages: it begins on a huge page, and lies in such as far as it fills them; `map`
        begins before it.
        """
        self.nbytes = nbytes
        aligned = on_huge_pages and nbytes >= HUGE
        self.map = mmap.mmap(
            -1, nbytes + (HUGE if aligned else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self.map.madvise(mmap.MADV_DONTFORK)
        self._pointer = _FFI.from_buffer(self.map)
        begin = int(_FFI.cast("uintptr_t", self._pointer))
        self.address = round_up(begin, HUGE) if aligned else begin
        if aligned:  # what lies around it is never touched, and is to take no memory
            self.map.madvise(mmap.MADV_NOHUGEPAGE)
            self.map.madvise(mmap.MADV_HUGEPAGE, self.address - begin, nbytes // HUGE * HUGE)
        elif nbytes >= HUGE:
            self.map.madvise(mmap.MADV_HUGEPAGE)
        _ARENAS.add(self)


def framed_nbytes(nbytes: int) -> int:
    """Return the bytes of an arena with a page more than `nbytes`, nearly all of it in huge pages: a drive
    that is given many small pages at once may read half as fast. 0 where that would take, or leave in small
    pages, more than an eighth.
    """
    whole, rest = divmod(nbytes + BLOCK, HUGE)
    if whole and rest * _SMALL_SHARE <= nbytes:
        return nbytes + BLOCK
    return (whole + 1) * HUGE if (HUGE - rest) * _SMALL_SHARE <= nbytes else 0


_SMALL_SHARE = 8

_ARENAS: weakref.WeakSet[Arena] = weakref.WeakSet()


def _unmap_none_in_child() -> None:
    """Never unmap the parent's arenas: a fork does not have them, and may have its own memory there."""
    for arena in _ARENAS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(arena.map))


os.register_at_fork(after_in_child=_unmap_none_in_child)


def view(address: int, nbytes: int) -> memoryview:
    """Return the `nbytes` bytes at `address` as a writable buffer. The caller keeps the memory alive."""
    return memoryview(_FFI.buffer(_FFI.cast("char *", address), nbytes))


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MAPPED_FROM_MOST = 32 << 20  # glibc's limit
_MAPPED_FROM_LEAN = 128 << 10  # glibc's own choice at first


def map_large_blocks() -> None:
    """Make malloc map blocks of 1 MiB and more, while a model is built (glibc; elsewhere nothing happens).

    The blocks of a model under construction are large and live for a while. Freed in malloc's heap they would
    leave holes among small objects, which stay resident memory (measured: 0.6 GiB).
    """
    _tell_malloc(1 << 20, 2 << 20)


def reuse_large_blocks(outgoing_nbytes: int) -> None:
    """Make malloc keep freed blocks for reuse, while a model is trained (glibc).

    Mapping them anew would cost page faults in every operation, and large tensors that stay have buffers of
    their own.

    outgoing_nbytes: the budget's share for outgoing gradients. A backward may free all of it at once, and the
    next one allocates it again; the budget counts it all the time.

    What is kept lies between what is in use, in several times the size of the tensors below 32 MiB. With
    INFINITY_MALLOC=lean nothing is kept: freed blocks go back to the system at once.

    Raises: ConfigError for another INFINITY_MALLOC than "lean" and "keep".
    """
    if lean_malloc():
        _tell_malloc(_MAPPED_FROM_LEAN, 0)
        return
    _tell_malloc(_MAPPED_FROM_MOST, max(2 * _MAPPED_FROM_MOST, outgoing_nbytes))


def lean_malloc() -> bool:
    """Whether freed memory goes back to the system at once (INFINITY_MALLOC=lean).

    Raises: ConfigError for a word that is not known.
    """
    word = os.environ.get("INFINITY_MALLOC") or "keep"
    if word not in ("keep", "lean"):
        raise ConfigError(f'INFINITY_MALLOC={word!r}: expected "keep" or "lean"')
    return word == "lean"


def is_mapped_apart(nbytes: int) -> bool:
    """Whether malloc maps a block of so many bytes by itself while a model is trained, or gives it a free
    place as large (glibc; elsewhere that is not known, and False).
    """
    return _MALLOPT is not None and nbytes >= (_MAPPED_FROM_LEAN if lean_malloc() else _MAPPED_FROM_MOST)


_MALLOPT = getattr(ctypes.CDLL(None), "mallopt", None)


def _tell_malloc(mapped_from_nbytes: int, kept_nbytes: int) -> None:
    if _MALLOPT is not None:
        _MALLOPT(_M_MMAP_THRESHOLD, mapped_from_nbytes)
        _MALLOPT(_M_TRIM_THRESHOLD, min(kept_nbytes, _INT_MOST))


@dataclass(frozen=True, slots=True)
class Slot:
    """A leased piece of the pool, which holds the fields of one tile one after another."""

    address: int
    nbytes: int


class Pool:
    """Equal slots in one arena. Used from one thread, the lane that moves records."""

    def __init__(self, slot_nbytes: int, count: int) -> None:
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
        """Take a free slot; the caller has checked that there is one."""
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
        """Return the length in seconds of the last period without a free slot, as far as after `since_s`."""
        return max(0.0, self._refilled_s - max(self._ran_out_s, since_s))


class Ledger:
    """One share of the budget: its limit, and the bytes held. Thread-safe."""

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.held_nbytes = 0
        self.peak_nbytes = 0
        self.aside_nbytes = 0
        """Bytes set aside: `try_reserve` cannot take them."""
        self._lock = threading.RLock()  # reentrant: a garbage collection may release bytes at any moment
        self._pid = os.getpid()

    def resize(self, limit_nbytes: int) -> None:
        """Change the limit; the bytes held stay held."""
        self.limit_nbytes = limit_nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes that are not held."""
        return self.limit_nbytes - self.held_nbytes

    def try_reserve(self, nbytes: int) -> bool:
        """Take `nbytes` if the share has them; returns whether it did."""
        with self._lock:
            held = self.held_nbytes + nbytes
            if held > self.limit_nbytes - self.aside_nbytes:
                return False
            self.held_nbytes = held
            self.peak_nbytes = max(self.peak_nbytes, held)
            return True

    def reserve_anyway(self, nbytes: int) -> None:
        """Take `nbytes` even beyond the limit, for memory that must exist whatever the budget is."""
        with self._lock:
            self.held_nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.held_nbytes)

    def set_aside(self, nbytes: int) -> None:
        """Set `nbytes` more aside (fewer if negative), for a later `reserve_anyway`."""
        with self._lock:
            self.aside_nbytes += nbytes

    def release(self, nbytes: int) -> None:
        """Give back `nbytes` that were reserved."""
        if os.getpid() != self._pid:  # a forked child, in which the lock may be held for ever
            return
        with self._lock:
            self.held_nbytes -= nbytes

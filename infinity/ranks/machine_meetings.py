"""Where the ranks of one machine wait for each other in memory that they have in common.

[Note: meetings in memory]
Each rank has a line in the memory: it counts there to how many meetings it has come, and says a number for
the last two. A rank that comes counts, and waits until all others have counted as far: by futexes, so that
one wakes the other, with no other thread and no socket in between. The system itself counts (FUTEX_WAKE_OP),
so that what a rank has written before is seen by those that see its count. A rank writes for a meeting where
it wrote for the last but one: the last has shown that all have read that.

Who ends cannot say so here. So each rank holds a lock on one byte of the file, that of its number, which the
system gives back when it ends, whatever ends it: a rank that waits looks for that several times a second.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from infinity.errors import RanksError
from infinity.ranks.shared_memory import PAGE, SharedMemory, open_shared
from infinity.sizes import round_up

if TYPE_CHECKING:
    from infinity.ranks.group import Channel, Ranks

_LIBC = ctypes.CDLL(None, use_errno=True)
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
"""The number of the system call; -1 where it is not known."""
_WAIT, _WAKE_OP = 0, 5
_ADD = 1 << 28 | 0xFFF
"""Of FUTEX_WAKE_OP: add what is in bits 12 to 23, and compare what was there with -1, for waking more, of
which there are none.
"""
_ONE = 1 << 12
_ALL = (1 << 31) - 1
_NOTHING = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)
"""Why a wait ends: the count has changed already, by a signal, or by its time."""
_LOOKS_S = 0.1
"""Seconds from one look to the next whether a rank that has not come is there at all."""
_LINE = 64
"""Bytes: the counts of two ranks are on lines of their own."""
_FLOCK = struct.Struct("hhqqi4x")
"""Of fcntl: kind, whence, start, length, process."""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class MachineMeetings:
    """The meetings of one thread of each rank; see [Note: meetings in memory]."""

    def __init__(
        self, memory: SharedMemory, offset: int, own: int, names: Sequence[int], timeout_s: float
    ) -> None:
        """Meet at `offset` of the memory, zero at first, as number `own` of the ranks that are called
        `names`, each of which holds the lock of its number. timeout_s: how long one waits for the others.
        """
        self.memory = memory
        self._own, self._names, self._timeout_s = own, list(names), timeout_s
        lines = [memory.address + offset + _LINE * number for number in range(len(names))]
        self._counts = [ctypes.c_uint32.from_address(line) for line in lines]
        self._said = [(ctypes.c_uint64 * 2).from_address(line + 8) for line in lines]
        self.number = 0
        """Meetings that this rank has come to."""

    def come(self, said: int, **_how: object) -> MachineMeeting:
        """Come to the next meeting, and say a number of 64 bits; the others may have come, or will.

        Raises: OSError where the system has no futexes.
        """
        self.number += 1
        self._said[self._own][self.number % 2] = said
        self._count()
        return MachineMeeting(self, self.number, time.monotonic() + self._timeout_s)

    def meet(self, channel: Channel, said: int, what: str) -> list[int]:
        """Meet the other ranks, as in a collective of `channel`; return what each of them says, in the order
        of ranks: numbers of 64 bits.

        Raises: as a collective does; OSError where the system has no futexes.
        """
        channel.wait_for(partial(self.come, said), what)
        return [one[self.number % 2] for one in self._said]

    def try_out(self) -> None:
        """Count none. Raises: OSError where the system refuses that, or knows no locks of the other ranks."""
        own = ctypes.addressof(self._counts[self._own])
        _call(own, _WAKE_OP, _ALL, 0, own, _ADD)
        others = [one for one in range(len(self._names)) if one != self._own]
        if gone := [self._names[one] for one in others if not _stays(self.memory, one)]:
            raise OSError(f"nothing is seen of the lock of rank {gone[0]} on memory in common")

    def _count(self) -> None:
        """Count a meeting, and wake who waits for that."""
        own = ctypes.addressof(self._counts[self._own])
        _call(own, _WAKE_OP, _ALL, 0, own, _ADD | _ONE)

    def missing(self, number: int) -> list[int]:
        """Return who has not come to a meeting, as indices."""
        return [one for one, count in enumerate(self._counts) if _is_behind(count.value, number)]

    def wait_for(self, one: int, number: int, seconds: float) -> None:
        """Wait until a rank has come to a meeting, at most so long."""
        seen = self._counts[one].value
        if _is_behind(seen, number):
            limit = _Time(int(seconds), int(seconds % 1 * 1e9))
            _call(ctypes.addressof(self._counts[one]), _WAIT, seen, ctypes.addressof(limit), 0, 0)

    def gone(self, number: int) -> list[int]:
        """Return, by their names, who has not come to a meeting and never will."""
        missing = self.missing(number)
        gone = [one for one in missing if one != self._own and not _stays(self.memory, one)]
        return [self._names[one] for one in gone if one in self.missing(number)]  # it may have come, and gone


class MachineMeeting:
    """One meeting: what a collective's Work is, as far as waiting for it goes."""

    def __init__(self, meetings: MachineMeetings, number: int, until_s: float) -> None:
        """Wait for the meeting of this number, until a moment of time.monotonic."""
        self._meetings, self._number, self._until_s = meetings, number, until_s
        self._gone: list[int] = []

    def is_completed(self) -> bool:
        """Whether all have come."""
        return not self._meetings.missing(self._number)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when all have come.

        Raises: RuntimeError where they have not within `timeout`, or one of them has ended.
        """
        until_s = self._until_s
        if timeout is not None:
            until_s = min(until_s, time.monotonic() + timeout.total_seconds())
        while missing := self._meetings.missing(self._number):
            if self._gone:
                raise RuntimeError(f"rank {', '.join(map(str, self._gone))} has ended")
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise RuntimeError("the others have not come to where they meet in memory")
            began_s = time.monotonic()
            self._meetings.wait_for(missing[0], self._number, min(left_s, _LOOKS_S))
            if time.monotonic() - began_s >= _LOOKS_S / 2:
                self._gone = self._meetings.gone(self._number)


def _is_behind(count: int, number: int) -> bool:
    """Whether a count of 32 bits, which begins anew behind the last, is not at a number yet."""
    return (number - count) % (1 << 32) in range(1, 1 << 31)


def _call(place: int, what: int, value: int, limit: int, other: int, how: int) -> int:
    """Call futex(2). Raises: OSError."""
    if _FUTEX < 0:
        raise OSError(errno.ENOSYS, f"the number of futex(2) on {platform.machine()} is not known")
    arguments: list[Any] = [ctypes.c_long(_FUTEX), ctypes.c_void_p(place), ctypes.c_int(what)]
    arguments += [ctypes.c_uint32(value), ctypes.c_void_p(limit)]
    arguments += [ctypes.c_void_p(other), ctypes.c_uint32(how)]
    done = int(_LIBC.syscall(*arguments))
    if done < 0 and (number := ctypes.get_errno()) not in _NOTHING:
        raise OSError(number, f"futex(2): {os.strerror(number)}")
    return done


def _stay(memory: SharedMemory, own: int) -> None:
    """Hold the lock of a number until the memory is closed, or this process ends. Raises: OSError."""
    fcntl.lockf(memory.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, own, os.SEEK_SET)


def _stays(memory: SharedMemory, one: int) -> bool:
    """Whether another process holds the lock of a number."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, one, 1, 0)
    kind, *_ = _FLOCK.unpack(fcntl.fcntl(memory.descriptor, fcntl.F_GETLK, asked))
    return int(kind) != fcntl.F_UNLCK


def open_meetings(
    ranks: Ranks, threads: int, more_nbytes: int, timeout_s: float
) -> tuple[list[MachineMeetings], int]:
    """Return where so many threads of each rank meet, in memory of their own that has `more_nbytes` behind
    that, and where these begin. All ranks are on this machine, and each calls it.

    Raises: as `open_shared`; OSError where the system refuses futexes or locks, and RanksError on the others.
    """
    size, own = len(ranks.near), ranks.near.index(ranks.rank)
    if size != ranks.size:
        raise AssertionError(f"{ranks.size} ranks meet in the memory of one machine; it has {size} of them")
    each = round_up(_LINE * size, PAGE)
    memory = open_shared(ranks, threads * each + more_nbytes, timeout_s)
    try:
        meetings = [MachineMeetings(memory, one * each, own, ranks.near, timeout_s) for one in range(threads)]
        with ranks.together("meeting in memory"):
            _stay(memory, own)
        with ranks.together("meeting in memory"):
            meetings[0].try_out()
    except (OSError, RanksError):
        memory.close()
        raise
    return meetings, threads * each

"""Caches of the literature that adapt to what they see, beside which Infinity's placement is measured. Pure.

ARC (Megiddo and Modha, FAST 2003), S3-FIFO (Yang et al., SOSP 2023) and W-TinyLFU (Einziger, Friedman and
Manes, ACM TOS 2017), for things of one size. W-TinyLFU's sketch, which saves memory, is exact counts here.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

from infinity.bench.planning.routing import PolicyResult, Run

_SMALL, _PROMOTED, _MOST = 0.1, 2, 3
"""S3-FIFO: the share of the small queue, the uses in it after which one stays, the most that are counted."""
_WINDOW, _PROTECTED, _SAMPLE, _MOST_COUNTED = 0.01, 0.8, 10, 15
"""W-TinyLFU, as Caffeine has it: the share of the window, that of what is protected of the rest, uses for
each place after which counts are halved, and the most that is counted.
"""

_Queue = OrderedDict[int, None]


class Cache(Protocol):
    """Holds some things."""

    def use(self, one: int) -> bool:
        """Use one, and return whether it was there."""

    def __len__(self) -> int:
        """Return how many are there."""


class Arc:
    """Balances what was used once of late and what was used twice, by hits on what either has given up."""

    def __init__(self, room: int) -> None:
        """There is nothing."""
        self._room, self._once_wanted = room, 0.0
        self._once, self._twice = _Queue(), _Queue()
        self._gone_once, self._gone_twice = _Queue(), _Queue()

    def __len__(self) -> int:
        """See Cache."""
        return len(self._once) + len(self._twice)

    def use(self, one: int) -> bool:
        """See Cache."""
        if one in self._once or one in self._twice:
            (self._once if one in self._once else self._twice).pop(one)
            self._twice[one] = None
            return True
        gone_once, gone_twice = len(self._gone_once), len(self._gone_twice)
        if one in self._gone_once:
            more = max(1.0, gone_twice / gone_once)
            self._once_wanted = min(self._room, self._once_wanted + more)
            self._give_up(again=False)
            del self._gone_once[one]
            self._twice[one] = None
        elif one in self._gone_twice:
            less = max(1.0, gone_once / gone_twice)
            self._once_wanted = max(0.0, self._once_wanted - less)
            self._give_up(again=True)
            del self._gone_twice[one]
            self._twice[one] = None
        else:
            self._make_place()
            self._once[one] = None
        return False

    def _make_place(self) -> None:
        known = len(self._once) + len(self._gone_once)
        if known == self._room:
            if len(self._once) < self._room:
                self._gone_once.popitem(last=False)
                self._give_up(again=False)
            else:
                self._once.popitem(last=False)
        elif known + len(self._twice) + len(self._gone_twice) >= self._room:
            if known + len(self._twice) + len(self._gone_twice) == 2 * self._room:
                self._gone_twice.popitem(last=False)
            self._give_up(again=False)

    def _give_up(self, *, again: bool) -> None:
        """Give up one where all places are taken. again: whether what is to come was used twice before."""
        if len(self) < self._room:
            return
        once = len(self._once)
        if once and (once > self._once_wanted or (again and once == self._once_wanted)):
            self._gone_once[self._once.popitem(last=False)[0]] = None
        else:
            self._gone_twice[self._twice.popitem(last=False)[0]] = None


class S3Fifo:
    """Lets newcomers wait in a small queue that most leave soon, and keeps in the main one what is used."""

    def __init__(self, room: int) -> None:
        """There is nothing."""
        self._room = room
        self._small_room = max(1, round(_SMALL * room))
        self._small, self._main, self._gone = deque[int](), deque[int](), _Queue()
        self._uses: dict[int, int] = {}
        """Of each that is there, since it came."""

    def __len__(self) -> int:
        """See Cache."""
        return len(self._uses)

    def use(self, one: int) -> bool:
        """See Cache."""
        if one in self._uses:
            self._uses[one] = min(_MOST, self._uses[one] + 1)
            return True
        while len(self._uses) >= self._room:
            if len(self._small) >= self._small_room or not self._main:
                self._leave_small()
            else:
                self._leave_main()
        known = one in self._gone
        self._gone.pop(one, None)
        (self._main if known else self._small).append(one)
        self._uses[one] = 0
        return False

    def _leave_small(self) -> None:
        one = self._small.popleft()
        if self._uses[one] >= _PROMOTED:
            self._uses[one] = 0
            self._main.append(one)
            return
        del self._uses[one]
        self._gone[one] = None
        if len(self._gone) > self._room - self._small_room:
            self._gone.popitem(last=False)

    def _leave_main(self) -> None:
        while True:
            one = self._main.popleft()
            if not self._uses[one]:
                del self._uses[one]
                return
            self._uses[one] -= 1
            self._main.append(one)


class WTinyLfu:
    """Lets what leaves a small window take the place of another that was used less of late."""

    def __init__(self, room: int) -> None:
        """There is nothing."""
        self._window_room = max(1, round(_WINDOW * room))
        self._main_room = room - self._window_room
        self._protected_room = int(_PROTECTED * self._main_room)
        self._window, self._probation, self._protected = _Queue(), _Queue(), _Queue()
        self._counts: Counter[int] = Counter()
        self._counted, self._sample = 0, _SAMPLE * room

    def __len__(self) -> int:
        """See Cache."""
        return len(self._window) + len(self._probation) + len(self._protected)

    def use(self, one: int) -> bool:
        """See Cache."""
        self._count(one)
        if one in self._window:
            self._window.move_to_end(one)
            return True
        if one in self._protected:
            self._protected.move_to_end(one)
            return True
        if one in self._probation:
            del self._probation[one]
            self._protected[one] = None
            if len(self._protected) > self._protected_room:
                self._probation[self._protected.popitem(last=False)[0]] = None
            return True
        self._window[one] = None
        if len(self._window) > self._window_room:
            self._admit(self._window.popitem(last=False)[0])
        return False

    def _admit(self, one: int) -> None:
        if len(self._probation) + len(self._protected) < self._main_room:
            self._probation[one] = None
            return
        least_used = self._probation or self._protected
        if least_used and self._counts[one] > self._counts[next(iter(least_used))]:
            least_used.popitem(last=False)
            self._probation[one] = None

    def _count(self, one: int) -> None:
        self._counts[one] = min(_MOST_COUNTED, self._counts[one] + 1)
        self._counted += 1
        if self._counted >= self._sample:
            self._counts = Counter({key: count // 2 for key, count in self._counts.items() if count > 1})
            self._counted //= 2


CACHES: dict[str, Callable[[int], Cache]] = {"ARC": Arc, "S3-FIFO": S3Fifo, "W-TinyLFU": WTinyLfu}


def followed(kind: str, run: Run, room: int) -> PolicyResult:
    """Return what one of CACHES does: hits, and records that are read when they come and written when they
    leave.
    """
    cache, hits = CACHES[kind](room), 0
    uses = list(itertools.chain.from_iterable(run))
    for one in uses:
        hits += cache.use(one)
    misses = len(uses) - hits
    return PolicyResult(hits, len(uses), 2 * misses - len(cache))

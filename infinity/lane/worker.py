"""The thread beside the lane's that computes: updates, and what waits for gradients.

[Note: no lock of the worker's]
The garbage collector may end an engine in any thread, and so close the lane in this one, in the middle of
anything. So this thread takes no lock for its own sake: what it gets, and what it has worked on, go through
queues that need none, and the lane's thread looks. What is left is that it closes the lane itself: the lane's
thread, which otherwise waits at its end for the work under way, does not wait for that.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

logger = logging.getLogger("infinity")

_T = TypeVar("_T")
_LOOKS_S = 0.01
"""Seconds between looks at whether the thread that is waited for closes the lane."""


class LaneWorker(Generic[_T]):
    """Works on what it is given, in that order, on a thread of its own; see [Note: no lock of the worker's].
    Used by the lane's thread.
    """

    def __init__(self, work: Callable[[_T], None], cpus: Sequence[int]) -> None:
        """Start the thread, on `cpus` if any."""
        self._work, self._cpus = work, cpus
        self._given: SimpleQueue[_T | None] = SimpleQueue()
        self._worked: deque[_T] = deque()
        self._error: BaseException | None = None
        self._stopping = self._left = False
        self._thread = threading.Thread(target=self._run, name="infinity-update", daemon=True)
        self._thread.start()

    def give(self, one: _T) -> None:
        """Have it work on `one`, behind what it has."""
        self._given.put(one)

    def take(self) -> _T | None:
        """Return the next that it has worked on, in order; None where there is none. Raises: what the work
        raised, once.
        """
        if self._worked:
            return self._worked.popleft()
        error, self._error = self._error, None  # it refers to frames of the program's
        if error is None:
            return None
        try:
            raise error
        finally:
            del error

    def left(self) -> list[_T]:
        """Return what it had worked on at its end."""
        return list(self._worked)

    @property
    def is_this_thread(self) -> bool:
        """Whether the calling thread is its own."""
        return threading.current_thread() is self._thread

    def leave(self) -> None:
        """Called on its own thread, which is about to close the lane: its end is not to be waited for."""
        self._stopping = self._left = True

    def end(self, timeout_s: float = math.inf) -> None:
        """Return when it works on nothing any more, or after so long; what it was given and has not begun is
        dropped.
        """
        self._stopping = True
        self._given.put(None)
        end_s = time.monotonic() + timeout_s
        while self._thread.is_alive() and not self._left and time.monotonic() < end_s:
            self._thread.join(_LOOKS_S)
        self._error = None

    # Its own thread

    def _run(self) -> None:
        try:
            if self._cpus:
                os.sched_setaffinity(0, self._cpus)  # of this thread alone
            while self._turn():
                pass  # with nothing in this frame: see ending's note
        except BaseException as error:  # noqa: BLE001 - the lane's thread raises it
            if self._stopping:
                logger.debug("after the lane stopped: %s", error)
            else:
                self._error = error

    def _turn(self) -> bool:
        """Work on the next; False when it is time to stop."""
        one = self._given.get()
        if one is None or self._stopping:
            return False
        self._work(one)
        self._worked.append(one)
        return True

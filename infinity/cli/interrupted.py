"""SIGINT and SIGTERM as one exception, raised once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupted(BaseException):
    """SIGINT or SIGTERM has arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Raise the first SIGINT or SIGTERM as Interrupted; a second one ends the process immediately.

    Yields a function that raises Interrupted again: Python swallows an exception inside a destructor.
    """
    came: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        came.append(number)
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_DFL)
        raise Interrupted(number)

    def check() -> None:
        if came:
            raise Interrupted(came[0])

    before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for one, action in before.items():
            signal.signal(one, action)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Delay SIGINT and SIGTERM to the end of the `with`, so that the caller knows a process begun there.
    Signals interrupt the main thread alone; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    for one in before:
        signal.signal(one, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for one, action in before.items():
            signal.signal(one, action)
        for number in came[:1]:
            signal.raise_signal(number)

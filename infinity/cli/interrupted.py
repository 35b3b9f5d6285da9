"""Ctrl-C and a request to end, as one exception, raised once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupted(BaseException):
    """Ctrl-C, or a request to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Turn SIGINT and SIGTERM into Interrupted, once; a second one ends the process at once.

    Gives a function that raises what a signal asked for: Python swallows what is raised inside a destructor.
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
    """Let SIGINT and SIGTERM come at the end of the `with`, and not in the middle: what is begun there can be
    ended by whoever began it. They interrupt the main thread alone; in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    hold = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    for one in hold:
        signal.signal(one, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for one, action in hold.items():
            signal.signal(one, action)
        for number in came[:1]:
            signal.raise_signal(number)

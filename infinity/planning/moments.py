"""Ends of what a simulated machine does, and what waits for them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Moment:
    """The end of something on a device."""

    __slots__ = ("_calls", "over")

    def __init__(self, *, over: bool = False) -> None:
        """Begin, over or not."""
        self.over = over
        self._calls: list[Callable[[], None]] = []

    def call(self, call: Callable[[], None]) -> None:
        """Make a call when it is over: now, if it is."""
        if self.over:
            call()
        else:
            self._calls.append(call)

    def end(self) -> None:
        """Be over."""
        self.over = True
        calls, self._calls = self._calls, []
        for call in calls:
            call()


NOW = Moment(over=True)
"""What was over from the start."""


def all_of(moments: Iterable[Moment]) -> Moment:
    """Return the end of the last of these."""
    waiting = [one for one in moments if not one.over]
    if len(waiting) < 2:
        return waiting[0] if waiting else NOW
    last, left = Moment(), len(waiting)

    def one_less() -> None:
        nonlocal left
        left -= 1
        if not left:
            last.end()

    for one in waiting:
        one.call(one_less)
    return last

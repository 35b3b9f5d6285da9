"""An accelerator that only keeps time: its streams, and its memory. Pure: no torch, no I/O.

[Note: streams and moments]
As on a GPU, the host puts operations on streams and goes on. An operation begins when the one before it on
its stream is over, and the moments are over that it waits for; its end is a moment, too. The order is that of
the note in device/device.py: memory that is used again is uploaded to when what was computed before is over
(allocated), a unit computes when it has been uploaded (arrived), and a gradient leaves when it has been
computed (download). The host waits for a moment where it needs memory that something leaving still takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from infinity.planning.moments import NOW, Moment, all_of
from infinity.planning.simulator import Clock


class SimulatedStream:
    """Operations that run one after the other on a server of a clock: see [Note: streams and moments]."""

    def __init__(self, clock: Clock, server: str) -> None:
        """Begin with nothing queued."""
        self._clock, self._server = clock, server
        self.queued = NOW
        """The end of all that was queued so far."""

    def put(self, amount: float, *after: Moment) -> Moment:
        """Queue an operation of `amount` that waits for `after`; return its end."""
        begin, end = all_of((self.queued, *after)), Moment()
        self.queued = end
        begin.call(partial(self._clock.serve, self._server, amount, end.end) if amount else end.end)
        return end


class SimulatedDevice:
    """The streams of one accelerator, and what of its memory is ours."""

    def __init__(self, clock: Clock, limit_nbytes: int | None) -> None:
        """Begin with nothing there. limit_nbytes: of its memory; None for no limit."""
        self._clock = clock
        self.computing = SimulatedStream(clock, "compute")
        self.up = SimulatedStream(clock, "up")
        self.down = SimulatedStream(clock, "down")
        self._limit_nbytes = limit_nbytes
        self._held_nbytes = 0
        self._leaving: deque[tuple[Moment, int]] = deque()

    def fits(self, nbytes: int) -> bool:
        """Whether there is room, after waiting for what leaves if need be: see device/room.py."""
        while self._leaving and (self._leaving[0][0].over or not self._has(nbytes)):
            left, held = self._leaving.popleft()
            self.wait(left)
            self._held_nbytes -= held
        return self._has(nbytes)

    def _has(self, nbytes: int) -> bool:
        return self._limit_nbytes is None or self._held_nbytes + nbytes <= self._limit_nbytes

    def take(self, nbytes: int, give_way: Callable[[], bool]) -> None:
        """Take memory; what waits gives way if need be. Where nothing does, the rest of it is taken all the
        same: whether a model fits is said before it is forecast.
        """
        while not self.fits(nbytes) and give_way():
            pass
        self._held_nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """Give back memory that later work on the same stream may use at once."""
        self._held_nbytes -= nbytes

    def leaves(self, nbytes: int, left: Moment) -> None:
        """Give back memory that was taken when `left` is over."""
        self._leaving.append((left, nbytes))

    def wait(self, moment: Moment) -> None:
        """Let the host wait."""
        self._clock.run_until(lambda: moment.over)

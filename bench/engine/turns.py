"""Contestants that keep running and take turns, so that a disk's drift affects all of them alike.

Each is a process of its own that trains a few steps, then waits while the others train as many. I/O that is
still running at the end of a turn overlaps the first step of the next turn, so that step does not count.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from infinity.bench.engine.runs import Measured, RunError, counts

Run = Callable[[int], Measured]
"""Runs a contestant that gets its turns through the socket with this descriptor."""


def take_turns(
    runs: Mapping[str, Run], orders: Sequence[Sequence[str]], before: Callable[[], None]
) -> dict[str, Measured]:
    """Give every contestant one turn per order, in that order; call `before` ahead of each order.

    Raises: RunError of the contestant that failed.
    """
    with _started(runs) as (batons, found):
        for order in orders:
            before()
            for name in order:
                if not _turn(batons[name]):
                    found[name].result()
                    raise RunError(f"{name} ended before its last turn, without an error")
        return {name: one.result() for name, one in found.items()}


def _turn(baton: socket.socket) -> bytes:
    """Give a contestant a turn; return its byte at the end of the turn, nothing if it has exited."""
    try:
        baton.sendall(b".")
        return baton.recv(1)
    except (BrokenPipeError, ConnectionResetError):
        return b""


@contextmanager
def _started(
    runs: Mapping[str, Run],
) -> Iterator[tuple[dict[str, socket.socket], dict[str, Future[Measured]]]]:
    """Start the contestants; at the end, those that still wait for a turn exit."""

    def stay(run: Run, theirs: socket.socket) -> Measured:
        with theirs:  # closed when the process has exited, so that a waiting _turn reads nothing
            return run(theirs.fileno())

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(runs)))
        batons, found = {}, {}
        for name, run in runs.items():
            ours, theirs = socket.socketpair()
            batons[name] = stack.enter_context(ours)  # closed before the pool waits
            found[name] = pool.submit(stay, run, theirs)
        yield batons, found


def seconds_of_turns(run: Measured, turn: int) -> list[float]:
    """Return the median seconds of the counted steps of each turn except the first, which settles."""
    steps = [one for number, one in enumerate(run.all_seconds) if counts(number, turn)]
    return [statistics.median(steps[at : at + turn - 1]) for at in range(0, len(steps), turn - 1)]

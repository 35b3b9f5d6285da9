"""Contestants that stay and take turns: what a disk's drift does to one of them, it does to all.

Each is a process of its own that trains a few steps, then waits while the others train as many. What it has
still under way when its turn ends goes on in the next one's first step, which therefore does not count.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from infinity.bench.engine.runs import Measured, RunError, counts

Run = Callable[[int], Measured]
"""Runs a contestant that is told its turns on the socket of this descriptor."""


def take_turns(
    runs: Mapping[str, Run], orders: Sequence[Sequence[str]], before: Callable[[], None]
) -> dict[str, Measured]:
    """Let every contestant have one turn for each order, in that order; call `before` ahead of each.

    Raises: RunError of the contestant that failed.
    """
    with _started(runs) as (batons, found):
        for order in orders:
            before()
            for name in order:
                if not _turn(batons[name]):
                    found[name].result()
                    raise RunError(f"{name} ended before its last turn, and says no error")
        return {name: one.result() for name, one in found.items()}


def _turn(baton: socket.socket) -> bytes:
    """Return what the contestant says at the end of its turn; nothing, if it has ended."""
    try:
        baton.sendall(b".")
        return baton.recv(1)
    except (BrokenPipeError, ConnectionResetError):
        return b""


@contextmanager
def _started(
    runs: Mapping[str, Run],
) -> Iterator[tuple[dict[str, socket.socket], dict[str, Future[Measured]]]]:
    """Start the contestants; those that wait for a turn at the end, for whatever reason, end."""

    def stay(run: Run, theirs: socket.socket) -> Measured:
        with theirs:  # closed when the process is gone: whoever waits for it reads nothing
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
    """Return the median second of the counted steps of each turn, but for the first, in which all settles."""
    steps = [one for number, one in enumerate(run.all_seconds) if counts(number, turn)]
    return [statistics.median(steps[at : at + turn - 1]) for at in range(0, len(steps), turn - 1)]

"""Fault injection for tests, into a normally built engine, by the number of an attempt."""

import contextlib
from collections.abc import Iterator

from infinity.aio.engine import IoEngine

TORN, LOST, FLIP, DELAY, HANG = -10001, -10002, -10003, -10004, -10005
"""Faults of a disk without an error; see aio.h. TORN, LOST: half of a piece, or nothing, is moved, but all is
reported. FLIP: one bit of a read is wrong. DELAY: other pieces overtake it. HANG: no response within an
hour."""


def inject(engine: IoEngine, nth: int, result: int) -> None:
    """Make the nth attempt from now (1: the next) to move a piece yield `result`.

    Args:
        engine: the engine to disturb; it holds up to 64 pending faults.
        nth: the number of the attempt, where continuations and retries count as well.
        result: -errno; 0 for the end of the file; a short count of bytes, which are moved; or a fault above.
    """
    if nth < 1:
        raise ValueError(f"nth is {nth}: expected 1 or more")
    if engine.library.aio_inject(engine.pointer, nth, result) < 0:
        raise ValueError("too many faults are pending: expected at most 64")


@contextlib.contextmanager
def held(engine: IoEngine) -> Iterator[None]:
    """Context in which the engine accepts requests but starts none, as if the disk hung."""
    engine.library.aio_hold(engine.pointer, 1)
    try:
        yield
    finally:
        engine.library.aio_hold(engine.pointer, 0)

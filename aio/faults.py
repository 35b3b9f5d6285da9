"""Faults on purpose, for tests: injected into a normally built engine, by number of attempt."""

import contextlib
from collections.abc import Iterator

from infinity.aio.engine import IoEngine

TORN, LOST, FLIP, DELAY, HANG = -10001, -10002, -10003, -10004, -10005
"""What a disk does that reports no error; see aio.h. TORN, LOST: half a piece is moved, or nothing, and all
reported. FLIP: one bit of a read is wrong. DELAY: others overtake the piece. HANG: no answer within an hour.
"""


def inject(engine: IoEngine, nth: int, result: int) -> None:
    """Make the nth attempt from now (1: the next) to move a piece yield `result`.

    Args:
        engine: the one to disturb; up to 64 faults can be waiting in it.
        nth: counts attempts, so that continuations and retries count as well.
        result: -errno; 0, the end of the file; a short count in bytes, which are really moved; or one of
            the above.
    """
    if nth < 1:
        raise ValueError(f"nth is {nth}, and counts from 1")
    if engine.library.aio_inject(engine.pointer, nth, result) < 0:
        raise ValueError("too many faults are waiting already")


@contextlib.contextmanager
def held(engine: IoEngine) -> Iterator[None]:
    """Accept requests but start nothing, inside the `with`: the disk hangs, as it were."""
    engine.library.aio_hold(engine.pointer, 1)
    try:
        yield
    finally:
        engine.library.aio_hold(engine.pointer, 0)

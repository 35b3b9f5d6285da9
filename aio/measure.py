"""A stream of requests through an engine, and what it took: bytes, seconds, CPU time, latencies."""

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.aio.completion import Completion
from infinity.aio.engine import IoEngine
from infinity.aio.files import File
from infinity.aio.memory import AlignedMemory

READ, WRITE, MIXED = "read", "write", "mixed"

_MEMORY_NBYTES = 64 << 20
_NOISE_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RequestStream:
    """What is asked of an engine, again and again, in the order of the file."""

    verb: str
    """READ; WRITE; or MIXED, in turn: reads from the first half of the file, writes to the second."""
    request_nbytes: int
    in_flight: int
    """Requests that are submitted and not yet waited for."""
    together: int = 1
    """Requests that are waited for at once, when so many are in flight: to wake up a sleeping thread costs as
    much as several requests. What is left in flight has to keep the engine busy.
    """
    read_percent: int = 50
    """Of MIXED requests, that are reads; they are spread evenly."""

    def verb_of(self, count: int) -> str:
        """Return what request number `count` does, READ or WRITE."""
        if self.verb != MIXED:
            return self.verb
        before, with_it = (-(-number * self.read_percent // 100) for number in (count, count + 1))
        return READ if with_it > before else WRITE

    def memory(self, *, huge: bool = True) -> AlignedMemory:
        """Return memory for it, filled with noise, for zeros cost some drives nothing.

        Each request in flight has its own, up to 64 MiB; beyond that they share it, for nobody reads it.
        """
        each = max(self.request_nbytes, 1)
        slots = max(1, min(self.in_flight, _MEMORY_NBYTES // each))
        memory = AlignedMemory(slots * each, huge=huge)
        noise = os.urandom(min(_NOISE_NBYTES, len(memory)))
        for at in range(0, len(memory), len(noise)):
            part = noise[: len(memory) - at]
            memory.view[at : at + len(part)] = part
        return memory


@dataclass(frozen=True, slots=True)
class Moved:
    """What a stream came to."""

    nbytes: int
    wall_s: float
    """From the first submission until the last request was over."""
    latencies_s: Sequence[float]
    """Of each request, from its acceptance until it was over, by the engine's own clock."""


def move(
    engine: IoEngine,
    file: File,
    memory: AlignedMemory,
    stream: RequestStream,
    nbytes: int,
    *,
    seconds: float,
    at_most: int = 1 << 62,
) -> Moved:
    """Move a stream over the first `nbytes` of a file, again and again, for `seconds` or `at_most` bytes.

    Raises: ValueError for a request larger than the file (MIXED: than half of it); IoError.
    """
    size = stream.request_nbytes
    starts, begins = {READ: engine.read, WRITE: engine.write}, {READ: 0, WRITE: 0}
    each = nbytes // (2 if stream.verb == MIXED else 1) // size * size
    if stream.verb == MIXED:
        begins[WRITE] = each
    turns = {READ: 0, WRITE: 0}
    if each == 0:
        raise ValueError(f"{stream.verb} requests of {size} B do not fit into a file of {nbytes} B")
    pending: deque[Completion] = deque()
    latencies_s: list[float] = []

    def finish(count: int) -> None:
        pending[count - 1].wait()  # asleep once, as requests end about in the order in which they began
        for oldest in (pending.popleft() for _ in range(count)):
            oldest.wait()
            latencies_s.append((oldest.ended_s or 0.0) - oldest.began_s)

    count, slots, began_s = 0, len(memory) // size, time.perf_counter()
    while count * size < at_most and time.perf_counter() - began_s < seconds:
        if len(pending) >= stream.in_flight:
            finish(stream.together)
        verb = stream.verb_of(count)
        offset = begins[verb] + turns[verb] * size % each
        place = memory.address + count % slots * size
        pending.append(starts[verb](file, offset, place, size, owner=memory))
        turns[verb] += 1
        count += 1
    if pending:
        finish(len(pending))
    return Moved(count * size, time.perf_counter() - began_s, latencies_s)

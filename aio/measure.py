"""Measures a stream of requests through an engine: bytes, seconds, latencies."""

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
    """A repeated stream of requests, sequential in the file."""

    verb: str
    """READ; WRITE; or MIXED: reads from the first half of the file, alternating with writes to the second."""
    request_nbytes: int
    in_flight: int
    """Requests submitted and not yet waited for."""
    together: int = 1
    """Requests to wait for at once when `in_flight` is reached, since waking a sleeping thread costs as much
    as
    several requests. The rest must keep the engine busy."""
    read_percent: int = 50
    """The percentage of reads among MIXED requests, spread evenly."""

    def verb_of(self, count: int) -> str:
        """Return the verb of request number `count`, READ or WRITE."""
        if self.verb != MIXED:
            return self.verb
        before, with_it = (-(-number * self.read_percent // 100) for number in (count, count + 1))
        return READ if with_it > before else WRITE

    def memory(self, *, huge: bool = True) -> AlignedMemory:
        """Return memory for it, filled with random bytes, because some drives write zeros for free.

        Each request in flight has memory of its own, up to 64 MiB in total; beyond that requests share it.
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
    """The result of a stream."""

    nbytes: int
    wall_s: float
    """From the first submission to the end of the last request."""
    latencies_s: Sequence[float]
    """Of each request, from its acceptance to its end, by the engine's clock."""


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
    """Move a stream over the first `nbytes` of a file, repeatedly, for `seconds` or `at_most` bytes.

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
        pending[count - 1].wait()  # one sleep, as requests end roughly in the order in which they began
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

"""How long computing waited for a pass, and what for."""

from __future__ import annotations

import time
from collections.abc import Iterator

from infinity.lane.lane import StreamLane
from infinity.planning.queue import Job


def stalls_of(lane: StreamLane, job: Job, cause: str) -> Iterator[tuple[str, float, float]]:
    """Wait for a pass that computing cannot go on without. Yield (cause, begin, end) of the stalls, in
    seconds: as one of slots for as long as the pass waited for a slot meanwhile, which it does before its
    reads; the rest as `cause`.
    """
    waited_before_s, began = job.slot_wait_s, time.perf_counter()
    lane.wait(job)
    ended = time.perf_counter()
    had_slots = min(began + job.slot_wait_s - waited_before_s, ended)
    for name, since, until in (("slot", began, had_slots), (cause, had_slots, ended)):
        if until > since:
            yield name, since, until

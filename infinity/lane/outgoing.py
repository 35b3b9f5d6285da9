"""The budget's share for bytes on their way out of the memory that computes: gradients, activations.

[Note: leases]
Bytes are leased before they are sent, and the lease goes where the buffer goes: with a gradient, the pass
that writes it, the update that uses it up. A lease ends once, however often `end` is called, and by itself
when its last reference is gone. So no failure between a lease and the end of its use loses a part of the
share.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from infinity.device.buffers import Buffers
from infinity.device.device import Device
from infinity.planning.queue import Job
from infinity.storage.memory import Ledger
from infinity.storage.store import Future
from infinity.timeline import Timeline


class _Holder(Protocol):
    def release(self, nbytes: int, /) -> None:
        """Give bytes back."""


class Lease:
    """Bytes of the share, until `end`."""

    __slots__ = ("_ledger", "_nbytes")

    def __init__(self, ledger: _Holder, nbytes: int) -> None:
        """Hold `nbytes` of `ledger`, which are reserved."""
        self._ledger = ledger
        self._nbytes = nbytes

    def end(self) -> None:
        """Give the bytes back, unless that was done before."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self._ledger.release(nbytes)

    def __del__(self) -> None:
        """Give the bytes back."""
        if self._nbytes:
            self.end()


class _Shared:
    """Bytes of a ledger that several leases have in common, given back when the last one has ended."""

    def __init__(self, ledger: Ledger, nbytes: int, leases: int) -> None:
        self._ledger, self._nbytes, self._left = ledger, nbytes, list(range(leases))

    def release(self, _one: int) -> None:
        """One of the leases has ended, in whatever thread."""
        if not self._left.pop():
            self._ledger.release(self._nbytes)


def leases_of(ledger: Ledger, nbytes: int, count: int) -> list[Lease]:
    """Return leases that hold `nbytes` of `ledger`, which are reserved, together, until all have ended."""
    shared = _Shared(ledger, nbytes, count)
    return [Lease(shared, 1) for _ in range(count)]


def end_all(leases: Iterable[Lease | None]) -> None:
    """End leases; None stands for no lease."""
    for lease in leases:
        if lease is not None:
            lease.end()


class OutgoingShare:
    """Owns the share, and the work under way that will make room in it. Used by the thread that computes."""

    def __init__(self, device: Device, timeline: Timeline) -> None:
        """Begin with an empty share; `open` sets its size."""
        self._device = device
        self._timeline = timeline
        self.ledger = Ledger(0)
        self.buffers = Buffers(self.ledger)
        """Memory for bytes on their way; free buffers stay as far as the share has room."""
        self._jobs: deque[Future] = deque()
        self._deferred: list[Callable[[], None]] = []
        self.stall_s = 0.0
        """Seconds that computing waited for room, or for gradients."""
        self.used_in_rounds = False
        """Whether anything comes in rounds, too, which have no gradients."""

    def open(self, limit_nbytes: int) -> None:
        """Set the size of the share."""
        self.ledger.resize(limit_nbytes)

    @property
    def held_nbytes(self) -> int:
        """Bytes of the budget in use. Where the CPU computes, those beyond the share count as the unit in
        use, which is beside the budget.
        """
        held = self.ledger.held_nbytes
        return min(held, self.ledger.limit_nbytes) if self._device.is_host else held

    def use_in_rounds(self) -> None:
        """Have the share not be lent in rounds any more."""
        self.used_in_rounds = True

    def lend(self) -> int:
        """Leave the whole share to another until `give_back`, if nothing takes any of it; return its bytes,
        else 0.
        """
        nbytes = 0 if self.ledger.held_nbytes else self.ledger.limit_nbytes
        if nbytes:
            self.ledger.resize(0)
            self.buffers.trim(0)
        return nbytes

    def give_back(self, nbytes: int) -> None:
        """Have the share again that was lent."""
        self.ledger.resize(nbytes)

    # Leases

    def try_lease(self, nbytes: int) -> Lease | None:
        """Return a lease if the share has room now."""
        return Lease(self.ledger, nbytes) if self.ledger.try_reserve(nbytes) else None

    def lease(self, nbytes: int) -> Lease:
        """Return a lease as soon as the share has room. Where nothing is under way that could make room, the
        bytes are leased beyond the share: they count as the unit in use.
        """
        while True:
            lease = self.try_lease(nbytes)
            if lease is not None:
                return lease
            if not self._make_room():
                return self.lease_anyway(nbytes)

    def lease_anyway(self, nbytes: int) -> Lease:
        """Return a lease, whatever room there is."""
        self.ledger.reserve_anyway(nbytes)
        return Lease(self.ledger, nbytes)

    def await_buffer(self, nbytes: int, most: int) -> None:
        """Wait until there is memory for a download of `nbytes`, with `most` of them under way at once, or
        nothing is under way that could free any. So the number of buffers does not depend on timing.
        """
        while nbytes and not self._device.prepare(nbytes, most):
            if not self._make_room():
                return  # those in use stay: gradients that are kept, or the rest of this unit's

    # What makes room

    def sent(self, job: Future) -> None:
        """Remember work that will end leases."""
        self._forget_done()
        self._jobs.append(job)

    def defer(self, use: Callable[[], None]) -> None:
        """Remember a call that will use up bytes of the share: it is made when there is no more room, or by
        `use_deferred`.
        """
        self._deferred.append(use)

    def use_deferred(self) -> bool:
        """Make the calls that were deferred, the last one first; False if there were none."""
        found = bool(self._deferred)
        while self._deferred:
            self._deferred[-1]()
            self._deferred.pop()
        return found

    def _make_room(self) -> bool:
        """Make the deferred calls, or else wait for the oldest work under way; False if there is neither. An
        update that begins when the last user of its unit is gone is not under way.
        """
        if self.use_deferred():
            return True
        self._forget_done()
        job = next((one for one in self._jobs if not isinstance(one, Job) or one.is_queued), None)
        if job is None:
            return False
        began = time.perf_counter()
        self._jobs.remove(job)
        job.wait()
        self._stalled(began)
        return True

    def _forget_done(self) -> None:
        while self._jobs and self._jobs[0].done:
            self._jobs.popleft()

    def stall(self, job: Future) -> None:
        """Wait for gradients that are under way."""
        if not job.done:
            began = time.perf_counter()
            job.wait()
            self._stalled(began)

    def _stalled(self, began_s: float) -> None:
        ended_s = time.perf_counter()
        self.stall_s += ended_s - began_s
        self._timeline.span("stall", "gradients", began_s, ended_s)

"""Whether a unit is on the device: what brings it there, who uses it, what has its storage afterwards."""

from __future__ import annotations

import time

from infinity.lane.fetch import FetchPass
from infinity.lane.queue import Awaited, Pass


class Residence:
    """One unit's. Written by the executor; the lane's callbacks do so with its lock held."""

    __slots__ = ("_began_s", "_charged", "_deferred", "_fetch", "_lent", "users", "uses")

    def __init__(self) -> None:
        """Begin off the device."""
        self._fetch: Awaited | None = None
        self._lent: Pass | None = None
        self._deferred: list[FetchPass] = []
        self._charged: int | None = None
        self._began_s = 0.0
        self.users = 0
        """Frames and backward leases that need the unit attached."""
        self.uses = 0
        """Uses since the model was built."""

    @property
    def fetch(self) -> Awaited | None:
        """What makes, or made, the unit resident; None while it is not."""
        return self._fetch

    @property
    def processed(self) -> bool:
        """Whether the values have arrived."""
        fetch = self._fetch  # read once: the lane may take it away
        return fetch is not None and fetch.processed

    def come(self, fetch: Awaited) -> None:
        """Be resident, or on the way, by `fetch`."""
        self._fetch = fetch

    def go(self) -> None:
        """Be off the device."""
        self._fetch = None

    # Uses

    def count_use(self) -> None:
        """Count a use."""
        self.uses += 1

    def begin(self) -> None:
        """The unit was attached now, for its first user."""
        self._began_s = time.perf_counter()

    @property
    def began_s(self) -> float:
        """When it was attached, by time.perf_counter."""
        return self._began_s

    def use(self) -> None:
        """Count a user."""
        self.users += 1

    def drop(self) -> bool:
        """Count a user less; return whether it was the last one."""
        self.users -= 1
        return not self.users

    # Waiting for a use

    @property
    def waits(self) -> bool:
        """Whether the unit is resident ahead of its use, and charged for it."""
        return self._charged is not None

    def charge(self, nbytes: int) -> None:
        """Note the bytes that are charged while it waits."""
        self._charged = nbytes

    def uncharge(self) -> int | None:
        """Wait no more; return the bytes that were charged, None where there were none."""
        charged, self._charged = self._charged, None
        return charged

    # Its storage afterwards

    @property
    def lent(self) -> Pass | None:
        """The pass that works on the storage of a unit nobody uses, and releases it afterwards."""
        return self._lent

    def lend(self, job: Pass) -> None:
        """Leave the storage to a pass."""
        self._lent = job

    def given_back(self) -> None:
        """The pass to which the storage was lent is done with it."""
        self._lent = None

    @property
    def has_deferred(self) -> bool:
        """Whether passes begin as soon as the last user lets go."""
        return bool(self._deferred)

    def defer(self, job: FetchPass) -> None:
        """Have a pass begin as soon as the last user lets go; the first is lent the storage."""
        self._deferred.append(job)

    def take_deferred(self) -> list[FetchPass]:
        """Return those passes, which wait no more."""
        jobs, self._deferred = self._deferred, []
        return jobs

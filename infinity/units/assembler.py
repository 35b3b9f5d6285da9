"""What several ranks do together for the units that one of them uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from infinity.lane.fetch import FetchTarget
from infinity.lane.matrices import MatrixOwners
from infinity.planning.plan import Plan
from infinity.planning.queue import Job
from infinity.units.unit import Unit


class Assembler(MatrixOwners, Protocol):
    """What several ranks do together for a unit that is fetched."""

    def rounds(self, unit: Unit) -> bool:
        """Whether ranks compute with other values of a unit than those of its record: it is sent coded."""

    def exactly(self, leave: Callable[[], None]) -> AbstractContextManager[None]:
        """Have a unit that is fetched in the `with` be as its record has it. Every rank calls it. leave:
        takes that unit off the device; called where it may be there with other values.
        """

    def target_of(self, unit: Unit) -> FetchTarget:
        """Return where this rank's share is fetched: the unit, or memory beside it."""

    def again(self, unit: Unit) -> Job | None:
        """Have some of the ranks put together a unit from what they have kept of the last time; None where
        none is kept, or of other values.
        """

    def assemble(self, unit: Unit, job: Job, target: FetchTarget) -> Job:
        """Have the ranks put a unit together, of which `job` fetches, or has fetched, this rank's share to
        `target`.
        """

    def size_buckets(self, window_nbytes: int) -> None:
        """Note the bytes of units that may wait for their use, of which a part is assembled at once."""

    def spread(self, unit: Unit) -> Job:
        """Have the ranks that have a unit, which is resident, give it to the others. Every rank calls it."""

    def post_failure(self, why: str) -> None:
        """Tell ranks that wait for this one why it does not come."""

    def check(self, plan: Plan) -> None:
        """See that the ranks have the same plan for what begins. Raises: RanksError naming what differs."""

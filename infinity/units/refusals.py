"""Changes of parameters where they may not be made: kept as an error until the program can be told."""

from __future__ import annotations

from collections.abc import Callable

from infinity.errors import UnsupportedError
from infinity.lane.lane import StreamLane
from infinity.units.changes import came_too_late
from infinity.units.unit import Unit


class Refusals:
    """Keeps the first change that was refused. Used by the thread that computes."""

    def __init__(self, lane: StreamLane, tell: Callable[[str], None] | None) -> None:
        """Nothing is refused yet. lane: stops where a change cannot be undone. tell: tells other ranks; None
        where there are none.
        """
        self._lane, self._tell = lane, tell
        self.found: UnsupportedError | None = None
        """The first one."""

    def refuse(self, unit: Unit, why: str) -> None:
        """Note that a parameter was changed where it may not be, for `check`. The lane fails at once where
        the parameter lies in place, since it is changed for good and its master is not, and on several ranks,
        since the others have to be told.
        """
        self.found = self.found or UnsupportedError(why)
        if self._tell is not None:
            self._tell(str(self.found))
        if unit.resident_in_place or self._tell is not None:
            self._lane.fail(self.found)

    def look(self, unit: Unit) -> bool:
        """Refuse a change of a unit that was made after its release; return whether there was one."""
        if (name := unit.changes.found_since()) is not None:
            self.refuse(unit, came_too_late(name))
        return name is not None

    def check(self) -> None:
        """See that nothing was refused since the last call.

        Raises: UnsupportedError naming the parameter that was changed.
        """
        refused, self.found = self.found, None
        if refused is not None:
            raise refused

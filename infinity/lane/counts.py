"""Seconds of the lane's thread. Stdlib alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LaneTimes:
    """Seconds of the lane's thread: waiting for reads, at work, waiting for writes, idle; and `inline_s`, of
    threads that ran a pass inline, as all of it was in host memory.
    """

    read_wait_s: float = 0.0
    work_s: float = 0.0
    write_wait_s: float = 0.0
    idle_s: float = 0.0
    inline_s: float = 0.0

    def waited_for_read(self, seconds: float) -> None:
        """Add seconds of waiting for a read."""
        self.read_wait_s += seconds

    def worked(self, seconds: float) -> None:
        """Add seconds at work."""
        self.work_s += seconds

    def waited_for_write(self, seconds: float) -> None:
        """Add seconds of waiting for a write."""
        self.write_wait_s += seconds

    def idled(self, seconds: float) -> None:
        """Add seconds with nothing to do."""
        self.idle_s += seconds

    def worked_inline(self, seconds: float) -> None:
        """Add seconds in which another thread ran a pass."""
        self.inline_s += seconds

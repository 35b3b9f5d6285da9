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

    def spent(
        self,
        *,
        read_wait_s: float = 0.0,
        work_s: float = 0.0,
        write_wait_s: float = 0.0,
        idle_s: float = 0.0,
        inline_s: float = 0.0,
    ) -> None:
        """Add seconds."""
        self.read_wait_s += read_wait_s
        self.work_s += work_s
        self.write_wait_s += write_wait_s
        self.idle_s += idle_s
        self.inline_s += inline_s

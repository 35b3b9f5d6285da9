"""What a run is up against: the disk, or computing. Pure: no torch, no I/O.

The floor of a step is max(compute, R / B_read, W / B_write, (R + W) / B_mixed): R and W are the bytes that it
reads and writes, B what the disk was measured to do of each alone, and of both at once. Whichever of them is
largest is the bound; how near to it the step comes is what is left to gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

LITTLE_WAITING = 0.1
"""Share of a step. Who waits no longer than that is bound by what it does meanwhile."""

UNMEASURED = "`infinity doctor --measure` would tell how near the disk's limit is"


class Speed(Protocol):
    """What a disk was measured to do, in bytes per second."""

    @property
    def read(self) -> float:
        """Reads alone."""

    @property
    def write(self) -> float:
        """Writes alone."""

    @property
    def mixed(self) -> float:
        """Both at once, together."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a typical step takes and moves."""

    seconds: float
    stall_s: float
    """Seconds of it in which computing waited."""
    read_nbytes: float
    written_nbytes: float

    @property
    def compute_s(self) -> float:
        """Seconds in which computing did not wait."""
        return max(0.0, self.seconds - self.stall_s)

    @property
    def nbytes(self) -> float:
        """Bytes moved in either direction."""
        return self.read_nbytes + self.written_nbytes


@dataclass(frozen=True, slots=True)
class Bound:
    """The verdict on a step."""

    kind: Literal["compute", "disk", "overlap"]
    """"overlap": it waits, though neither computing nor the disk, by itself, takes that long."""
    compute_share: float
    """Of the step, in which computing does not wait."""
    limit: str
    """Which of the disk's limits is nearest: "read", "write" or "mixed"; "" where none is known."""
    disk_share: float
    """Of the step, that the disk would need at that limit; 0 where none is known."""

    @property
    def floor_share(self) -> float:
        """Of the step, that it takes at the very least; what is left to 1 could be gained."""
        return max(self.compute_share, self.disk_share)

    def __str__(self) -> str:
        """As people read it."""
        disk = f"{self.disk_share:.0%} of the disk's {self.limit} limit"
        waits = f"{1 - self.compute_share:.0%} of the step waits"
        if self.kind == "compute":
            computing = f"compute-bound: {self.compute_share:.0%} of the step computes"
            return f"{computing}, {disk}" if self.limit else computing
        if self.kind == "overlap":
            return f"overlap-bound: {waits}, {disk if self.limit else 'without any I/O'}"
        return f"I/O-bound: {disk if self.limit else waits}"


def disk_limits_s(load: Load, speed: Speed) -> dict[str, float]:
    """Return the seconds that each limit of the disk asks for the bytes of a step."""
    limits = {"read": load.read_nbytes / speed.read, "write": load.written_nbytes / speed.write}
    if load.read_nbytes and load.written_nbytes:
        limits["mixed"] = load.nbytes / speed.mixed
    return limits


def bound(load: Load, speed: Speed | None) -> Bound:
    """Say what a step of more than 0 s is up against; `speed` is None where the disk was not measured."""
    limit, disk_s = "", 0.0
    if speed is not None and load.nbytes:
        limits = disk_limits_s(load, speed)
        limit = max(limits, key=lambda name: limits[name])
        disk_s = limits[limit]
    shares = load.compute_s / load.seconds, limit, disk_s / load.seconds
    if load.stall_s <= LITTLE_WAITING * load.seconds:
        return Bound("compute", *shares)
    overlaps_too_little = disk_s < load.compute_s if limit else not load.nbytes
    return Bound("overlap" if overlaps_too_little else "disk", *shares)

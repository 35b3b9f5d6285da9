"""Streams of accelerators that torch knows and nobody has run Infinity on: by their name alone."""

from __future__ import annotations

from infinity.device.streams import NO_LOCK, AcceleratorStreams


class NamedStreams(AcceleratorStreams):
    """Streams without a vendor's part: torch has no call for these that locks memory which is there already,
    so that copies make the host wait.
    """

    def lock(self, address: int, nbytes: int) -> str:
        """See Streams."""
        return NO_LOCK

    def unlock(self, address: int) -> None:
        """See Streams: nothing is locked."""

"""An accelerator that runs out of memory: what lives there makes room for the user's activations.

[Note: out of memory on the device]
device_memory bounds what is ours; activations are the user's, and torch alone knows when they do not fit.
Where it fails in an allocation of ours, units that wait and records that live on the device leave at once, as
far as nobody uses them, and the allocation is tried once more. Where it fails in the user's own code, torch's
error ends that forward or backward: nothing can be tried again in there. A program that catches the error and
goes on finds the device emptied at its next forward, with a warning that has the numbers, and nothing of ours
will live there again: an activation that does not fit beside it would not fit in the next step either. How
often torch has failed is asked of its allocator; failures of our own allocations that we have handled do not
count.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from infinity.device.device import Device


class Shortage:
    """Looks at the begin of each forward whether the device has run out of memory since the last one."""

    def __init__(self, device: Device, empty: Callable[[], None]) -> None:
        """Call `empty` the first time that it has."""
        self._device, self._empty = device, empty
        self._seen = device.failed_allocations()

    def look(self, _module: nn.Module | None = None) -> None:
        """Look."""
        failed = self._device.failed_allocations()
        if failed > self._seen:
            self._empty()
        self._seen = failed

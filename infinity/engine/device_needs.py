"""What a model takes of an accelerator's memory at least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from infinity.units.unit import Unit


class DeviceNeeds(NamedTuple):
    """Bytes of device_memory."""

    placeholders: int
    fixed: int
    """All of the time: placeholders, and what a stage keeps whole there."""
    largest: int
    """While a unit is in use, with its gradients."""


def device_needs(
    units: Sequence[Unit],
    rounded: Callable[[int], int],
    gradients: Callable[[Unit], int],
    stage: int,
    *,
    several: bool,
) -> DeviceNeeds:
    """Return what units need in a stage of ZeRO. rounded: returns what so many bytes take there; gradients:
    those of a unit; several: whether there are several ranks.
    """
    placeholders = rounded(1) * sum(len(unit.parameters) for unit in units)
    sizes = [rounded(unit.resident_nbytes) for unit in units]
    fixed, in_use = placeholders, sizes
    if stage < 3:
        fixed, in_use = placeholders + sum(sizes), [0] * len(sizes)
    if stage == 1 and several:
        fixed += sum(size for unit, size in zip(units, sizes, strict=True) if unit.trainable)
    largest = max((size + gradients(unit) for unit, size in zip(units, in_use, strict=True)), default=0)
    return DeviceNeeds(placeholders, fixed, largest)

"""Which fields of which records stay in host memory. Pure: no torch, no I/O.

[Note: density]
A byte of host memory saves NVMe bytes every step, by field: a byte of `hi` 3 (read in forward and backward,
written by the update), one of `lo`, `m` or `v` 2 (read and written by the update), one of a 16-bit gradient 2
(written and read). Dense training touches every unit equally often, in a cycle: what counts is the field, and
a fixed choice is as good as any policy could be (Belady). So the densest field is pinned first, for units
spread evenly over the model, so that no stretch of layers becomes the bottleneck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DENSITY = {"hi": 3, "lo": 2, "m": 2, "v": 2}
"""NVMe bytes saved per step and byte kept in host memory."""

_GOLDEN = 0.6180339887498949


def spread(count: int) -> list[int]:
    """Return 0 … count-1 in an order of which every beginning is spread evenly."""
    return sorted(range(count), key=lambda index: (index * _GOLDEN) % 1.0)


def choose(
    units: Sequence[Mapping[str, int]], room_nbytes: int, gradient_nbytes: int
) -> list[tuple[int, str]]:
    """Return (unit, field) of what to pin, in the order to do it.

    units: for each, the bytes of every field that could be pinned. room_nbytes: host memory for gradients and
    pinned fields together.
    gradient_nbytes: what a step's gradients would take of it; only fields denser than a gradient are pinned
    at its expense.
    """
    chosen = []
    left = room_nbytes
    for field in sorted(DENSITY, key=lambda name: -DENSITY[name]):
        available = left if DENSITY[field] > 2 else left - gradient_nbytes
        for unit in spread(len(units)):
            nbytes = units[unit].get(field)
            if nbytes is not None and nbytes <= available:
                chosen.append((unit, field))
                available -= nbytes
                left -= nbytes
    return chosen

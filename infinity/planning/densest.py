"""What of many fields is kept in host memory, by arrays: the densest that fit. Pure: no torch, no I/O.

[Note: many slices]
Of 100,000 slices of experts or embeddings each revision ranks 400,000 fields. One by one in Python these took
about 80 us of a CPU for each slice; as columns of numbers, 1.5 us (`python -m infinity.bench.planning.choosing`).
What is decided is the same, to the bit: rounded as Python rounds, and equals in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0.6180339887498949
GRADIENT_DENSITY = 2.0
"""NVMe bytes saved per step and byte of a gradient that stays in memory."""

_HUNDREDTHS = 100
_NEAR_HALF = 1e-6
"""So close to the middle between two hundredths a product of floats may round to the other one."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """Fields of units, one a row. field: of the fields' names, a number for each. density: NVMe bytes saved
    per step and byte kept. placed: whether it is in host memory, or on the device, now.
    """

    unit: Integers
    field: Integers
    nbytes: Integers
    density: Floats
    placed: Booleans


def densest(columns: Columns, room_nbytes: int, gradient_nbytes: int, horizon_steps: int) -> Integers:
    """Return the rows to keep in host memory, in the order to do it: see [Note: density] in placement.

    room_nbytes: for gradients and kept fields together. gradient_nbytes: what a step's gradients would take
    of it; only what is denser than a gradient is kept at their expense. horizon_steps: within which a move
    has to pay, so that what is placed counts as denser.
    """
    density = columns.density
    rows = _ranked(columns, density + np.where(columns.placed, 2 / horizon_steps, 0.0))
    rows = rows[(density[rows] > 0) | columns.placed[rows]]
    nbytes = columns.nbytes[rows]
    needed = nbytes + np.where(density[rows] > GRADIENT_DENSITY, 0, gradient_nbytes)
    return rows[_that_fit(nbytes, needed, room_nbytes)]


def _ranked(columns: Columns, density: Floats) -> Integers:
    """Return the rows, the densest first, equals of one field evenly spread over the units. Differences below
    a hundredth are noise.
    """
    if not len(density):
        return np.zeros(0, np.int64)
    fields = int(columns.field.max()) + 1
    group = _in_hundredths(density) * fields + columns.field
    _, first, of_group = np.unique(group, return_index=True, return_inverse=True)
    hundredths = group[first] // fields
    rank = np.empty(len(first), np.int64)  # of equally dense groups that comes first whose first row does
    rank[np.lexsort((first, -hundredths))] = np.arange(len(first))
    rank_of_row = rank[of_group.reshape(-1)]
    by_unit = np.lexsort((columns.unit, rank_of_row))
    counts = np.bincount(rank_of_row)
    place = np.arange(len(density)) - np.repeat(np.cumsum(counts) - counts, counts)
    return by_unit[np.lexsort((place, (place * GOLDEN) % 1.0, rank_of_row[by_unit]))]


def _in_hundredths(values: Floats) -> Integers:
    """Return Python's round(value, 2) of each, times 100."""
    scaled = values * _HUNDREDTHS
    rounded = np.rint(scaled)
    unsure = np.abs(np.abs(scaled - np.floor(scaled)) - 0.5) < _NEAR_HALF
    if unsure.any():
        distinct, of_each = np.unique(values[unsure], return_inverse=True)
        exact = np.array([round(round(one, 2) * _HUNDREDTHS) for one in distinct.tolist()], np.float64)
        rounded[unsure] = exact[of_each.reshape(-1)]
    return rounded.astype(np.int64)


def _that_fit(nbytes: Integers, needed: Integers, room_nbytes: int) -> Integers:
    """Return the places of those that are taken when each that finds what it needs takes its bytes of the
    room, one after the other.
    """
    least = np.minimum.accumulate(needed[::-1])[::-1]  # that any from there on needs
    taken: list[Integers] = []
    left, at = room_nbytes, 0
    while at < len(needed) and least[at] <= left:
        at += int(np.argmax(needed[at:] <= left))
        before = np.cumsum(nbytes[at:]) - nbytes[at:]
        fits = needed[at:] + before <= left
        run = len(fits) if fits.all() else int(np.argmin(fits))
        taken.append(np.arange(at, at + run))
        left -= int(nbytes[at : at + run].sum())
        at += run
    return np.concatenate(taken) if taken else np.zeros(0, np.int64)


def numbered(names: Sequence[str]) -> tuple[Integers, list[str]]:
    """Return a number for each of `names`, the same for equals, and the name of each number."""
    known: dict[str, int] = {}
    numbers = np.fromiter((known.setdefault(one, len(known)) for one in names), np.int64, len(names))
    return numbers, list(known)

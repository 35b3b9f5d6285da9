"""Which of many fields are kept in host memory: the densest that fit, by arrays. Pure: no torch, no I/O.

[Note: many slices]
Of 100,000 slices of experts or embeddings each revision ranks 400,000 fields. One after the other, in Python,
that took 80 us of a CPU for each slice; as columns of numbers, 0.4 us: with the counting of uses 0.1 us a
slice and step, under a hundredth of a step of so many (`python -m infinity.bench.planning.choosing`).
What is decided is the same, to the bit: rounded as Python rounds, and equals in the same order.

Most of these fields have no chance of a place, since a step uses few. So an engine first ranks only those of
the units that are used most, several times as many as have room, and those that are placed. Where every
field taken of these is denser than all that were left out, and the rest of the room is smaller than each of
those, ranking all fields would decide the same (`leave_none_out`); otherwise all are ranked.
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
_MOST = 100_000
"""Hundredths that are told apart where reach is looked for; denser fields are within it together."""
_NEAR_HALF = 1e-6
"""So close to the middle between two hundredths a product of floats may round to the other one."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class FieldColumns:
    """Fields of units, one a row. field: of the fields' names, a number for each. density: NVMe bytes saved
    per step and byte kept. placed: whether it is in host memory, or on the device, now.
    """

    unit: Integers
    field: Integers
    nbytes: Integers
    density: Floats
    placed: Booleans


@dataclass(frozen=True, slots=True)
class Rest:
    """Bounds on the fields that the columns leave out: none is placed, denser than this, or smaller."""

    density: float
    nbytes: int


def densest(columns: FieldColumns, room_nbytes: int, gradient_nbytes: int, horizon_steps: int) -> Integers:
    """Return the rows to keep in host memory, in the order to do it: see [Note: density] in placement.

    room_nbytes: for gradients and kept fields together. gradient_nbytes: what a step's gradients would take
    of it; only what is denser than a gradient is kept at their expense. horizon_steps: within which a move
    has to pay, so that what is placed counts as denser.
    """
    density = columns.density
    useful = (density > 0) | columns.placed
    needed = columns.nbytes + np.where(density > GRADIENT_DENSITY, 0, gradient_nbytes)
    hundredths = _density_as_placed(columns, horizon_steps)
    near = _within_reach(columns.nbytes, needed, hundredths, useful, room_nbytes)
    rows = near[_ranked(columns.unit[near], columns.field[near], hundredths[near])]
    rows = rows[useful[rows]]
    return rows[_that_fit(columns.nbytes[rows], needed[rows], room_nbytes)]


def leave_none_out(
    columns: FieldColumns,
    rows: Integers,
    rest: Rest,
    room_nbytes: int,
    gradient_nbytes: int,
    horizon_steps: int,
) -> bool:
    """Whether `rows`, which `densest` took of the columns, are all that it would take if these had the
    `rest`, too: each comes before the rest, and they leave room for none of it.
    """
    if not rest.density > 0:
        return True  # it has no use
    lowest = _density_as_placed(columns, horizon_steps)[rows].min(initial=np.iinfo(np.int64).max)
    left = room_nbytes - int(columns.nbytes[rows].sum())
    least = rest.nbytes + (0 if rest.density > GRADIENT_DENSITY else gradient_nbytes)
    return bool(lowest > _in_hundredths(np.array([rest.density]))[0]) and left < least


def _density_as_placed(columns: FieldColumns, horizon_steps: int) -> Integers:
    """Return hundredths; what is placed counts as denser."""
    return _in_hundredths(columns.density + np.where(columns.placed, 2 / horizon_steps, 0.0))


def _within_reach(
    nbytes: Integers, needed: Integers, hundredths: Integers, useful: Booleans, room_nbytes: int
) -> Integers:
    """Return the rows above which the room is not yet full for sure: once one that needs least has found no
    room, none does. Rows that are equally dense are all there, or none of them.
    """
    if not useful.any():
        return np.zeros(0, np.int64)
    least = useful & (needed == needed[useful].min())
    lowest = int(hundredths.min())
    held = np.bincount(np.minimum(hundredths[least] - lowest, _MOST), weights=nbytes[least])
    full = np.flatnonzero(np.cumsum(held[::-1])[::-1] > room_nbytes)
    return np.flatnonzero(hundredths >= lowest + int(full[-1])) if len(full) else np.arange(len(nbytes))


def _ranked(unit: Integers, field: Integers, hundredths: Integers) -> Integers:
    """Return the rows, the densest first, equals of one field evenly spread over the units. Differences below
    a hundredth are noise.
    """
    if not len(unit):
        return np.zeros(0, np.int64)
    fields = int(field.max()) + 1
    _, first, of_group = np.unique(hundredths * fields + field, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)  # of equally dense groups that comes first whose first row does
    rank[np.lexsort((first, -hundredths[first]))] = np.arange(len(first))
    rank_of_row = rank[of_group.reshape(-1)]
    by_unit = np.lexsort((unit, rank_of_row))
    counts = np.bincount(rank_of_row)
    place = np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)
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

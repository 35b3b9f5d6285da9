"""Where a weight is cut: pure arithmetic, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 16
"""Cuts lie at multiples of this: the vector width of the matrix product, and the chunk of torch's normal
draws, so that tiles drawn one after another hold the numbers of the whole."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The tiles of a weight [sum(rows), sum(columns)], in row-major order; a bias has one column of no
    width.
    """

    rows: tuple[int, ...]  # elements along dimension 0, per row of tiles
    columns: tuple[int, ...]  # along dimension 1

    def __post_init__(self) -> None:
        """Refuse empty tiles."""
        if not self.rows or not self.columns or min(*self.rows, *self.columns) < 1:
            raise ValueError(f"tiles of {self.rows} x {self.columns} elements: each needs at least one")

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole weight."""
        return sum(self.rows), sum(self.columns)

    def __len__(self) -> int:
        """Return the number of tiles."""
        return len(self.rows) * len(self.columns)

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Yield what each tile is of the whole, in row-major order."""
        for rows in spans(self.rows):
            for columns in spans(self.columns):
                yield rows, columns


def spans(sizes: Sequence[int]) -> list[slice]:
    """Return consecutive slices of these sizes."""
    stops = list(accumulate(sizes))
    return [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def cut(length: int, tiles: int | Sequence[int]) -> tuple[int, ...]:
    """Cut `length` elements into `tiles` pieces at multiples of 16; where pieces of 16 are too large,
    anywhere. A sequence is taken as the sizes themselves.

    Raises:
        ValueError: more tiles than elements, or sizes that do not add up to `length`.
    """
    if not isinstance(tiles, int):
        sizes = tuple(tiles)
        if sum(sizes) != length or min(sizes, default=0) < 1:
            raise ValueError(
                f"tiles of {sizes} elements do not make {length}: give sizes of 1 or more that do"
            )
        return sizes
    if not 1 <= tiles <= length:
        raise ValueError(f"{length} elements cannot be cut into {tiles} tiles: give 1 to {length}")
    step = ALIGNMENT if math.ceil(length / ALIGNMENT) >= tiles else 1
    return _alike(length, tiles, step)


def _alike(length: int, tiles: int, step: int) -> tuple[int, ...]:
    blocks = math.ceil(length / step)
    stops = [min(blocks * number // tiles * step, length) for number in range(1, tiles + 1)]
    return tuple(stop - start for start, stop in zip([0, *stops], stops, strict=False))


def cut_to(length: int, most: int) -> tuple[int, ...]:
    """Cut `length` elements into as few pieces of at most `most` as can be, of about the same size; at
    multiples of 16 if `most` allows.
    """
    step = ALIGNMENT if most >= ALIGNMENT else 1
    return _alike(length, math.ceil(math.ceil(length / step) / (most // step)), step)


def tiles_of(out_features: int, in_features: int, itemsize: int, above_nbytes: int) -> Grid:
    """Choose the tiles of a weight [out_features, in_features], of `above_nbytes` each at most; one tile for
    a weight that is no larger than that.

    Along out_features first: such tiles leave every sum whole, so results keep their bits. Along in_features
    only where 16 rows are still too large.

    Raises:
        ValueError: `above_nbytes` is smaller than one element.
    """
    most = above_nbytes // itemsize
    if most < 1:
        raise ValueError(
            f"tiles of {above_nbytes} bytes hold no element of {itemsize} bytes: raise the limit"
        )
    if out_features * in_features <= most:
        return Grid((out_features,), (in_features,))
    rows = most // in_features
    if rows >= min(ALIGNMENT, out_features):
        return Grid(cut_to(out_features, rows), (in_features,))
    rows = min(ALIGNMENT, out_features, most)
    return Grid(cut_to(out_features, rows), cut_to(in_features, most // rows))

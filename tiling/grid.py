"""Where a weight is cut: pure arithmetic, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")

ALIGNMENT = 16
"""Cuts lie at multiples of this many elements. It is the vector width of matrix products, and the chunk in
which torch draws normal numbers: tiles that are drawn one after another hold the numbers of the whole."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The tiles of a weight [sum(rows), sum(columns)], in row-major order. For a bias, columns is (1,)."""

    rows: tuple[int, ...]  # elements along dimension 0, per row of tiles
    columns: tuple[int, ...]  # along dimension 1

    def __post_init__(self) -> None:
        """Refuse empty tiles."""
        if not self.rows or not self.columns or min(*self.rows, *self.columns) < 1:
            raise ValueError(f"tiles of {self.rows} x {self.columns} elements: each needs at least one")

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the whole weight."""
        return sum(self.rows), sum(self.columns)

    def __len__(self) -> int:
        """Return the number of tiles."""
        return len(self.rows) * len(self.columns)

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of the whole that each tile holds, in row-major order."""
        for rows in spans(self.rows):
            for columns in spans(self.columns):
                yield rows, columns

    def by_row(self, tiles: list[T]) -> list[list[T]]:
        """Return things that are kept in row-major order, one per tile, by rows of tiles."""
        width = len(self.columns)
        return [tiles[first : first + width] for first in range(0, len(tiles), width)]


def spans(sizes: Sequence[int]) -> list[slice]:
    """Return consecutive slices of the given sizes."""
    stops = list(accumulate(sizes))
    return [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def cut(length: int, tiles: int | Sequence[int]) -> tuple[int, ...]:
    """Cut `length` elements into `tiles` pieces and return their sizes.

    Cuts lie at multiples of 16 unless that gives too few pieces. A sequence is taken as the sizes themselves.

    Raises:
        ValueError: more tiles than elements, or sizes that do not add up to `length`.
    """
    if not isinstance(tiles, int):
        sizes = tuple(tiles)
        if sum(sizes) != length or min(sizes, default=0) < 1:
            raise ValueError(
                f"tile sizes {sizes} add up to {sum(sizes)}, not {length}: give sizes of 1 or more that do"
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
    """Cut `length` elements into the fewest pieces of at most `most`, of about equal size.

    Cuts lie at multiples of 16 if `most` is 16 or more.
    """
    step = ALIGNMENT if most >= ALIGNMENT else 1
    return _alike(length, math.ceil(math.ceil(length / step) / (most // step)), step)


def tiles_of(out_features: int, in_features: int, itemsize: int, above_nbytes: int) -> Grid:
    """Choose the tiles of a weight [out_features, in_features], each of at most `above_nbytes` bytes.

    A weight is cut along out_features first: such tiles leave every sum whole, so results keep their bits. It
    is cut along in_features only if 16 rows are still too large.

    Raises:
        ValueError: `above_nbytes` is smaller than one element.
    """
    most = above_nbytes // itemsize
    if most < 1:
        raise ValueError(
            f"a tile of {above_nbytes} bytes cannot hold an element of {itemsize} bytes: raise the limit"
        )
    if out_features * in_features <= most:
        return Grid((out_features,), (in_features,))
    rows = most // in_features
    if rows >= min(ALIGNMENT, out_features):
        return Grid(cut_to(out_features, rows), (in_features,))
    rows = min(ALIGNMENT, out_features, most)
    return Grid(cut_to(out_features, rows), cut_to(in_features, most // rows))

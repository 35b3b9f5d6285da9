"""Boxes of a tensor's elements: which part of a whole a rank of a mesh has, and how two parts overlap. Pure.

A box has its own elements in row-major order, as the tensor that it is when it is taken out of the whole. A
*range* of a box, elements [start, stop) in that order, is what one of several ranks that divide the box has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor whose index is, in each dimension, `first` and the `shape` - 1 after it."""

    first: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """Return the elements that both have; None for none."""
        first = tuple(map(max, self.first, other.first))
        shape = tuple(
            min(mine + size, theirs + extent) - at
            for mine, size, theirs, extent, at in zip(
                self.first, self.shape, other.first, other.shape, first, strict=True
            )
        )
        return Box(first, shape) if all(size > 0 for size in shape) else None

    def span(self, inner: Box) -> tuple[int, int]:
        """Return the smallest range of this box that has all elements of `inner`, which lies in it."""
        at = stop = 0
        for mine, size, first, extent in zip(self.first, self.shape, inner.first, inner.shape, strict=True):
            at = at * size + first - mine
            stop = stop * size + first - mine + extent - 1
        return at, stop + 1

    def cut(self, start: int, stop: int) -> Iterator[Box]:
        """Yield the boxes that the range [start, stop) of this one consists of, in its order: each is a
        range as well.
        """
        for first, shape in _cut(self.shape, start, stop):
            yield Box(tuple(mine + at for mine, at in zip(self.first, first, strict=True)), shape)

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Whether this is a box of a tensor of that shape."""
        return len(self.first) == len(self.shape) == len(shape) and all(
            at >= 0 and size >= 0 and at + size <= most
            for at, size, most in zip(self.first, self.shape, shape, strict=True)
        )


def all_of(shape: Sequence[int]) -> Box:
    """Return the box that is a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def _cut(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield first index and shape of each box: rows that are whole together, and the parts of others."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    rest = shape[1:]
    row = math.prod(rest)
    (top, begun), (bottom, ended) = divmod(start, row), divmod(stop, row)
    if begun and top < bottom:
        yield from _within(top, rest, begun, row)
        top, begun = top + 1, 0
    if begun:  # all within one row
        yield from _within(top, rest, begun, ended)
        return
    if top < bottom:
        yield (top, *((0,) * len(rest))), (bottom - top, *rest)
    yield from _within(bottom, rest, 0, ended)


def _within(row: int, rest: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    for first, shape in _cut(rest, start, stop):
        yield (row, *first), (1, *shape)


def runs(whole: Sequence[int], box: Box, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the consecutive elements of a tensor of the shape `whole` that the range [start, stop) of `box`
    has: (first in the whole, first in the range, number).
    """
    flat = all_of(whole)
    at = 0
    for one in box.cut(start, stop):
        # Behind the last dimension in which rows are shorter than the whole's, all lies together.
        joined = max((n for n, size in enumerate(one.shape) if size != whole[n]), default=0)
        numel = math.prod(one.shape[joined:])
        for outer in _indices(one.shape[:joined]):
            first = tuple(
                begin + step
                for begin, step in zip(one.first, (*outer, *((0,) * (len(one.shape) - joined))), strict=True)
            )
            begin, _ = flat.span(Box(first, (1,) * len(first)))
            yield begin, at, numel
            at += numel


def _indices(shape: Shape) -> Iterator[Shape]:
    if not shape:
        yield ()
        return
    for outer in _indices(shape[:-1]):
        for last in range(shape[-1]):
            yield (*outer, last)


@dataclass(frozen=True, slots=True)
class Turns:
    """Boxes of one shape whose elements come by turns, so many of each: what a rank has of a tensor of which
    a dimension is cut into chunks first, and each chunk among the ranks, as those of fused weights are.
    """

    boxes: tuple[Box, ...]
    turn_numel: int = 0
    """Elements of one box in a turn; those of one box alone come in one."""

    @property
    def numel(self) -> int:
        """Number of elements of all boxes."""
        return sum(one.numel for one in self.boxes)

    def range_of(self, number: int, start: int, stop: int) -> tuple[int, int]:
        """Return which elements [start, stop) of a box are among elements [start, stop) of all."""
        if len(self.boxes) == 1:
            return start, stop
        return self._before(number, start), self._before(number, stop)

    def _before(self, number: int, at: int) -> int:
        rounds, rest = divmod(at, self.turn_numel * len(self.boxes))
        return rounds * self.turn_numel + min(max(rest - number * self.turn_numel, 0), self.turn_numel)

    def cut(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield what elements [start, stop) of all are, in their order: (number of the box, first element of
        it, the one after the last).
        """
        if len(self.boxes) == 1:
            yield 0, start, stop
            return
        at = start
        while at < stop:
            turn, begun = divmod(at, self.turn_numel)
            numel = min(self.turn_numel - begun, stop - at)
            rounds, number = divmod(turn, len(self.boxes))
            first = rounds * self.turn_numel + begun
            yield number, first, first + numel
            at += numel

    def runs(self, whole: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield as `runs` does, of elements [start, stop) of all."""
        begun = 0
        for number, first, last in self.cut(start, stop):
            for at, begin, numel in runs(whole, self.boxes[number], first, last):
                yield at, begun + begin, numel
            begun += last - first


Range = tuple[int, int]
"""Consecutive places along a dimension: the first, and how many."""


def taken(ranges: Sequence[Range], chunks: int, ranks: int, rank: int) -> list[Range] | None:
    """Return what a rank has of the places that `ranges` have, one behind the other, which are cut into
    chunks, and each chunk among the ranks; None where several chunks are not cut evenly.
    """
    total = sum(count for _, count in ranges)
    if chunks > 1 and total % (chunks * ranks):
        return None
    whole = total // chunks
    least = -(-whole // ranks)
    begin = min(whole, least * rank)
    count = min(least, whole - begin)
    found: list[Range] = []
    for chunk in range(chunks):
        for first, size in _part(ranges, chunk * whole + begin, count):
            if found and sum(found[-1]) == first:
                found[-1] = found[-1][0], found[-1][1] + size
            else:
                found.append((first, size))
    return found or [(0, 0)]


def _part(ranges: Sequence[Range], begin: int, count: int) -> Iterator[Range]:
    """Yield where `count` places lie from number `begin` on."""
    for first, size in ranges:
        if begin < size and count:
            here = min(size - begin, count)
            yield first + begin, here
            count -= here
        begin = max(0, begin - size)


def by_turns(ranges: Sequence[Sequence[Range]]) -> Turns | None:
    """Return the boxes of a rank that has these places in each dimension; None where several dimensions have
    more than one range, or those of one differ in size.
    """
    several = [number for number, one in enumerate(ranges) if len(one) > 1]
    if len(several) > 1 or len({size for number in several for _, size in ranges[number]}) > 1:
        return None
    shape = tuple(one[0][1] for one in ranges)
    firsts = [tuple(one[0][0] for one in ranges)]
    if several:
        (dim,) = several
        firsts = [(*firsts[0][:dim], first, *firsts[0][dim + 1 :]) for first, _ in ranges[dim]]
        return Turns(tuple(Box(one, shape) for one in firsts), math.prod(shape[dim:]))
    return Turns((Box(firsts[0], shape),))

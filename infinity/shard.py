"""How a unit's parameters lie in one flat range, and how that range is cut into tiles. Pure: no torch, no
I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infinity.sizes import BLOCK, round_up

FIELD_NBYTES = {"hi": 2, "lo": 2, "m": 4, "v": 4, "grad16": 2, "grad32": 4}
"""Bytes per element of each field of a record (DESIGN 2); grad16 and grad32 are a spilled gradient's two
forms.
"""

ALIGN_NUMEL = BLOCK // 2
"""Elements. Segments start on whole blocks of every field, so each parameter can be read and written by
itself.
"""


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter's place in its unit's flat range."""

    name: str
    shape: tuple[int, ...]
    start: int  # elements from the start of the unit
    numel: int  # elements, without padding

    @property
    def stop(self) -> int:
        """The first element behind the parameter, padding not counted."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Shard:
    """The flat, padded range of one unit: its parameters one behind the other."""

    segments: tuple[Segment, ...]
    numel: int  # elements, with padding

    def __post_init__(self) -> None:
        """Check that segments are whole-block aligned, ordered and inside the range."""
        end = 0
        for segment in self.segments:
            if segment.start % ALIGN_NUMEL or segment.start < end:
                raise ValueError(
                    f"{segment.name}: starts at element {segment.start}, expected a multiple of "
                    f"{ALIGN_NUMEL} ≥ {end}"
                )
            end = segment.stop
        if self.numel % ALIGN_NUMEL or self.numel < end:
            raise ValueError(f"shard of {self.numel} elements: expected a multiple of {ALIGN_NUMEL} ≥ {end}")

    def nbytes(self, field: str) -> int:
        """Bytes of one field of the whole unit, padding included."""
        return self.numel * FIELD_NBYTES[field]


def lay_out(parameters: Sequence[tuple[str, Sequence[int]]]) -> Shard:
    """Place `(name, shape)` one behind the other, each on a whole block."""
    segments = []
    start = 0
    for name, shape in parameters:
        segment = Segment(name, tuple(shape), start, math.prod(shape))
        segments.append(segment)
        start = round_up(segment.stop, ALIGN_NUMEL)
    return Shard(tuple(segments), start)


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in one tile: elements [start, start + numel) of the unit."""

    index: int  # of the segment in its shard
    start: int  # in the unit
    within: int  # in the parameter
    numel: int


def tiles(numel: int, tile_numel: int) -> Iterator[tuple[int, int]]:
    """Cut [0, numel) into consecutive ranges of at most `tile_numel` elements."""
    for start in range(0, numel, tile_numel):
        yield start, min(start + tile_numel, numel)


def pieces(shard: Shard, start: int, stop: int) -> Iterator[Piece]:
    """Return the parameters' parts in elements [start, stop) of the unit, in order."""
    for index, segment in enumerate(shard.segments):
        first, last = max(start, segment.start), min(stop, segment.stop)
        if first < last:
            yield Piece(index, first, first - segment.start, last - first)

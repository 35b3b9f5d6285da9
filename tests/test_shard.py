"""The layout of units. Pure."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.shard import ALIGN_NUMEL, Segment, Shard, lay_out, pieces, tiles

shapes = st.lists(st.lists(st.integers(0, 70), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes)
def test_every_parameter_has_its_own_blocks(shapes):
    shard = lay_out([(str(index), shape) for index, shape in enumerate(shapes)])
    taken = set()
    for segment, shape in zip(shard.segments, shapes, strict=True):
        assert segment.numel == math.prod(shape)
        blocks = set(range(segment.start // ALIGN_NUMEL, -(-segment.stop // ALIGN_NUMEL)))
        assert segment.start % ALIGN_NUMEL == 0
        assert not blocks & taken
        taken |= blocks
    assert shard.numel == len(taken) * ALIGN_NUMEL


@given(shapes, st.integers(1, 4))
def test_tiles_and_pieces_cover_every_element_once(shapes, blocks):
    shard = lay_out([(str(index), shape) for index, shape in enumerate(shapes)])
    covered = dict.fromkeys(range(len(shapes)), 0)
    for start, stop in tiles(shard.numel, blocks * ALIGN_NUMEL):
        for piece in pieces(shard, start, stop):
            segment = shard.segments[piece.index]
            assert piece.within == covered[piece.index]
            assert start <= piece.start == segment.start + piece.within
            assert piece.start + piece.numel <= min(stop, segment.stop)
            covered[piece.index] += piece.numel
    assert covered == {index: math.prod(shape) for index, shape in enumerate(shapes)}


def test_a_segment_off_its_block_is_refused():
    with pytest.raises(ValueError, match="starts at element 5"):
        Shard((Segment("w", (3,), 5, 3),), ALIGN_NUMEL)

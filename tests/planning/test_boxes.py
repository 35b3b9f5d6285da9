"""Boxes, their ranges and their overlaps, compared with slices of torch's tensors. Nothing is faked."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.planning.boxes import Box, all_of, by_turns, runs
from infinity.planning.boxes import taken as taken_of

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    first = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(first, tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, first, strict=True)))


@st.composite
def ranges(draw):
    """Draw a tensor's shape, a box of it, and a range of that."""
    shape = draw(SHAPES)
    box = draw(boxes(shape))
    start = draw(st.integers(0, box.numel))
    return shape, box, start, draw(st.integers(start, box.numel))


def numbered(shape):
    return torch.arange(math.prod(shape)).reshape(shape)


def taken(whole, box):
    of = tuple(slice(at, at + size) for at, size in zip(box.first, box.shape, strict=True))
    return whole[of].reshape(-1).tolist()


@given(ranges())
def test_a_range_is_cut_into_few_boxes_that_are_ranges(of):
    shape, box, start, stop = of
    whole, cut = numbered(shape), list(box.cut(start, stop))
    inside = taken(whole, box)
    assert [one for part in cut for one in taken(whole, part)] == inside[start:stop]
    assert len(cut) <= max(1, 2 * len(shape) - 1)
    for part in cut:
        first, last = box.span(part)
        assert inside[first:last] == taken(whole, part)


@given(ranges())
def test_runs_say_where_the_elements_of_a_range_lie_in_the_whole(of):
    shape, box, start, stop = of
    found = [None] * (stop - start)
    for at, first, numel in runs(shape, box, start, stop):
        found[first : first + numel] = range(at, at + numel)
    assert found == taken(numbered(shape), box)[start:stop]


@given(st.data())
def test_boxes_meet_in_what_both_have(data):
    shape = data.draw(SHAPES)
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    whole, both = numbered(shape), one.meet(other)
    assert set(taken(whole, one)) & set(taken(whole, other)) == (set(taken(whole, both)) if both else set())
    assert one.meet(all_of(shape)) == one
    assert one.lies_in(shape)
    assert not Box(one.first, tuple(size + 5 for size in one.shape)).lies_in(shape) or not shape


@st.composite
def fused(draw):
    """Draw a shape, the dimension along which a rank has a part of each chunk, and the numbers of both."""
    outer, inner = (draw(SHAPES.filter(lambda one: len(one) < 3)) for _ in range(2))
    chunks, ranks, each = (draw(st.integers(1, 3)) for _ in range(3))
    shape = (*outer, chunks * ranks * each, *inner)
    return shape, len(outer), chunks, ranks, draw(st.integers(0, ranks - 1))


@given(fused(), st.data())
def test_what_a_rank_has_of_each_chunk_are_boxes_whose_elements_come_by_turns(of, data):
    shape, dim, chunks, ranks, rank = of
    whole = numbered(shape)
    mine = torch.cat([one.chunk(ranks, dim)[rank] for one in whole.chunk(chunks, dim)], dim)
    mine = mine.reshape(-1).tolist()
    ranges = [[(0, size)] for size in shape]
    ranges[dim] = taken_of(ranges[dim], chunks, ranks, rank)
    turns = by_turns(ranges)
    assert turns.numel == len(mine)
    start = data.draw(st.integers(0, len(mine)))
    stop = data.draw(st.integers(start, len(mine)))
    inside = [taken(whole, box) for box in turns.boxes]
    assert [one for number, first, last in turns.cut(start, stop) for one in inside[number][first:last]] == (
        mine[start:stop]
    )
    for number, of_box in enumerate(inside):
        first, last = turns.range_of(number, start, stop)
        assert of_box[first:last] == [one for one in mine[start:stop] if one in of_box]
    found = [None] * (stop - start)
    for at, first, numel in turns.runs(shape, start, stop):
        found[first : first + numel] = range(at, at + numel)
    assert found == mine[start:stop]


def test_parts_of_chunks_that_are_divided_again_may_be_one_box_and_uneven_ones_are_none():
    """As FSDP2 divides what tensor parallelism has divided: by _StridedShard, and then Shard."""
    rows = taken_of([(0, 8)], 2, 2, 1)
    assert rows == [(2, 2), (6, 2)]
    assert taken_of(rows, 1, 2, 0) == [(2, 2)]
    assert taken_of(rows, 1, 3, 0) == [(2, 2)]
    assert taken_of([(0, 8)], 2, 1, 0) == [(0, 8)], "what lies together is one"
    assert taken_of([(0, 6)], 2, 2, 0) is None
    assert by_turns([[(0, 2), (4, 1)]]) is None
    assert by_turns([[(0, 2), (4, 2)], [(0, 1), (2, 1)]]) is None

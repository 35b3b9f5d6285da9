"""Boxes, their ranges and their overlaps, compared with slices of torch's tensors. Nothing is faked."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.planning.boxes import Box, all_of, runs

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

"""Where weights are cut. Trusted: integer arithmetic. Faked: nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.tiling import tiles_of
from infinity.tiling.grid import Grid, cut


@given(length=st.integers(1, 5000), tiles=st.integers(1, 64))
def test_pieces_make_up_the_length_and_none_is_empty(length, tiles):
    tiles = min(tiles, length)
    sizes = cut(length, tiles)
    assert sum(sizes) == length
    assert len(sizes) == tiles
    assert min(sizes) > 0


@given(length=st.integers(256, 5000), tiles=st.integers(1, 16))
def test_cuts_lie_at_multiples_of_sixteen_and_pieces_are_alike(length, tiles):
    sizes = cut(length, tiles)
    assert [size % 16 for size in sizes[:-1]] == [0] * (tiles - 1)
    assert max(sizes) - min(sizes) < 32


@given(
    out=st.integers(1, 3000),
    features=st.integers(1, 3000),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    above=st.integers(8, 1 << 20),
)
def test_no_tile_is_larger_than_the_limit_and_none_is_cut_without_need(out, features, itemsize, above):
    grid = tiles_of(out, features, itemsize, above)
    assert grid.shape == (out, features)
    assert max(grid.rows) * max(grid.columns) * itemsize <= above
    if out * features * itemsize <= above:
        assert len(grid) == 1
    if len(grid.columns) > 1:
        assert min(out, 16) * features * itemsize > above


def test_the_outputs_are_cut_before_the_inputs():
    assert tiles_of(65536, 16384, 2, 256 << 20) == Grid((8192,) * 8, (16384,))
    assert tiles_of(32, 1 << 20, 2, 1 << 20) == Grid((16, 16), (32768,) * 32)


@pytest.mark.parametrize("tiles", [0, 11, (5, 4), (10, 0)])
def test_tiles_that_do_not_make_the_length_are_refused(tiles):
    with pytest.raises(ValueError, match="10"):
        cut(10, tiles)


def test_a_limit_below_one_element_is_refused():
    with pytest.raises(ValueError, match="raise the limit"):
        tiles_of(4, 4, 4, 3)


def test_a_grid_names_its_slices_row_by_row():
    slices = list(Grid((2, 1), (3, 4)).slices())
    assert [(rows.start, columns.start) for rows, columns in slices] == [(0, 0), (0, 3), (2, 0), (2, 3)]

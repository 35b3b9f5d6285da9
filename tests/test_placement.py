"""What is pinned. Pure."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from infinity.placement import DENSITY, choose, spread

UNIT = {"hi": 20, "lo": 20, "m": 40, "v": 40}


def test_the_densest_field_is_pinned_first_and_evenly():
    chosen = choose([UNIT] * 10, 100, 1000)
    assert [field for _, field in chosen] == ["hi"] * 5
    units = sorted(unit for unit, _ in chosen)
    assert max(b - a for a, b in itertools.pairwise(units)) <= 3, "spread over the model"


def test_moments_are_pinned_only_with_what_gradients_leave():
    assert {field for _, field in choose([UNIT] * 10, 400, 150)} == {"hi", "lo"}
    assert {field for _, field in choose([UNIT] * 10, 400, 400)} == {"hi"}
    assert len(choose([UNIT] * 10, 1400, 200)) == 40


fields = st.dictionaries(st.sampled_from(sorted(DENSITY)), st.integers(1, 50))


@given(st.lists(fields), st.integers(0, 500), st.integers(0, 500))
def test_pins_never_exceed_the_room(units, room, gradients):
    chosen = choose(units, room, gradients)
    assert sum(units[unit][field] for unit, field in chosen) <= room
    assert len(set(chosen)) == len(chosen)


@given(st.integers(0, 300))
def test_spreading_leaves_nobody_out(count):
    assert sorted(spread(count)) == list(range(count))

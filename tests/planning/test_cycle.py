"""The plan of rounds: walked round after round, as the residency would. Pure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.planning.cycle import make_cycle, staying
from infinity.planning.trace import Phase, Use


def forward(*units):
    return tuple(Use(Phase.FORWARD, unit) for unit in units)


def rounds(plan, sizes, window, count=4):
    """Walk a plan as the residency does; return the bytes that each round reads. What waits never exceeds the
    window, and nothing is fetched that is there.
    """
    waiting, there, read = set(), {unit for unit, nbytes in enumerate(sizes) if not nbytes}, []

    def fetch(units):
        nonlocal nbytes
        for unit in units:
            if unit not in waiting:
                waiting.add(unit)
                nbytes += sizes[unit]
        assert sum(sizes[unit] for unit in waiting) <= window

    for _ in range(count):
        nbytes = 0
        waiting.intersection_update(plan.opening)
        fetch(plan.opening)
        for step in plan.steps:
            if step.use.unit not in waiting | there:
                nbytes += sizes[step.use.unit]
            waiting.discard(step.use.unit)
            assert step.use.unit not in step.fetch
            fetch(step.fetch)
            if step.keep:
                waiting.add(step.use.unit)
            assert sum(sizes[unit] for unit in waiting) <= window
        read.append(nbytes)
    return read


def test_what_fits_beside_two_that_stream_stays_and_the_rest_is_read_once_a_round():
    sizes = [10] * 10
    plan = make_cycle(forward(*range(10)), sizes, 50, hides=sizes)
    assert rounds(plan, sizes, 50)[1:] == [70, 70, 70]
    assert sum(step.keep for step in plan.steps) == 3


def test_reads_run_on_from_one_round_into_the_next():
    sizes = [10] * 6
    plan = make_cycle(forward(*range(6)), sizes, 20, hides=sizes)
    assert str(plan).splitlines() == [
        "open fetch 0 1",
        *("F0 fetch 2", "F1 fetch 3", "F2 fetch 4", "F3 fetch 5", "F4 fetch 0", "F5 fetch 1"),
    ]


def test_where_all_fits_nothing_is_read_after_the_first_round():
    sizes = [10, 3, 0, 99]
    plan = make_cycle(forward(0, 1, 2, 3, 0), sizes, 112, hides=sizes)
    assert plan.opening == (0, 1, 3)
    assert rounds(plan, sizes, 112) == [112, 0, 0, 0]


def test_what_a_round_uses_twice_stays_first_and_so_does_what_would_take_the_most_room_to_stream():
    assert staying(forward(0, 1, 2, 3, 4, 0), [10] * 5, 30) == {0}
    assert staying(forward(0, 1, 2, 3), [10, 10, 50, 10], 80) == {0, 1, 2, 3}
    assert staying(forward(0, 1, 2, 3), [10, 10, 50, 10], 70) == {2}
    assert staying(forward(0, 1, 2, 3, 4), [10, 10, 50, 10, 10], 75) == {2}, "two of 10 stream beside it"
    assert staying(forward(0, 1, 2, 3), [10, 10, 50, 10], 49) == {0, 1, 3}, "50 never fits"


def test_a_unit_that_ends_a_round_and_begins_the_next_stays_in_between():
    sizes = [10] * 4
    plan = make_cycle(forward(0, 1, 2, 3, 0), sizes, 10, hides=sizes)
    assert str(plan).splitlines() == [
        "open fetch 0",
        "F0 fetch 1",
        "F1 fetch 2",
        "F2 fetch 3",
        "F3 fetch 0",
        "F0 keep",
    ]


def test_what_stays_is_spread_over_the_layers():
    stay = staying(forward(*range(20)), [10] * 20, 70)
    assert len(stay) == 5
    assert max(b - a for a, b in zip(sorted(stay), sorted(stay)[1:], strict=False)) <= 8


@pytest.mark.parametrize("trace", [(), forward(0)])
def test_a_round_of_next_to_nothing_has_a_plan(trace):
    assert len(make_cycle(trace, [10], 5).steps) == len(trace)


sizes_of_8 = st.lists(st.integers(0, 9), min_size=8, max_size=8)
hidden = st.none() | st.lists(st.integers(0, 12), min_size=8, max_size=8)


@given(st.lists(st.integers(0, 7), max_size=16), sizes_of_8, st.integers(0, 80), hidden)
def test_rounds_are_alike_keep_to_the_window_and_read_no_unit_more_often_than_it_is_used(
    units, sizes, window, hides
):
    plan = make_cycle(forward(*units), sizes, window, hides=hides)
    read = rounds(plan, sizes, window)
    assert read[1] == read[2] == read[3]
    stay = staying(forward(*units), sizes, window)
    assert read[1] <= sum(sizes[unit] for unit in units if unit not in stay)


@given(st.permutations(range(8)), sizes_of_8, st.integers(20, 80))
def test_rounds_that_use_each_unit_once_read_what_does_not_stay(units, sizes, window):
    plan = make_cycle(forward(*units), sizes, window, hides=sizes)
    stay = staying(forward(*units), sizes, window)
    away = [sizes[unit] for unit in units if unit not in stay]
    assert rounds(plan, sizes, window)[-1] <= sum(away)
    assert sum(away) - rounds(plan, sizes, window)[-1] <= 2 * max(away, default=0)

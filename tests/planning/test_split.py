"""How updates are divided between backward and forward. Nothing is faked; times can be told in one's head."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.planning.forecast import EngineLimits, Moves, predict_step
from infinity.planning.plan import make_plan
from infinity.planning.simulator import Disk, Rates
from infinity.planning.split import HalfStep, of_first, split_updates
from plan_texts import parse_plan

RATES = Rates(Disk(1.0, 1.0, 1.0), shared=False)
HI, STATE = 1, 4
"""Bytes of a unit: an update moves 2 x 4 + 1 = 9 beside the fetches, of 1 each."""


def moves(**more):
    return Moves(**{"numel": 10, "hi_nbytes": HI, "state_nbytes": STATE, "waiting_nbytes": HI, **more})


def plan_of(count):
    uses = [f"F{unit}" for unit in range(count)] + [f"B{unit}" for unit in reversed(range(count))]
    return parse_plan("\n".join(["open", *uses]))


def split(count, computes, *, candidates=None, rates=RATES, **more):
    may = range(count) if candidates is None else candidates
    return split_updates(computes, plan_of(count), [moves(**more)] * count, may, rates)


def test_halves_that_compute_for_as_long_get_as_many_updates_each():
    told = split(10, (60.0, 60.0))
    assert len(told.early) == 5
    assert told.forward == told.backward == HalfStep(60.0, 10 * HI + 5 * 9)
    assert str(told) == (
        "5 of 10 units in the backward; the disk is busy for 92% of the forward, 92% of the backward"
    )


def test_the_half_that_computes_three_times_as_long_gets_three_times_as_much():
    told = split(20, (60.0, 180.0))
    assert told.backward.load == pytest.approx(told.forward.load, rel=0.2)
    assert told.seconds == 240.0, "nothing waits"
    assert 14 <= len(told.early) <= 16


def test_where_the_disk_takes_longer_in_any_case_both_halves_have_as_much_to_spare():
    told = split(10, (1.0, 3.0))
    assert told.backward.disk_s / 3.0 == pytest.approx(told.forward.disk_s / 1.0, rel=0.4)


def test_a_forward_without_computing_leaves_all_updates_to_the_backward():
    assert len(split(4, (0.0, 1000.0)).early) == 4


def test_only_candidates_that_a_step_uses_and_updates_are_divided():
    assert split(4, (9.0, 9.0), candidates=[1, 3, 7]).candidates == 2
    assert split(4, (9.0, 9.0), trainable=False).candidates == 0
    assert set(split(4, (0.0, 1000.0), candidates=[1, 3]).early) == {1, 3}


def test_early_units_are_spread_evenly_over_the_layers():
    early = sorted(split(16, (60.0, 60.0)).early)
    gaps = [two - one for one, two in itertools.pairwise(early)]
    assert max(gaps) <= 3


def test_gradients_that_find_no_room_are_written_and_read_only_where_their_updates_wait():
    units = [moves(width=1, numel=2)] * 4
    for may, spilled in ([], 3), ([2], 1), ([2, 3], 0):
        told = split_updates((0.0, 1000.0), plan_of(4), units, may, RATES, room_nbytes=5)
        assert told.early == tuple(may)
        assert told.forward.disk_s == 4 * HI + 9 * (4 - len(may)) + spilled
        assert told.backward.disk_s == 4 * HI + 9 * len(may) + spilled


def test_updates_on_the_cores_that_compute_go_with_them():
    rates = Rates(Disk(1e9, 1e9, 1e9), update=1.0, shared=True)
    told = split(4, (20.0, 20.0), rates=rates)
    assert told.forward.compute_s + told.backward.compute_s == pytest.approx(20 + 20 + 4 * 10)


def test_ranks_agree_on_the_first_of_them():
    told = split(10, (60.0, 60.0))
    assert of_first(told, 3).early == told.early[:3]
    assert of_first(told, 7) == told


@given(st.integers(1, 40), st.floats(0.1, 300.0), st.floats(0.1, 300.0))
def test_no_number_of_early_updates_is_faster_by_more_than_a_hundredth(count, forward, backward):
    told = split(count, (forward, backward))
    for early in range(count + 1):
        half = count * HI
        takes = max(forward, half + 9 * (count - early)) + max(backward, half + 9 * early)
        assert told.seconds <= 1.0101 * takes


def test_the_forecast_walks_the_split_and_finds_it_faster_than_either_half_alone():
    count, rates = 12, Rates(Disk(1.0, 1.0, 1.0), shared=False)
    trace = tuple(step.use for step in plan_of(count).steps)
    units, plan = [moves()] * count, make_plan(trace, [HI] * count, 4, hides=[HI] * count)
    told = split_updates((70.0, 70.0), plan, units, range(count), rates)
    seconds = {}
    for name, update, early in (
        ("forward", "forward", ()),
        ("backward", "backward", ()),
        ("auto", "forward", told.early),
    ):
        limits = EngineLimits(10, 100, 4, 1000, update=update, early=frozenset(early))
        seconds[name] = predict_step(plan, [70.0 / count] * 2 * count, units, limits, rates).seconds
    assert seconds["auto"] < 0.95 * min(seconds["forward"], seconds["backward"])


def ahead(computes, **more):
    """Divide updates of four units that are made ahead; `hi` of the first and third lies in host memory."""
    units = [moves(numel=HI, width=1, hi_nbytes=HI * (number % 2)) for number in range(4)]
    return split_updates(computes, plan_of(4), units, range(4), RATES, ahead=True, **more)


def test_updates_made_ahead_write_half_of_hi_that_is_placed_too_and_the_forward_reads_it_again():
    told = ahead((0.0, 1000.0))
    assert set(told.early[:2]) == {1, 3}, "which moves no more than it does otherwise"
    assert set(told.early) == {0, 1, 2, 3}
    assert told.forward.disk_s == 2 * HI + 2 * HI / 2
    assert told.backward.disk_s == 2 * HI + 4 * 2 * STATE + 2 * HI + 2 * HI / 2


def test_where_the_disk_is_what_steps_wait_for_units_whose_hi_is_placed_are_left_to_the_forward():
    told = ahead((0.0, 0.0))
    assert set(told.early) == {1, 3}
    assert (told.forward.disk_s, told.backward.disk_s) == (
        2 * HI + 2 * 2 * STATE,
        2 * HI + 2 * (2 * STATE + HI),
    )


def test_where_gradients_find_no_room_either_the_forward_makes_as_many_updates_as_it_computes_beside():
    told = ahead((1.0, 1.0), room_nbytes=0)
    assert set(told.early) == {0, 1, 2, 3}, "what is written for hi is half of what a gradient would take"
    assert told.forward.disk_s > 1.0, "and the disk is busy in the forward"
    told = ahead((9.0, 1.0), room_nbytes=0)
    assert len(told.early) == 3
    assert told.forward.disk_s == 2 * HI + 0.5 * HI + 2 * STATE + HI, "which includes a gradient"
    assert told.forward.load > 1.0

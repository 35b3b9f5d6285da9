"""When updates are made ahead, from what became of the steps before. Nothing is faked."""

import math

import pytest

from infinity.planning.speculation import SpeculationHistory


def told(history, scales, **more):
    """Close steps with these factors; return whether the backward behind each would speculate."""
    found = []
    for scale in scales:
        made = history.speculates
        right = made and scale == history.scale
        history.close_step(
            scale, confirmed=int(right), dropped=int(made and not right), added_up=False, **more
        )
        found.append(history.speculates)
    return found


def test_two_steps_without_clipping_begin_it_and_several_clipped_ones_end_it():
    history = SpeculationHistory(None)
    assert not history.speculates
    assert told(history, [1.0, 1.0]) == [False, True]
    assert told(history, [0.5, 1.0, 1.0]) == [True, True, True], "one alone changes nothing"
    assert told(history, [0.4, 0.3, 0.2, 0.1])[-1] is False
    assert history.rests


def test_where_every_second_step_is_clipped_it_never_begins():
    history = SpeculationHistory(None)
    assert not any(told(history, [1.0 if number % 2 else 0.9 - number / 1e3 for number in range(100)]))


def test_the_factor_of_scaled_losses_is_expected_and_that_of_a_clipped_step_is_not():
    history = SpeculationHistory(None)
    assert history.scale == 1.0
    told(history, [2.0**-16] * 8)
    assert (history.scale, history.speculates) == (2.0**-16, True)
    told(history, [2.0**-17])
    assert history.scale == 2.0**-16
    told(history, [2.0**-15] * 7)
    assert history.scale == 2.0**-15


def test_factors_that_differ_between_parameters_are_never_expected():
    history = SpeculationHistory(None)
    assert not any(told(history, [math.nan] * 20))
    assert history.scale == 1.0


def test_gradients_that_are_added_up_stop_it_at_once_and_one_step_without_begins_it_again():
    for forced in (None, True):
        history = SpeculationHistory(forced)
        told(history, [1.0] * 3)
        history.close_step(1.0, confirmed=0, dropped=3, added_up=True)
        assert not history.speculates
        rest = [] if forced else [1.0] * 8
        assert told(history, [1.0, *rest])[-1]


def test_where_it_is_wrong_for_another_reason_it_rests_twice_as_long_each_time():
    history = SpeculationHistory(None)
    told(history, [1.0] * 2)
    rests = []
    for _ in range(8):
        assert history.speculates
        history.close_step(1.0, confirmed=0, dropped=5, added_up=False)
        rests.append(1)
        while not history.speculates:
            history.close_step(1.0, confirmed=0, dropped=0, added_up=False)
            rests[-1] += 1
    assert rests[:4] == [9, 17, 33, 65]
    assert rests[-1] == 513
    history.close_step(1.0, confirmed=5, dropped=0, added_up=False)
    history.close_step(1.0, confirmed=0, dropped=5, added_up=False)
    assert told(history, [1.0] * 8) == [False] * 7 + [True], "what was right once is forgiven"


@pytest.mark.parametrize("forced", [False, True])
def test_it_may_be_decided_in_advance(forced):
    history = SpeculationHistory(forced)
    assert history.speculates is forced
    assert set(told(history, [1.0, 0.1, 1.0, 0.2])) == {forced}
    assert history.is_forced is forced
    assert not history.rests


def test_what_has_no_room_is_never_tried_again():
    history = SpeculationHistory(None)
    told(history, [1.0] * 4)
    history.give_up()
    assert not history.speculates
    assert not any(told(history, [1.0] * 20))

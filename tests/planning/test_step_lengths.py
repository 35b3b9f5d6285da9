"""When what was decided from the times of steps is decided anew. Nothing is faked: times are numbers."""

import pytest

from infinity.planning.step_lengths import DRIFT, DecisionsByLength, TimedStep

SHORT, LONG = 8, 12


def took(forward_s, backward_s=None, rate=100.0):
    return TimedStep(forward_s, 3 * forward_s if backward_s is None else backward_s, rate)


def decided_before(steps, decisions=None):
    """Return which of these steps, (length, what it took), begin with a decision, and from what."""
    decisions = DecisionsByLength() if decisions is None else decisions
    found = {}
    for number, (length, timed) in enumerate(steps, 1):
        due = decisions.due(length)
        if due is not None:
            decisions.decide(length, f"of step {number}", due)
            found[number] = due
        decisions.add(length, timed)
    return found


def test_steps_alike_are_decided_for_behind_the_first_and_then_behind_twice_as_many():
    assert list(decided_before([(SHORT, took(1.0))] * 40)) == [2, 3, 5, 9, 17, 33]


def test_lengths_that_alternate_keep_a_decision_each():
    decisions = DecisionsByLength()
    found = decided_before([(SHORT, took(1.0)), (LONG, took(16.0))] * 20, decisions)
    assert list(found) == [2, 3, 4, 5, 6, 9, 10, 17, 18, 33, 34], "each as if it were alone, and one guess"
    assert {found[number].forward_s for number in (3, 5, 9, 17, 33)} == {1.0}
    assert {found[number].forward_s for number in (2, 4, 6, 10, 18, 34)} == {16.0}
    assert decisions.of(SHORT) == "of step 33"
    assert decisions.of(LONG) == "of step 34"


def test_one_disturbed_step_decides_nothing():
    steps = [(SHORT, took(1.0))] * 40
    steps[20] = (SHORT, took(100.0))
    assert list(decided_before(steps)) == [2, 3, 5, 9, 17, 33]


@pytest.mark.parametrize("other", [took(2.0), took(0.5), took(1.0, 6.0), took(1.0, 1.5)])
def test_steps_that_have_come_to_take_other_times_are_decided_for_once_more_and_then_left_alone(other):
    found = decided_before([(SHORT, took(1.0))] * 20 + [(SHORT, other)] * 10)
    assert list(found) == [2, 3, 5, 9, 17, 24], "three of the last five are others"
    assert found[24] == other


def test_what_was_decided_holds_until_times_have_moved_as_far_again():
    little = took(0.9 * DRIFT)
    back_and_forth = [(SHORT, took(1.0))] * 20 + [(SHORT, little), (SHORT, took(1.0))] * 5
    assert list(decided_before(back_and_forth)) == [2, 3, 5, 9, 17]


def test_a_half_that_hardly_computes_beside_the_other_decides_nothing():
    found = decided_before([(SHORT, took(0.001, 1.0))] * 20 + [(SHORT, took(0.004, 1.0))] * 10)
    assert list(found) == [2, 3, 5, 9, 17]


def test_a_new_length_is_decided_for_from_the_nearest_in_proportion_and_then_from_its_own_steps():
    steps = [(SHORT, took(1.0)), (LONG, took(10.0)), (LONG - 1, took(7.0)), (LONG - 1, took(7.0))]
    found = decided_before(steps)
    assert found[2] == took(16.0), "of steps a sixteenth as long"
    assert found[3] == took(5.0), "of steps twice as long"
    assert found[4] == took(7.0)


def test_nothing_is_decided_from_nothing():
    decisions = DecisionsByLength()
    assert decisions.due(SHORT) is None
    assert decisions.of(SHORT) is None


def test_a_decision_for_nothing_is_made_again_behind_twice_as_many_steps():
    decisions = DecisionsByLength()
    decisions.add(SHORT, took(1.0))
    decisions.decide(SHORT, None, took(1.0))
    assert decisions.due(SHORT) is None
    decisions.add(SHORT, took(1.0))
    assert decisions.due(SHORT) == took(1.0)

"""Which slices take free room, and which leave it. Pure: uses are counted by hand."""

import numpy as np
import pytest

from infinity.planning.admission import RESERVED, Admission
from infinity.planning.frequency import Frequencies


def counted(*steps, units=8):
    frequencies = Frequencies(units)
    for step in steps:
        for unit in step:
            frequencies.used(unit)
        frequencies.close_step()
    return frequencies


def closed(admission, placed, free_nbytes):
    """Close a step; placed: the bytes of each slice that has a place."""
    return admission.close_step(np.array(list(placed)), np.array(list(placed.values())), free_nbytes)


def test_all_that_is_used_wants_room_while_most_of_it_is_free():
    admission = Admission(counted([0, 1]))
    assert admission.wants(7, 10)
    assert closed(admission, {0: 10, 1: 10}, 30) == []
    assert admission.wants(6, 10)
    assert admission.reserve_nbytes == round(RESERVED * 10)


def test_a_newcomer_is_wanted_if_it_is_expected_more_than_what_is_used_least():
    admission = Admission(counted(*[[0, 1]] * 10, [2]))
    assert closed(admission, {0: 10, 1: 10}, 0) == []
    assert not admission.wants(3, 10), "once in 12 steps, and the others in 10"
    admission = Admission(counted(*[[0, 1, 2]] * 10, [2], [2]))
    assert closed(admission, {0: 10, 1: 10, 3: 10}, 0) == []
    assert admission.wants(2, 10)


def test_those_that_are_used_least_leave_until_there_is_what_newcomers_asked_for():
    admission = Admission(counted(*[[0, 1, 2]] * 9, [0, 1], [0]))
    assert not admission.is_asked
    assert admission.wants(3, 20)
    assert admission.is_asked
    placed = dict.fromkeys(range(3), 20) | dict.fromkeys(range(4, 8), 20)
    assert closed(admission, placed, 0) == [4], "no use at all"
    assert admission.reserve_nbytes == round(RESERVED * 20)
    assert closed(admission, {one: 20 for one in placed if one != 4}, 20) == []


def test_no_more_than_a_quarter_is_kept_free():
    admission = Admission(counted([0, 1, 2, 3]))
    admission.wants(4, 1000)
    assert len(closed(admission, dict.fromkeys(range(4), 20), 0)) == 1
    assert admission.reserve_nbytes == 20


@pytest.mark.parametrize("steps", [1, 5])
def test_what_nobody_asks_for_any_more_is_no_longer_kept_free(steps):
    admission = Admission(counted([0]))
    admission.wants(1, 16)
    closed(admission, {0: 1000}, 0)
    before = admission.reserve_nbytes
    for _ in range(steps):
        closed(admission, {0: 1000}, 16)
    assert admission.reserve_nbytes < before
    assert admission.is_asked is (steps == 1)

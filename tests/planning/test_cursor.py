"""Where in its plan a step is. Pure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.planning import cursor as module
from infinity.planning.cursor import Cursor
from infinity.planning.plan import Plan, PlanStep
from infinity.planning.trace import Phase, Use
from plan_texts import parse_plan


def use(text):
    return Use(Phase(text[0]), int(text[1:]))


def uses(text):
    return [use(word) for word in text.split()]


def cursor_of(text):
    """A cursor in the middle of training: with a plan whose opening was fetched."""
    cursor = Cursor()
    cursor.follow(parse_plan(text))
    cursor.restart()
    return cursor


PLAN = """
open fetch 0
F0 fetch 1
F1 fetch 2 keep
F2 fetch 3
B2
B1
"""


def upcoming(cursor):
    return [str(one) for one in cursor.upcoming()]


def test_without_a_plan_nothing_is_foreseen_and_all_is_remembered():
    cursor = Cursor()
    assert cursor.advance(use("F0")) == ((), False, False)
    assert upcoming(cursor) == []
    assert cursor.trace == uses("F0")
    assert (cursor.divergences, cursor.reordered) == (0, 0)


def test_a_step_as_planned_gives_each_use_its_fetches_and_whether_it_stays():
    cursor = cursor_of(PLAN)
    found = [cursor.advance(one) for one in uses("F0 F1 F2 B2 B1")]
    assert found == [
        ((1,), False, True),
        ((2,), True, True),
        ((3,), False, True),
        ((), False, True),
        ((), False, True),
    ]
    assert (cursor.divergences, cursor.reordered) == (0, 0)
    assert cursor.trace == uses("F0 F1 F2 B2 B1")
    assert upcoming(cursor) == []


def test_a_use_close_by_may_come_early_and_the_others_are_still_awaited():
    cursor = cursor_of(PLAN)
    assert cursor.advance(use("F2")) == ((3,), False, True)
    assert upcoming(cursor) == ["F0", "F1", "F2", "B2", "B1"]
    assert cursor.advance(use("F0"))[2]
    assert upcoming(cursor) == ["F1", "F2", "B2", "B1"]
    assert cursor.advance(use("F1"))[2]
    assert upcoming(cursor) == ["B2", "B1"], "what came early is behind us, too"
    assert cursor.divergences == 0
    assert cursor.reordered == 1


def test_a_use_that_came_early_is_not_taken_twice():
    cursor = cursor_of("open\nF0\nF1 fetch 7\nF0\nF1 fetch 8")
    assert [cursor.advance(one)[0] for one in uses("F1 F1")] == [(7,), (8,)]
    assert cursor.divergences == 0
    assert cursor.advance(use("F1")) == ((7,), False, False), "both are taken: this is a third"
    assert cursor.divergences == 1


def far(position):
    """A plan whose use B0 has this position, among uses of other units."""
    steps = [PlanStep(Use(Phase.FORWARD, 1 + one)) for one in range(200)]
    steps[position] = PlanStep(use("B0"), (5,), True)
    return Plan((), tuple(steps))


@pytest.mark.parametrize(("position", "foreseen"), [(64, True), (65, False)])
def test_a_use_far_ahead_is_a_divergence_and_the_cursor_jumps_there(position, foreseen):
    cursor = Cursor()
    cursor.follow(far(position))
    cursor.restart()
    assert cursor.advance(use("B0")) == ((5,), True, foreseen)
    assert cursor.divergences == (not foreseen)
    assert cursor.position == (0 if foreseen else position + 1)
    assert cursor.reordered == 1


def test_a_use_that_is_behind_takes_the_cursor_back():
    cursor = cursor_of(PLAN)
    for one in uses("F0 F1 F2 B2"):
        cursor.advance(one)
    assert cursor.advance(use("F1")) == ((2,), True, False)
    assert upcoming(cursor) == ["F2", "B2", "B1"]
    assert cursor.divergences == 1


def test_what_came_early_before_a_jump_counts_no_more():
    cursor = cursor_of(PLAN)
    for one in uses("F1 B1 F0"):
        cursor.advance(one)
    assert upcoming(cursor) == ["F2", "B2", "B1"]
    cursor.advance(use("F0"))  # back to the start
    assert cursor.divergences == 1
    assert [cursor.advance(one)[2] for one in uses("F1 F2 B2 B1")] == [True] * 4
    assert upcoming(cursor) == []


def test_a_use_that_the_plan_does_not_know_leaves_the_cursor_where_it_is():
    cursor = cursor_of(PLAN)
    cursor.advance(use("F0"))
    assert cursor.advance(use("F9")) == ((), False, False)
    assert upcoming(cursor)[0] == "F1"
    assert cursor.trace == uses("F0 F9")
    assert cursor.divergences == 0


def test_the_first_use_after_a_new_plan_has_not_been_fetched_and_is_no_divergence():
    cursor = Cursor()
    cursor.follow(parse_plan(PLAN))
    assert cursor.advance(use("F0")) == ((1,), False, False)
    assert cursor.divergences == 0
    assert cursor.advance(use("F1"))[2]


def test_a_step_begins_at_the_start_of_the_plan_without_memory_of_the_last():
    cursor = cursor_of(PLAN)
    for one in uses("F1 B2 B2"):
        cursor.advance(one)
    divergences = cursor.divergences
    cursor.restart()
    assert (cursor.position, cursor.trace, cursor.reordered) == (0, [], 0)
    assert cursor.divergences == divergences == 1
    assert [cursor.advance(one)[2] for one in uses("F0 F1 F2 B2 B1")] == [True] * 5


def test_what_came_early_in_one_step_is_awaited_in_the_next():
    cursor = cursor_of(PLAN)
    cursor.advance(use("B2"))
    cursor.restart()
    for one in uses("F0 F1 F2"):
        cursor.advance(one)
    assert upcoming(cursor) == ["B2", "B1"]


def test_a_step_without_end_is_followed_but_not_remembered(monkeypatch):
    monkeypatch.setattr(module, "_TRACE_LIMIT", 3)
    cursor = cursor_of(PLAN)
    found = [cursor.advance(one)[2] for one in uses("F0 F1 F2 B2 B1")]
    assert found == [True] * 5
    assert cursor.trace == uses("F0 F1 F2")


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=40).flatmap(
        lambda units: st.tuples(st.just(units), st.permutations(units))
    )
)
def test_a_step_in_any_order_nearby_takes_each_planned_use_exactly_once(planned_and_come):
    planned, come = planned_and_come
    cursor = Cursor()
    steps = (PlanStep(Use(Phase.FORWARD, unit), (100 + place,)) for place, unit in enumerate(planned))
    cursor.follow(Plan((), tuple(steps)))
    cursor.restart()
    fetched = [cursor.advance(Use(Phase.FORWARD, unit))[0][0] for unit in come]
    assert sorted(fetched) == [100 + place for place in range(len(planned))]
    assert (cursor.divergences, cursor.position) == (0, len(planned))

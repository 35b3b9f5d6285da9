"""The schedule of a step. Pure: plans are compared as text, and run on a simulated device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.plan import Plan, make_plan
from infinity.trace import Phase, Use

F, B = Phase.FORWARD, Phase.BACKWARD


def there_and_back(count):
    return tuple([Use(F, unit) for unit in range(count)] + [Use(B, unit) for unit in reversed(range(count))])


def test_the_plan_of_a_small_step():
    # Five units of 10 bytes, 20 may wait: two are ahead, and the last of the forward stays for the backward.
    assert str(make_plan(there_and_back(5), [10] * 5, 20)).splitlines() == [
        "open fetch 0 1",
        "F0 fetch 2",
        "F1 fetch 3",
        "F2 fetch 4",
        "F3 keep",
        "F4 keep",
        "B4 fetch 2",
        "B3 fetch 1",
        "B2 fetch 0",
        "B1",
        "B0",
    ]


def test_without_room_nothing_is_fetched_ahead():
    assert "fetch" not in str(make_plan(there_and_back(3), [10] * 3, 9))


def test_with_room_for_all_everything_is_fetched_once():
    plan = make_plan(there_and_back(4), [10] * 4, 1000)
    assert plan.opening == (0, 1, 2, 3)
    assert all(step.fetch == () for step in plan.steps)
    assert [step.keep for step in plan.steps] == [True] * 4 + [False] * 4


def simulate(plan, trace, sizes, window):
    """Walk a plan; return how often units were fetched on demand, and ahead. What waits must fit."""
    waiting, demanded, ahead = set(plan.opening), 0, len(plan.opening)
    for step, use in zip(plan.steps, trace, strict=True):
        assert step.use == use
        demanded += use.unit not in waiting
        waiting.discard(use.unit)
        assert not waiting & set(step.fetch)
        waiting |= set(step.fetch)
        ahead += len(step.fetch)
        if step.keep:
            waiting.add(use.unit)
        assert sum(sizes[unit] for unit in waiting) <= window
    assert not waiting, "fetched, and never used"
    return demanded, ahead


units = st.lists(st.integers(0, 7), min_size=1, max_size=40)
traces = units.map(lambda units: tuple(Use(F, unit) for unit in units))


@given(traces, st.lists(st.integers(1, 9), min_size=8, max_size=8), st.integers(0, 40))
def test_a_plan_never_lets_more_wait_than_the_window_holds(trace, sizes, window):
    simulate(make_plan(trace, sizes, window), trace, sizes, window)


@given(traces, st.lists(st.integers(1, 9), min_size=8, max_size=8), st.integers(9, 40))
def test_a_unit_that_fits_the_window_never_has_to_be_asked_for(trace, sizes, window):
    demanded, _ = simulate(make_plan(trace, sizes, window), trace, sizes, window)
    assert demanded == 0


@given(st.integers(2, 12), st.integers(1, 12))
def test_the_turn_costs_no_fetch(count, room):
    trace, sizes = there_and_back(count), [1] * count
    demanded, ahead = simulate(make_plan(trace, sizes, room), trace, sizes, room)
    assert demanded + ahead == 2 * count - min(room, count)


@given(traces, st.integers(0, 40))
def test_a_plan_is_its_text(trace, window):
    plan = make_plan(trace, [3] * 8, window)
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("text", ["", "F0 fetch 1", "open\nX0", "open\nF"])
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match=r"plan|open"):
        Plan.parse(text)

"""The schedule of a step. Pure: plans are compared as text, walked as the residency would, and measured
against every choice there is.
"""

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from infinity.planning.plan import Plan, make_plan
from infinity.planning.trace import Phase, Use
from plan_texts import parse_plan
from policies import fewest_read, in_order_read

F, B = Phase.FORWARD, Phase.BACKWARD


def there_and_back(count, passes=1):
    forward = [Use(F, unit) for unit in range(count)]
    return tuple((forward + [Use(B, use.unit) for use in reversed(forward)]) * passes)


def forward(*units):
    return tuple(Use(F, unit) for unit in units)


def lines(*args, **kwargs):
    return str(make_plan(*args, **kwargs)).splitlines()


# Plans as text


def test_the_plan_of_a_small_step():
    # Five units of 10 bytes, 20 may wait: two are ahead, and the last of the forward stays for the backward.
    assert lines(there_and_back(5), [10] * 5, 20) == [
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


def test_where_two_passes_meet_the_first_unit_stays_too():
    # Three units, one may wait, two forwards with their backwards: 2 turns in the middle, 0 between passes.
    assert lines(there_and_back(3, passes=2), [10] * 3, 10) == [
        "open fetch 0",
        *("F0 fetch 1", "F1 fetch 2", "F2 keep", "B2 fetch 1", "B1 fetch 0", "B0 keep"),
        *("F0 fetch 1", "F1 fetch 2", "F2 keep", "B2 fetch 1", "B1 fetch 0", "B0"),
    ]


def test_without_room_nothing_is_fetched_ahead():
    assert "fetch" not in str(make_plan(there_and_back(3), [10] * 3, 9))


def test_with_room_for_all_everything_is_fetched_once():
    plan = make_plan(there_and_back(4), [10] * 4, 1000)
    assert plan.opening == (0, 1, 2, 3)
    assert all(step.fetch == () for step in plan.steps)
    assert [step.keep for step in plan.steps] == [True] * 4 + [False] * 4


def test_what_is_used_soonest_stays():
    # One may wait. After its first use 0 is needed in two uses, 1 in four: 0 stays, and 1 is read again.
    assert lines(forward(1, 0, 2, 0, 1), [10] * 3, 10) == [
        "open fetch 1",
        "F1 fetch 0",
        "F0 keep",  # while 0 waits there is no room for 2: its use asks for it
        "F2",
        "F0 fetch 1",
        "F1",
    ]


def test_a_unit_larger_than_the_window_is_read_at_its_use_and_holds_nothing_up():
    assert lines(forward(0, 1, 2), [10, 99, 10], 20) == ["open fetch 0 2", "F0", "F1", "F2"]


def test_a_read_that_fits_later_does_not_hold_up_a_smaller_one_behind_it():
    # 1 has to wait until 0 is in use; 2 fits beside either.
    assert lines(forward(0, 1, 2), [10, 15, 5], 20) == ["open fetch 0 2", "F0 fetch 1", "F1", "F2"]


def test_a_unit_of_no_size_is_neither_fetched_nor_kept():
    assert lines(there_and_back(2), [0, 10], 10) == ["open fetch 1", "F0", "F1 keep", "B1", "B0"]


def test_tied_weights_stay_if_that_is_all_the_window_holds_unless_room_is_held_back_for_reads():
    # 0 is the embedding and the head; the window holds it alone.
    trace, sizes = forward(0, 1, 2, 0), [10] * 3
    fewest, ahead = make_plan(trace, sizes, 10), make_plan(trace, sizes, 10, hides=sizes)
    assert str(fewest).splitlines() == ["open fetch 0", "F0 keep", "F1", "F2", "F0"]
    assert str(ahead).splitlines() == ["open fetch 0", "F0 fetch 1", "F1 fetch 2", "F2 fetch 0", "F0"]
    assert [read_nbytes(plan, trace, sizes, 10) for plan in (fewest, ahead)] == [30, 40]


def test_room_is_held_back_by_what_uses_hide_and_not_by_their_number():
    # 0 is the embedding and the head; before each layer runs a norm, which hides next to nothing of its read.
    trace, sizes = forward(0, 1, 2, 3, 4, 0), [10, 1, 10, 1, 10]
    by_count, by_bytes = (make_plan(trace, sizes, 20, hides=hides) for hides in ([99] * 5, sizes))
    assert str(by_count).splitlines() == [
        *("open fetch 0 1", "F0 keep", "F1 fetch 2", "F2 fetch 3", "F3 fetch 4", "F4", "F0")
    ]
    assert str(by_bytes).splitlines() == [
        *("open fetch 0 1 3", "F0 fetch 2", "F1", "F2 fetch 4", "F3 fetch 0", "F4", "F0")
    ]
    use_s = [sizes[use.unit] for use in trace]  # a byte is used for as long as one takes to be read
    assert [seconds_of(plan, trace, sizes, use_s) for plan in (by_count, by_bytes)] == [70, 53]
    assert [read_nbytes(plan, trace, sizes, 20) for plan in (by_count, by_bytes)] == [32, 42]


def test_no_more_room_is_held_back_for_a_read_than_is_left_for_it():
    # 3 is read while 2 is used, and while 1 is, as far as time goes; but beside 2 there is no room for it.
    trace, sizes, hides = forward(0, 1, 2, 3, 0), [1, 2, 3, 3], [0, 4, 1, 3]
    assert lines(trace, sizes, 5, hides=hides) == [
        *("open fetch 0 1", "F0 keep", "F1 fetch 2", "F2 fetch 3", "F3", "F0"),
    ]


def test_what_fits_since_its_use_before_stays_and_is_not_fetched_by_that_use():
    # The room that was held back for reads turns out not to be needed where they begin earlier.
    trace, sizes, hides = forward(3, 1, 2, 4, 0, 3), [1, 8, 2, 1, 9], [10, 2, 2, 1, 5]
    plan = make_plan(trace, sizes, 17, hides=hides)
    assert str(plan).splitlines()[:2] == ["open fetch 3 1 2 0", "F3 keep"]
    assert read_nbytes(plan, trace, sizes, 17) == sum(sizes)


sizes_of_8 = st.lists(st.integers(0, 9), min_size=8, max_size=8)
traces = st.lists(st.integers(0, 7), max_size=40).map(lambda units: forward(*units))
hidden = st.none() | st.lists(st.integers(0, 12), min_size=8, max_size=8)


@given(traces, st.integers(0, 40))
def test_a_plan_is_its_text(trace, window):
    plan = make_plan(trace, [3] * 8, window)
    assert parse_plan(str(plan)) == plan


# What holds for any plan


def walk(plan, trace, sizes, window):
    """Do what the residency does. Returns what waits after each use (the opening first), and per use how its
    unit was met: "there", or "asked" for; raises where the plan is wrong.
    """
    waiting, pinned = set(), {unit for unit, nbytes in enumerate(sizes) if not nbytes}
    moments, met = [], []

    def begin(fetch, in_use):
        for unit in fetch:
            assert unit not in waiting | pinned | in_use, f"{unit} is fetched, and is there"
            waiting.add(unit)
            assert sum(sizes[one] for one in waiting) <= window

    begin(plan.opening, set())
    moments.append(set(waiting))
    for step, use in zip(plan.steps, trace, strict=True):
        assert step.use == use
        met.append("there" if use.unit in waiting | pinned else "asked")
        waiting.discard(use.unit)
        begin(step.fetch, {use.unit})
        if step.keep:
            waiting.add(use.unit)
        assert sum(sizes[one] for one in waiting) <= window
        moments.append(set(waiting))
    assert not waiting, "waits, and is never used"
    return moments, met


def read_nbytes(plan, trace, sizes, window):
    """Bytes that the plan's step reads, ahead and on demand."""
    _, met = walk(plan, trace, sizes, window)
    fetched = itertools.chain(plan.opening, *(step.fetch for step in plan.steps))
    asked = (use.unit for use, how in zip(trace, met, strict=True) if how == "asked")
    return sum(sizes[unit] for unit in itertools.chain(fetched, asked))


@given(traces, sizes_of_8, st.integers(0, 40), hidden)
def test_a_plan_keeps_to_its_window_and_fetches_only_what_is_away_and_needed(trace, sizes, window, hides):
    walk(make_plan(trace, sizes, window, hides=hides), trace, sizes, window)


@given(traces, sizes_of_8, st.integers(0, 40), hidden)
def test_a_use_has_to_ask_only_where_its_unit_had_no_room_just_before(trace, sizes, window, hides):
    moments, met = walk(make_plan(trace, sizes, window, hides=hides), trace, sizes, window)
    for position, use in enumerate(trace):
        if met[position] == "asked":
            waited = sum(sizes[unit] for unit in moments[position])
            just_used = position and trace[position - 1].unit == use.unit
            assert waited + sizes[use.unit] > window or just_used


@given(traces, sizes_of_8, st.integers(9, 40), hidden.filter(bool))
def test_where_room_is_held_back_a_unit_that_fits_the_window_never_has_to_be_asked_for(
    trace, sizes, window, hides
):
    _, met = walk(make_plan(trace, sizes, window, hides=hides), trace, sizes, window)
    assert "asked" not in met


@given(traces, sizes_of_8, st.integers(0, 40), hidden)
def test_a_read_begins_as_early_as_there_is_room(trace, sizes, window, hides):
    plan = make_plan(trace, sizes, window, hides=hides)
    moments, _ = walk(plan, trace, sizes, window)
    for moment, step in enumerate(plan.steps, 1):
        for unit in step.fetch:
            waited = sum(sizes[one] for one in moments[moment - 1])
            assert waited + sizes[unit] > window or unit in {step.use.unit, trace[moment - 2].unit}


@given(st.integers(2, 12), st.integers(1, 12), st.integers(1, 3))
def test_the_turn_costs_no_fetch(count, room, passes):
    trace, sizes = there_and_back(count, passes), [1] * count
    turns = 2 * passes - 1
    assert read_nbytes(make_plan(trace, sizes, room), trace, sizes, room) <= (
        2 * passes * count - turns * min(room, count)
    )


def test_the_last_units_of_the_forward_are_not_read_again():
    plan = make_plan(there_and_back(10), [1] * 10, 3)
    of_backward = itertools.chain(*(step.fetch for step in plan.steps[10:]))
    assert [step.use.unit for step in plan.steps if step.keep] == [7, 8, 9]
    assert list(of_backward) == [6, 5, 4, 3, 2, 1, 0]


# Against every choice there is

small = st.lists(st.integers(0, 3), min_size=1, max_size=8).map(lambda units: forward(*units))


@given(small, st.integers(1, 4), st.booleans())
def test_for_units_of_one_size_no_choice_reads_less(trace, window, held_back):
    plan = make_plan(trace, [1] * 4, window, hides=[1] * 4 if held_back else None)
    units = [use.unit for use in trace]
    assert read_nbytes(plan, trace, [1] * 4, window) == fewest_read(
        units, [1] * 4, window, held_back=held_back
    )


@given(small, st.lists(st.integers(1, 3), min_size=4, max_size=4), st.integers(1, 12))
def test_for_other_sizes_it_reads_less_than_twice_what_any_choice_must(trace, sizes, window):
    # Of all traces of 8 uses of up to 4 units of 1 to 3 bytes, with each window, 7 in 100 plans read more
    # than they must, at worst 13/7 of it: 0 1 0 1 0 1 0 1, sizes 1 and 3, a window of 3, where 0 is kept and
    # 1 should be. There is no bound for all sizes: the longer this goes on, the nearer it comes to 3.
    plan = make_plan(trace, sizes, window)
    fewest = fewest_read([use.unit for use in trace], sizes, window)
    assert fewest <= read_nbytes(plan, trace, sizes, window) < fewest * 2


@given(traces, sizes_of_8, st.integers(0, 40), hidden)
def test_it_never_reads_more_than_looking_ahead_in_the_order_of_the_trace(trace, sizes, window, hides):
    read = read_nbytes(make_plan(trace, sizes, window, hides=hides), trace, sizes, window)
    assert read <= in_order_read([use.unit for use in trace], sizes, window)


# Against time


def seconds_of(plan, trace, read_s, use_s):
    """Seconds of a step: one read after the other as they begin, of read_s by unit; uses wait for theirs."""
    now, free, there = 0, 0, {}

    def begin(units):
        nonlocal free
        for unit in units:
            there[unit] = free = max(free, now) + read_s[unit]

    begin(plan.opening)
    for step, use, seconds in zip(plan.steps, trace, use_s, strict=True):
        if use.unit not in there:
            begin([use.unit])
        now = max(now, there.pop(use.unit))
        begin(step.fetch)
        if step.keep:
            there[use.unit] = now
        now += seconds
    return now


def with_a_later_read(plan, trace, data):
    """The plan with one of its reads, wherever it is, begun at some later moment, before or behind others."""
    moments = [list(plan.opening), *(list(step.fetch) for step in plan.steps)]
    reads = [(moment, unit) for moment, units in enumerate(moments) for unit in units]
    moment, unit = data.draw(st.sampled_from(reads))
    used = next(at for at in range(moment, len(trace)) if trace[at].unit == unit)
    later = data.draw(st.integers(moment, used))
    moments[moment].remove(unit)
    moments[later].insert(data.draw(st.integers(0, len(moments[later]))), unit)
    opening, *fetches = map(tuple, moments)
    steps = (replace(step, fetch=fetch) for step, fetch in zip(plan.steps, fetches, strict=True))
    return Plan(opening, tuple(steps))


@given(st.data(), traces.filter(len), st.integers(1, 8), hidden, st.integers(0, 5))
def test_whatever_reads_and_uses_take_no_read_that_begins_later_makes_a_step_shorter(
    data, trace, window, hides, read_s
):
    plan = make_plan(trace, [1] * 8, window, hides=hides)
    use_s = data.draw(st.lists(st.integers(0, 9), min_size=len(trace), max_size=len(trace)))
    later = with_a_later_read(plan, trace, data)
    assert seconds_of(plan, trace, [read_s] * 8, use_s) <= seconds_of(later, trace, [read_s] * 8, use_s)


def test_a_thousand_units_and_three_passes_are_planned():
    trace, sizes = there_and_back(1000, passes=3), [10] * 1000
    plan = make_plan(trace, sizes, 1000, hides=sizes)
    assert read_nbytes(plan, trace, sizes, 1000) == 10 * (6000 - 5 * 100)

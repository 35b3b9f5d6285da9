"""Contestants that take turns. Faked: most contestants."""

import os
from dataclasses import replace
from functools import partial

import pytest

from infinity.bench.engine.runs import OWN, Model, RunError, counts, measure, settings_of
from infinity.bench.engine.turns import seconds_of_turns, take_turns
from leftovers import held, left_since
from measurements import RUN


def contestant(name, turns, said, baton, *, fails_in=None):
    """Say the name in each turn, as a contestant's process would train."""
    for number in range(turns):
        if not os.read(baton, 1):
            said.append(f"{name} was ended")
            return RUN
        if number == fails_in:
            raise RunError(f"{name} failed")
        said.append(name)
        os.write(baton, b".")
    return RUN


def test_each_has_its_turn_in_the_order_given_and_nobody_runs_beside():
    said = []
    runs = {name: partial(contestant, name, 2, said) for name in "ab"}
    found = take_turns(runs, ["ab", "ba"], lambda: said.append("-"))
    assert said == ["-", "a", "b", "-", "b", "a"]
    assert found == {"a": RUN, "b": RUN}


def test_where_one_fails_its_error_is_told_and_the_others_end():
    said, before = [], held()
    runs = {"a": partial(contestant, "a", 3, said, fails_in=1), "b": partial(contestant, "b", 3, said)}
    with pytest.raises(RunError, match="a failed"):
        take_turns(runs, ["ab"] * 3, lambda: None)
    assert said == ["a", "b", "b was ended"]
    assert left_since(before) == []


def test_one_that_ends_early_without_an_error_is_told_too():
    runs = {"a": partial(contestant, "a", 1, [])}
    with pytest.raises(RunError, match="a ended before its last turn"):
        take_turns(runs, ["a"] * 2, lambda: None)


def test_an_interrupt_between_turns_ends_all():
    said = []

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_turns({"a": partial(contestant, "a", 1, said)}, ["a"], interrupt)
    assert said == ["a was ended"]


def test_the_first_step_of_a_turn_and_the_first_turn_do_not_count():
    assert [number for number in range(12) if counts(number, 4)] == [5, 6, 7, 9, 10, 11]
    assert [number for number in range(5) if counts(number)] == [3, 4]
    run = replace(RUN, all_seconds=[9.0, 9, 9, 9, 9, 1, 3, 2, 9, 4, 5, 6])
    assert seconds_of_turns(run, 4) == [2.0, 5.0]


@pytest.mark.disk
@pytest.mark.slow
def test_real_contestants_train_the_same_whether_they_take_turns_or_not(tmp_path):
    model = Model("1m", 16, 8, turn=4)

    def run(settings, baton):
        return measure(OWN, "infinity", model, tmp_path, settings, baton=baton)

    ways = {"fp32": settings_of("2MiB"), "bf16": settings_of("2MiB", state_dtype="bf16")}
    found = take_turns({way: partial(run, one) for way, one in ways.items()}, [list(ways)] * 2, lambda: None)
    alone = measure(OWN, "infinity", Model("1m", 16, 8), tmp_path, ways["fp32"])
    assert found["fp32"].all_losses == alone.all_losses
    assert len(seconds_of_turns(found["bf16"], 4)) == 1

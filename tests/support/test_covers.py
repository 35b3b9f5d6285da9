"""Trusted: itertools. Faked: nothing."""

import itertools

import pytest

from covers import matrix


def by_default(cases):
    return [case.values for case in cases if not case.marks]


def test_every_pair_of_values_meets_by_default_and_every_combination_is_there():
    axes = {"a": [1, 2, 3], "b": ["x", "y", "z"], "c": [True, False], "d": [0.5, 0.25, 0.125]}
    names, cases = matrix(**axes)
    assert names == "a,b,c,d"
    assert {case.values for case in cases} == set(itertools.product(*axes.values()))
    chosen = by_default(cases)
    assert len(chosen) <= 12
    for one, other in itertools.combinations(range(4), 2):
        values = list(axes.values())
        assert {(case[one], case[other]) for case in chosen} == set(
            itertools.product(values[one], values[other])
        )


def test_each_value_runs_once_by_default_where_none_have_to_meet():
    _, cases = matrix(together=1, a=[1, 2, 3], b=["x", "y"])
    assert len(cases) == 6
    assert by_default(cases) == [(1, "x"), (2, "y"), (3, "x")]
    _, cases = matrix(together=1, a=range(6), b=["x", "y"])
    assert [b for _, b in by_default(cases)] == ["x", "y"] * 3


def test_every_value_of_a_single_axis_runs_by_default():
    assert by_default(matrix(a=[1, 2, 3])[1]) == [(1,), (2,), (3,)]


def test_combinations_that_do_not_exist_are_not_there_and_their_pairs_not_missed():
    _, cases = matrix(possible=lambda a, b: a != b, a=[1, 2, 3], b=[1, 2])
    assert {case.values for case in cases} == {(1, 2), (2, 1), (3, 1), (3, 2)}
    assert len(by_default(cases)) == 4


def test_names_say_which_values_a_case_has():
    _, cases = matrix(a={"none": None, "some": {"x": 1}}, b=[int, float])
    assert [case.id for case in cases] == ["none-int", "none-float", "some-int", "some-float"]


def test_values_of_the_same_name_are_refused():
    with pytest.raises(ValueError, match="2 values have 1 names"):
        matrix(a=[1, "1"])


def test_where_all_are_too_many_so_many_values_meet_and_no_more_is_there():
    axes = {"a": range(5), "b": range(3), "c": range(3), "d": range(2)}
    pairs = by_default(matrix(**axes)[1])
    assert [case.values for case in matrix(in_all=2, **axes)[1]] == pairs
    _, cases = matrix(together=1, in_all=3, **axes)
    assert by_default(cases) == by_default(matrix(together=1, **axes)[1])
    for three in itertools.combinations(range(4), 3):
        values = [list(axes.values())[one] for one in three]
        met = {tuple(case.values[one] for one in three) for case in cases}
        assert met == set(itertools.product(*values))
    assert 45 <= len(cases) < 65

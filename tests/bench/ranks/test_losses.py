"""Losses of ranks that send fewer bits. Real: two processes over gloo, few steps. Nothing is faked."""

import itertools
import json

import pytest

from infinity.bench.ranks.losses import chain, curves, row_of
from launches import python_of_ranks


def test_each_curve_has_a_twin_that_sends_all_and_comes_first():
    every = curves(300)
    names = [one.name for one in every]
    for one in every:
        assert names.index(one.exact) <= names.index(one.name)
        assert (one.name == one.exact) == (one.limit == 0.0)
    assert next(one for one in every if one.optimizer == "OneBitAdam").options["freeze_step"] == 60


def test_a_fifth_of_the_tokens_strays_from_the_chain():
    follows = {}
    for seed in range(200):
        for row in chain(seed).tolist():
            for one, other in itertools.pairwise(row):
                follows.setdefault(one, []).append(other)
    often = [max(map(found.count, found)) / len(found) for found in follows.values() if len(found) > 40]
    assert 0.7 < sum(often) / len(often) < 0.9


def test_a_loss_further_from_its_twin_than_the_limit_is_not_within_it():
    coded = curves(300)[1]
    assert row_of(coded, [5.0, 2.0, 2.0], 2, 1.99)["met"]
    assert not row_of(coded, [5.0, 2.0, 2.1], 2, 1.99)["met"]
    assert "met" not in row_of(curves(300)[0], [5.0, 2.0], 2, 0.0)


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_train_all_curves_and_the_first_of_them_writes_the_table(tmp_path):
    program = ("-m", "infinity.bench.ranks.losses", "--preset", "1m", "--steps", 12, "--last", 2)
    first, second = python_of_ranks(2, *program, "--json", tmp_path / "found.json", folder=tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [one.name for one in curves(12)]
    for row in rows:
        assert len(row["losses"]) == 12
        assert row["last"] < row["first"]
    exact, int8, int4, plain, one_bit = (row["losses"] for row in rows)
    assert len({tuple(one) for one in (exact, int8, int4, plain)}) == 4, "something is coded"
    assert one_bit[:2] == plain[:2]
    assert one_bit != plain

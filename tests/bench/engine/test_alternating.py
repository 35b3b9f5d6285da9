"""Ways to update by turns, and what is concluded. The runs are made up."""

import argparse
from dataclasses import replace

import pytest

from infinity.bench.engine import alternating
from infinity.bench.engine.alternating import TURN, findings_of, rows_of
from measurements import RUN


def a_run(*seconds):
    """Steps of one run, by turns, of which the first turn settles and each first step does not count."""
    steps = [9.0] * TURN + [one for turn in seconds for one in [9.0, *[turn] * (TURN - 1)]]
    return replace(RUN, all_seconds=steps)


def verdicts(**runs):
    rows = list(rows_of(64, runs))
    return rows, findings_of(rows, argparse.Namespace()).verdicts


def test_ratios_are_of_the_turns_of_one_round_and_their_median_is_held_against_the_limit():
    rows, said = verdicts(backward=a_run(2.0, 4.0, 2.0), foreseen=a_run(2.0, 4.4, 2.08))
    assert [row["beside"] for row in rows] == ["backward"] * 2
    assert rows[1]["ratios"] == pytest.approx([1.0, 1.1, 1.04])
    assert said == ['64 tokens: ≤ 1.05 times update="backward", no norm exceeds its bound: 1.04 ✓']


def test_steps_whose_norms_exceed_are_held_against_those_without_speculation():
    _, said = verdicts(clipped=a_run(2.0), exceeding=a_run(2.1), backward=a_run(1.0))
    assert said == ["64 tokens: ≤ 1.02 times a step without speculation, all norms exceed: 1.05 ✗"]


def test_all_take_their_turns_in_changing_order_after_one_that_settles(monkeypatch, tmp_path):
    asked = []

    def turns(runs, orders, before):
        asked.extend(orders)
        return {way: run(0) for way, run in runs.items()}

    def measure(environment, kind, model, folder, settings, baton):
        assert (model.steps, model.turn) == ((1 + 3) * TURN, TURN)
        return a_run(*[settings.get("max_norm", 0.0) or 1.0] * 3)

    monkeypatch.setattr(alternating, "take_turns", turns)
    monkeypatch.setattr(alternating, "measure", measure)
    options = argparse.Namespace(
        model="25m", host_memory=1 << 20, tokens=[64], update=["backward", "exceeding"], rounds=3, json=None
    )
    rows = list(alternating.compare(64, options, tmp_path))
    first, other = ("backward", "exceeding"), ("exceeding", "backward")
    assert asked == [first, first, other, first]
    assert [row["seconds"] for row in rows] == [1.0, alternating.UPDATES["exceeding"]["max_norm"]]

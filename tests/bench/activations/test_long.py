"""`infinity bench long` on tiny models, with real processes, forked but for one; its search with measurements
that are made up. What it measures is not judged here.
"""

import argparse
import json

import matplotlib.pyplot as plt
import pytest

from contestants import Forked
from infinity import __main__ as cli
from infinity.bench.activations import long
from infinity.bench.engine.runs import RunError

TINY = ["--model", "1m", "--vocabulary", "64", "--threads", "1", "--least", "128", "--most", "256"]


def made_up(longest):
    return lambda tokens: {"who": "plain", "tokens": tokens, "fits": tokens <= longest, "peak_nbytes": tokens}


def test_lengths_are_doubled_until_one_does_not_fit_and_what_is_between_is_halved_twice():
    rows = list(long.search(made_up(700), 128, 1 << 20))
    assert [row["tokens"] for row in rows] == [128, 256, 512, 1024, 768, 640]
    assert long.longest(rows, "plain") == 640


def test_no_more_is_measured_than_was_asked_for():
    assert [row["tokens"] for row in long.search(made_up(1 << 30), 128, 600)] == [128, 256, 512]
    assert [row["tokens"] for row in long.search(made_up(10), 128, 600)] == [128]


def test_the_verdict_compares_ours_with_checkpoints_and_says_what_is_not_installed():
    rows = [
        {"who": who, "tokens": tokens, "fits": fits, "peak_nbytes": 1}
        for who, tokens, fits in (
            ("checkpointed", 64, True),
            ("checkpointed", 128, False),
            ("infinity", 640, True),
        )
    ]
    options = argparse.Namespace(within=1 << 30, model="1m", vocabulary=64, who=("deepspeed",), venv=None)
    said = long.findings_of(rows, options).verdicts
    assert "infinity: at least 10.0 times as long as checkpointed (goal: 8)" in said
    assert any("deepspeed: not measured" in line for line in said)
    assert long.times_as_long(rows[:2]) is None


def cli_options(*given):
    parser = argparse.ArgumentParser()
    long.add_arguments(parser)
    return parser.parse_args([*TINY, *given])


@pytest.mark.slow
@pytest.mark.disk
def test_contestants_are_measured_and_recorded(folder, tmp_path, capsys, monkeypatch):
    within = ["--nvme", str(folder), "--within", "64MiB"]
    alone = long.measured("infinity", 128, cli_options("--who", "infinity", *within))
    monkeypatch.setattr(long, "Environment", Forked)
    out = tmp_path / "long.json"
    who = ["--who", "checkpointed,infinity,deepspeed", *within]
    assert cli.main(["bench", "long", *TINY, *who, "--json", str(out)]) in (0, 1)
    rows = json.loads(out.read_text())["rows"]
    assert {row["who"] for row in rows} == {"checkpointed", "infinity"}
    (ours,) = (row for row in rows if (row["who"], row["tokens"]) == ("infinity", 128))
    assert (ours["refused"], ours["losses"]) == (alone["refused"], alone["losses"])
    assert all(row["peak_nbytes"] > 0 and len(row["losses"]) == 2 for row in rows if row["refused"] is None)
    assert "deepspeed: not measured" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.disk
def test_a_contestant_that_fails_is_named_with_what_it_said_and_ours_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(long, "Environment", Forked)
    monkeypatch.setitem(long.SHAPES, "1m", {**long.SHAPES["1m"], "num_attention_heads": 7})
    options = cli_options("--who", "plain", "--nvme", str(folder))
    failed = long.measured("plain", 128, options)
    assert (failed["fits"], failed["peak_nbytes"]) == (False, None)
    assert failed["refused"].startswith("plain with 128 tokens ended with exit code 1")
    findings = long.findings_of([failed], options)
    assert findings.verdicts == [failed["refused"]]
    findings.draw(plt.figure().add_subplot())
    with pytest.raises(RunError, match="infinity with 128 tokens ended with exit code 1"):
        long.measured("infinity", 128, options)

"""`infinity bench tiles` on tiny shapes, with real processes, but for a sweep. What they measure is not
judged here.
"""

import argparse
import json
import os
from typing import ClassVar

import pytest

from infinity import __main__ as cli
from infinity.bench.engine.runs import Environment, RunError
from infinity.bench.tiling import tiles
from infinity.bench.tiling.tile_worker import KINDS

TINY = [
    *("--hidden", "32", "--tokens", "64", "--vocabulary", "512", "--tiles", "2", "--rounds", "3"),
    *("--threads", "1"),
]
CASE = {
    "kind": "mlp",
    "tiles": 2,
    "hidden": 32,
    "tokens": 64,
    "vocabulary": 64,
    "dtype": "bf16",
    "threads": 1,
}


class Fake:
    """A contestant whose figures are made up: seconds by who it is, and the number of all steps so far."""

    steps: ClassVar[list] = []

    def __init__(self, case, _environment):
        self.who = case["who"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def step(self):
        self.steps.append(self.who)
        return {"seconds": {"plain": 2.0, "infinity": 3.0}[self.who], "peak_nbytes": len(self.steps)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_measured_plain_and_in_tiles(kind, tmp_path, capsys):
    out = tmp_path / "tiles.json"
    dtype = "fp32" if kind == "loss" else "bf16"
    assert cli.main(["bench", "tiles", "--kind", kind, "--dtype", dtype, *TINY, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["who"] for row in rows] == ["plain", "infinity"]
    assert all(row["seconds"] > 0 and len(row["all_seconds"]) == 3 for row in rows)
    assert rows[0]["of_plain"] == 1
    assert {row["dtype"] for row in rows} == {dtype}
    assert "times plain (1.15)" in capsys.readouterr().out or kind != "loss"


@pytest.mark.slow
def test_a_sweep_makes_a_row_for_each_value_and_a_picture_and_says_what_fits(tmp_path, capsys, monkeypatch):
    """What contestants measure is made up: the test before has real ones."""
    monkeypatch.setattr(tiles, "Worker", Fake)
    files = ["--json", str(tmp_path / "t.json"), "--plot", str(tmp_path / "t.png")]
    sweep = ["--kind", "mlp", *TINY, "--sweep", "tokens=64,128", "--within", "1GiB"]
    assert cli.main(["bench", "tiles", *sweep, *files]) == 0
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [(row["tokens"], row["who"]) for row in rows] == [
        (64, "plain"),
        (64, "infinity"),
        (128, "plain"),
        (128, "infinity"),
    ]
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert "infinity: tokens up to 128 within 1.0 GiB" in capsys.readouterr().out


def test_everyone_steps_once_a_round_and_the_order_turns(monkeypatch):
    monkeypatch.setattr(tiles, "Worker", Fake)
    monkeypatch.setattr(Fake, "steps", steps := [])
    rows = tiles.race(CASE, {"plain": Environment("p"), "infinity": Environment("p")}, 3)
    assert steps == ["plain", "infinity", "infinity", "plain", "plain", "infinity"]
    assert [(row["of_plain"], row["peak_nbytes"]) for row in rows] == [(1.0, 5), (1.5, 6)]


def test_a_contestant_that_cannot_be_started_says_why(tmp_path):
    case = CASE | {"who": "deepspeed"}
    with pytest.raises(RunError, match="deepspeed"), tiles.Worker(case, contestants_python()):
        pass


@pytest.mark.parametrize("until", ["input()", "0"], ids=["in its step", "before"])
def test_a_contestant_that_is_killed_is_told_to_have_lacked_memory(until):
    killed = f"import os; print('ready', flush=True); {until}; os.kill(os.getpid(), 9)"
    ours = contestants_python()
    with tiles.Worker(CASE | {"who": "plain"}, Environment(ours.python, ("-c", killed), {})) as worker:
        if until == "0":
            os.waitid(os.P_PID, worker._process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(RunError, match=r"plain of .*: killed .*memory ran out"):
            worker.step()


def contestants_python():
    """Ours, in which DeepSpeed is not installed."""
    options = argparse.Namespace(venv=None, kind="mlp")
    return tiles.contestants(options)["infinity"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tiles", "0"], "expected 1 or more"),
        (["--kind", "batch", "--venv", "/nowhere"], "no tiles of the kind batch"),
    ],
)
def test_what_makes_no_case_is_refused(arguments, told, capsys):
    assert cli.main(["bench", "tiles", *arguments]) == 1
    assert told in capsys.readouterr().err


def test_a_sweep_of_something_else_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "tiles", "--sweep", "layers=1"])
    assert "a KEY of tiles, hidden, tokens, vocabulary" in capsys.readouterr().err

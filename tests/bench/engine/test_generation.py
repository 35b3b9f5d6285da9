"""Generation beside other libraries: what is concluded from measurements. Faked: measurements. Real: one run
of 0.3 M parameters.
"""

import argparse
import importlib.util
import json

import pytest

from contestants import FORKED
from infinity import __main__ as cli
from infinity.bench.engine import generation
from infinity.bench.engine.generation import Runs

PARAMETERS = 1_000_000


def runs_of(contestant, *tokens_per_s, read_nbytes=0.0, host_memory="", batch=1, digest=1, disk=1e9):
    row = {"contestant": contestant, "host_memory": host_memory, "batch": batch, "digest": digest}
    row |= {"read_nbytes": read_nbytes, "disk_bytes_per_s": disk, "parameters": PARAMETERS}
    row |= {"peak_nbytes": 1, "load_s": 0.1, "first_s": 0.1}
    return Runs([{**row, "tokens_per_s": float(one)} for one in tokens_per_s])


def verdicts(*runs, batch=(1,)):
    return generation.findings_of(runs, argparse.Namespace(batch=batch, tokens=16)).verdicts


def test_a_ratio_is_that_of_a_round_and_the_median_counts():
    ours = runs_of("infinity", 9, 18, 36, host_memory="1GiB")
    (line, _) = verdicts(ours, runs_of("torch", 10, 20, 36))
    assert line == "1GiB, batch 1: ≤ 1.15 x the seconds of a token in plain PyTorch, where all fits: 1.11 ✓"
    (line, _) = verdicts(ours, runs_of("torch", 12, 24, 36))
    assert line.endswith("1.33 ✗")


def test_what_streams_is_compared_with_the_disk_or_with_computing_if_that_takes_longer():
    ours = runs_of("infinity", 8, host_memory="1MiB", read_nbytes=0.1e9)  # 0.1 s by the disk
    (line, _) = verdicts(ours)
    assert line == "1MiB, batch 1: ≤ 1.1 x the disk's bound of a token: 1.25 ✗"
    (line, _) = verdicts(ours, runs_of("torch", 8.5))
    assert line.endswith("1.06 ✓")


def test_the_first_budget_is_compared_with_accelerate_and_other_tokens_are_told():
    runs = [
        runs_of("infinity", 6, read_nbytes=5e6, host_memory="1MiB", batch=32),
        runs_of("infinity", 99, read_nbytes=5e6, host_memory="2MiB", batch=32),
        runs_of("accelerate", 0.5, batch=32, digest=2),
    ]
    first, *_, last = verdicts(*runs, batch=(32,))
    assert first == "≥ 10 x accelerate's tokens/s, batch 32: 12.00 ✓"
    assert last == "all contestants gave tokens that DIFFER"


@pytest.mark.disk
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("environment", FORKED)
def test_contestants_generate_the_same_tokens_and_what_fits_reads_nothing(
    folder, monkeypatch, capsys, environment
):
    monkeypatch.setattr(generation, "OWN", environment)
    monkeypatch.setattr(generation, "_RATE_S", 0.01)
    out = folder / "generate.json"
    options = ["--nvme", str(folder), "--hidden", "64", "--layers", "2", "--tokens", "3", "--prompt", "4"]
    options += ["--host-memory", "1MiB", "64MiB", "--peer", "torch", "--peer", "accelerate"]
    assert cli.main(["bench", "generate", *options, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "all contestants gave the same tokens" in said
    assert "1MiB, batch 1: ≤ 1.1 x the disk's bound" in said
    assert "64MiB, batch 1: ≤ 1.15 x the seconds" in said
    little, much, *_ = json.loads(out.read_text())["rows"]
    assert little["read_nbytes"] > little["parameters"]
    assert much["read_nbytes"] == 0
    assert min(little["disk_bytes_per_s"], much["disk_bytes_per_s"]) > 0


@pytest.mark.slow
@pytest.mark.disk
def test_a_contestant_generates_in_an_interpreter_of_its_own(folder, monkeypatch):
    monkeypatch.setattr(generation, "_RATE_S", 0.01)
    options = ["--nvme", str(folder), "--hidden", "64", "--layers", "2", "--tokens", "3", "--prompt", "4"]
    options += ["--host-memory", "1MiB", "--json", str(folder / "generate.json")]
    assert cli.main(["bench", "generate", *options]) == 0
    (row,) = json.loads((folder / "generate.json").read_text())["rows"]
    assert row["read_nbytes"] > row["parameters"]

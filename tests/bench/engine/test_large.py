"""What `infinity bench large` says of a run. Faked: the run, by its figures; a slow test runs one."""

import argparse
import json
from dataclasses import replace

import pytest
from rich.console import Console

from infinity.bench.engine import large
from infinity.bench.engine.large import LargeRun, findings_of
from infinity.bench.engine.runs import parameter_count

FOUND = LargeRun(
    model="3.74b",
    parameters=3_743_616_000,
    state_nbytes=45 << 30,
    host_nbytes=2 << 30,
    seconds=43.0,
    planned_s=46.0,
    bytes_per_parameter=24.8,
    planned_bytes_per_parameter=25.0,
    peak_nbytes=3 << 30,
    planned_nbytes=3 << 30,
    loss=9.9,
)


def options(*arguments):
    parser = argparse.ArgumentParser()
    large.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_model_has_as_many_parameters_as_its_name_says():
    assert parameter_count(options().model) == FOUND.parameters


def test_a_plan_that_is_off_by_a_tenth_at_most_is_good():
    assert FOUND.error == pytest.approx(0.07, abs=0.001)
    said = findings_of(FOUND, options()).verdicts
    assert all(line.endswith("✓") for line in said)
    assert len(said) == 2
    off = findings_of(replace(FOUND, planned_s=50.0, bytes_per_parameter=27.0), options()).verdicts
    assert all(line.endswith("✗") for line in off)
    assert "not measured" in findings_of(replace(FOUND, planned_s=None), options()).verdicts[0]


def test_the_bytes_of_smaller_moments_are_not_held_against_those_of_exact_ones():
    assert len(findings_of(FOUND, options("--state-dtype", "int8")).verdicts) == 1


@pytest.mark.slow
@pytest.mark.disk
def test_a_small_model_runs_beside_its_plan(folder, monkeypatch):
    monkeypatch.delenv("INFINITY_MEASURE", raising=False)
    chosen = options("--model", "25m", "--nvme", str(folder), "--host-memory", "32MiB", "--steps", "4")
    chosen.json = folder / "large.json"
    large.run(chosen, Console(quiet=True))
    (row,) = json.loads(chosen.json.read_text())["rows"]
    assert row["planned_s"] > 0
    assert 20 < row["bytes_per_parameter"] < 28
    assert row["planned_bytes_per_parameter"] == pytest.approx(row["bytes_per_parameter"], rel=0.1)
    assert row["planned_nbytes"] == pytest.approx(row["peak_nbytes"], rel=0.2)

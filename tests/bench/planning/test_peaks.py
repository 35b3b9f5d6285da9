"""Plans beside measured peaks: the arithmetic. Faked: what was measured."""

import json

import pytest

from infinity.bench.planning import peaks, process
from infinity.bench.planning.process import ProcessMemoryError, process_memory
from infinity.planning.capacity import Process
from places import ROOT

BY_NAME = {case.name: case for case in peaks.CASES}


def memory_of(case):
    return next(need for need in peaks.planned(case).needs if need.what.startswith("memory"))


@pytest.mark.parametrize("name", [case.name for case in peaks.CASES if "GPT" not in case.name])
def test_each_case_can_be_planned(name):
    planned = peaks.planned(BY_NAME[name])
    assert planned.fits
    assert planned.uncounted == ""


@pytest.mark.parametrize(("off", "met"), [(1.0, True), (1.09, True), (1.12, False), (0.88, False)])
def test_a_plan_is_held_to_a_tenth_of_both_figures(off, met):
    case = BY_NAME["Llama"]
    need, used = memory_of(case).nbytes, peaks.planned(case).demand.activations.peak_nbytes
    of_memory, of_activations = (
        peaks.row_of(case, round(need / off), used),
        peaks.row_of(case, need, round(used / off)),
    )
    assert of_memory["ratio"] == pytest.approx(off, rel=1e-3)
    assert of_activations["activations_ratio"] == pytest.approx(off, rel=1e-3)
    assert of_memory["met"] == of_activations["met"] == met


@pytest.mark.parametrize("name", [case.name for case in peaks.CASES if "GPT" not in case.name])
def test_a_plan_is_within_a_tenth_of_what_was_measured(name):
    rows = json.loads((ROOT / "bench/results/peaks.json").read_text())["rows"]
    (measured,) = (row for row in rows if row["case"] == name)
    row = peaks.row_of(BY_NAME[name], measured["rss_nbytes"], measured.get("activations_nbytes"))
    assert row["met"], row


def test_what_is_measured_is_what_was_planned():
    case = BY_NAME["Llama, tiles"]
    spec = case.spec("folder", plain=False)
    assert (spec["batch_tile"], spec["loss_tiles"], spec["tokens"]) == (1, True, [2, 240])
    offloaded = BY_NAME["Llama, offloaded to host"].spec("folder", plain=False)
    assert offloaded["settings"]["offload_activations"] == "host"
    assert BY_NAME["Llama, no NVMe"].spec("folder", plain=False)["nvme"] is None


def test_the_process_of_a_plan_holds_no_python(monkeypatch):
    """The resident set is compared beyond the process that process.py measures."""
    assert "Python and torch" not in dict(memory_of(BY_NAME["Llama"]).parts)


# The process


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path))
    monkeypatch.delenv("INFINITY_MEASURE", raising=False)
    return tmp_path


def test_a_process_is_measured_once_and_anew_where_a_version_changes(cache, monkeypatch):
    counts = []

    def measured():
        counts.append(1)
        return Process(own_nbytes=len(counts), shared_nbytes=7)

    monkeypatch.setattr(process, "_measured", measured)
    assert process_memory() == process_memory() == Process(1, 7)
    monkeypatch.setattr(process, "_versions", lambda: "another torch")
    assert process_memory() == Process(2, 7)


def test_a_process_is_not_measured_where_nothing_may_be(cache, monkeypatch):
    monkeypatch.setenv("INFINITY_MEASURE", "0")
    assert process_memory() is None


def test_a_damaged_cache_is_measured_over(cache, monkeypatch):
    (cache / "process.json").write_text("{")
    monkeypatch.setattr(process, "_measured", lambda: Process(1, 2))
    assert process_memory() == Process(1, 2)


def test_a_process_that_fails_is_told_with_its_last_line(cache, monkeypatch):
    monkeypatch.setattr(process, "_PROGRAM", "raise RuntimeError('no such library')")
    with pytest.raises(ProcessMemoryError, match="exit code 1: RuntimeError: no such library"):
        process_memory()


@pytest.mark.slow
def test_a_process_takes_some_hundred_mib(cache):
    found = process_memory()
    assert 100 << 20 < found.own_nbytes < 1 << 30
    assert 50 << 20 < found.shared_nbytes < 1 << 30

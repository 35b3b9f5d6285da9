"""The runner of `dev.py gpu`. Nothing is faked but the stages: small programs that do well, fail or hang."""

import importlib
import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from infinity.bench.device import stages
from infinity.bench.device.stages import STAGES, GpuStage, run_stages, said, share_s, table_of
from places import ROOT

ENOUGH_S = 240.0
GPU_S, SET_UP_S = 570, 60
"""In which all of `dev.py gpu` ends; and what setting up takes of it."""


def python(name, code, limit_s=60.0, **variables):
    return GpuStage(name, ("-c", code), limit_s, variables, more_s=0.0)


GOOD = python("good", "print('noise'); print('{\"summary\": \"12 GB/s\", \"n\": 1}'); print('more noise')")
BAD = python("bad", "import sys; print('partly'); sys.exit('the reason')")
HANGS = python("hangs", "import time; print('{\"half\": 1}', flush=True); time.sleep(600)", limit_s=59.0)


@pytest.fixture(scope="module")
def soon():
    """Least times as short as these stages are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "LEAST_S", 1.0)
        patch.setattr(stages, "_MARGIN_S", 2.0)
        yield


class Impatient(subprocess.Popen):
    """What hangs has had its time as soon as it has printed a line, however slowly this machine starts it."""

    def __init__(self, command, **options):
        self.printed = Path(options["stdout"].name)
        self.hangs = "time.sleep(600)" in command[-1]
        super().__init__(command, **options)

    def wait(self, timeout=None):
        if not self.hangs:
            return super().wait(timeout)
        while not self.printed.read_text().endswith("\n"):
            time.sleep(0.01)
        self.hangs = False
        return super().wait(0.1)


@pytest.fixture(scope="module")
def ran(tmp_path_factory, soon):
    """Outcomes of stages, of which one fails and one hangs, and where they were written."""
    out = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Impatient)
        return run_stages([BAD, HANGS, GOOD], ENOUGH_S, out), out


def test_a_stage_that_fails_or_hangs_stops_no_other(ran):
    bad, hangs, good = ran[0]
    assert (bad.status, bad.last_line, bad.found) == ("failed", "the reason", {})
    assert (hangs.status, hangs.found) == ("timed out", {"half": 1})
    assert (good.status, good.found["n"]) == ("ok", 1)


def test_each_stage_is_a_line_of_json_a_file_and_a_row(ran):
    outcomes, out = ran
    lines = [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["status"]) for line in lines] == [
        (one.stage, one.status) for one in outcomes
    ]
    assert (out / "bad.log").read_text().splitlines() == ["partly", "the reason"]
    table = table_of(outcomes)
    assert table.row_count == 3
    assert list(table.columns[3].cells) == ["the reason", "half 1", "12 GB/s"]


def test_what_no_longer_fits_is_listed_as_not_run(tmp_path, soon, monkeypatch):
    now = [100.0]

    class Hanging(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is None:
                return super().wait()
            now[0] += timeout
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Hanging)
    monkeypatch.setattr(stages, "time", SimpleNamespace(monotonic=lambda: now[0]))
    outcomes = run_stages([python("long", "import time; time.sleep(600)", 600), GOOD], 4.0, tmp_path)
    assert now == [102.0], "two seconds are left for the end of the process"
    assert [one.status for one in outcomes] == ["timed out", "not run"]
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == 2


def test_what_a_stage_has_started_ends_with_it(tmp_path):
    child = "[sys.executable, '-c', 'import time; time.sleep(600)']"
    code = f"import subprocess, sys; print(subprocess.Popen({child}).pid)"
    (outcome,) = run_stages([python("parent", code)], ENOUGH_S, tmp_path)
    for _ in range(1200):
        if not alive(int(outcome.last_line)):
            break
        time.sleep(0.05)
    assert not alive(int(outcome.last_line))


def alive(pid):
    """Whether a process runs: one that has ended may wait for init to look after it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_sigterm_ends_the_stage_that_runs_and_what_was_found_is_kept(tmp_path):
    slow = "import time; print('{\"half\": 1}'); time.sleep(600)"
    code = (
        "import sys; from pathlib import Path\n"
        "from infinity.bench.device.stages import GpuStage, run_stages\n"
        "stages = [GpuStage('slow', ('-c', sys.argv[2]), 600), GpuStage('next', ('-c', ''), 9)]\n"
        "print([(one.status, one.found) for one in run_stages(stages, 600, Path(sys.argv[1]))])"
    )
    command, log = [sys.executable, "-c", code, tmp_path, slow], tmp_path / "slow.log"
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not (log.exists() and log.read_text()):
        time.sleep(0.05)
    runner.send_signal(signal.SIGTERM)
    said = runner.communicate(timeout=200)[0].strip()
    assert said == "[('timed out', {'half': 1}), ('not run', {})]"


def test_a_stage_whose_time_is_over_is_asked_to_end_and_says_what_it_has_found(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", Impatient)
    code = (
        "import time\n"
        "try: print('begun', flush=True); time.sleep(600)\n"
        "except KeyboardInterrupt: print('{\"tests\": 7}')"
    )
    (outcome,) = run_stages([python("asked", code)], ENOUGH_S, tmp_path)
    assert (outcome.status, outcome.found) == ("timed out", {"tests": 7})


@pytest.mark.parametrize(("left", "expected"), [(200.0, 100.0), (130.0, 80.0), (60.0, 50.0), (20.0, 20.0)])
def test_a_stage_has_its_limit_and_of_what_others_leave_as_much_again(left, expected):
    later = [GpuStage("later", (), 30.0), GpuStage("last", (), 20.0, more_s=0.0)]
    assert share_s(GpuStage("one", (), 50.0), later, left) == expected


def test_what_only_others_leave_is_for_a_stage_without_a_limit():
    (last,) = [stage for stage in STAGES if not stage.limit_s]
    assert last is STAGES[-1]
    assert share_s(last, (), 50.0) == 50.0
    assert share_s(last, (), 500.0) == last.more_s


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ({}, "")),
        ("one\n[1, 2]\n3\n", ({}, "3")),
        ('{"a": 1}\n{"b": 2}\n{broken\n', ({"b": 2}, "{broken")),
        (
            (
                "[gw3] [  1%] FAILED tests/a.py::test_one[two words]\n[gw3] [  2%] PASSED tests/a.py::two\n"
                "tests/b.py::test_three FAILED       [ 50%]\nFAILED tests/b.py::test_three - 1 == 2\n1 failed"
            ),
            (
                {
                    "summary": "1 failed",
                    "failed": {"tests/a.py::test_one[two words]": "", "tests/b.py::test_three": "1 == 2"},
                },
                "1 failed",
            ),
        ),
    ],
)
def test_what_a_stage_found_is_its_last_line_with_a_json_object(text, expected):
    assert said(text) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "stage", [one for one in STAGES if "pytest" not in one.command], ids=lambda one: one.name
)
def test_without_a_device_a_measurement_says_so_with_its_own_arguments(stage, monkeypatch, capsys):
    module, *arguments = stage.command[1:]
    monkeypatch.setattr(sys, "argv", ["python", *arguments])
    with pytest.raises(SystemExit):
        importlib.import_module(module).main()
    assert "no CUDA device is visible" in capsys.readouterr().err


def test_the_stages_name_what_exists():
    assert all(importlib.util.find_spec(stage.command[1]) for stage in STAGES)
    assert sum(stage.limit_s for stage in STAGES) <= GPU_S - SET_UP_S


def gpu_tests_of(path):
    """The names of a file's tests that need a GPU."""
    text = path.read_text()
    every = "pytest.mark.gpu" in text.partition("\ndef ")[0].partition("@pytest")[0]
    found = r"^def (test_\w+)" if every else r"mark\.gpu.*\n(?:@.*\n)*def (test_\w+)"
    return re.findall(found, text, re.MULTILINE)


def test_every_test_that_needs_a_gpu_is_chosen_by_a_stage_and_those_alone_are_there():
    files = {one for stage in STAGES for one in stage.command if one.startswith("tests/")}
    there = {path: gpu_tests_of(path) for path in (ROOT / "tests").rglob("test_*.py")}
    assert {str(path.relative_to(ROOT)) for path, names in there.items() if names} == files
    names = there[ROOT / "tests/device/test_gpu.py"]
    alone = next(stage for stage in STAGES if stage.name == "tests alone").command[-1]
    others = next(stage for stage in STAGES if stage.name == "tests").command[-1]
    assert others == f"not ({alone})"
    assert all(any(word in name for name in names) for word in alone.split(" or "))


def test_the_end_of_all_stages_says_whether_all_went_well(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stages", "--out", str(tmp_path), "--seconds", "60"])
    assert (stages.main([GOOD]), stages.main([GOOD, BAD])) == (0, 1)
    assert "12 GB/s" in capsys.readouterr().out

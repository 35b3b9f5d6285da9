"""What `infinity bench step` runs and concludes. Faked: the measurements, but in the last three tests.

Those run the real command, with a model of 0.9 M parameters.
"""

import argparse
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from infinity import __main__ as cli
from infinity.bench.engine import cases, step
from infinity.bench.engine.cases import ALL, EQUAL, Case
from infinity.bench.engine.floor import Speeds
from infinity.bench.engine.runs import OWN, parameter_count
from infinity.bench.planning import cores
from infinity.errors import ConfigError
from infinity.storage import disk_speed as disk
from launches import python
from measurements import CORES, RUN, SPEEDS, a_round

SMALL = "512MiB"
RIVAL, PLAIN, KERNELS = (Case(kind, 64) for kind in ("deepspeed", "plain", "plain_kernels"))
EXACT = Case("infinity", 64, SMALL, "backward", "fp32")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    return parser.parse_args([*arguments, "--tokens", "64"])


def ours(budget=SMALL, state_dtype="fp32", update="backward"):
    return Case("infinity", 64, budget, update, state_dtype)


def every(peers=("deepspeed", "torch")):
    return cases.cases([64], [SMALL, EQUAL, ALL], ["backward", "clipped"], ["fp32", "int8"], peers)


def names(only=(), peers=("deepspeed", "torch")):
    return [one.name for one in cases.chosen(every(peers), only)]


# What runs


def test_every_budget_update_and_dtype_runs_with_every_number_of_tokens():
    found = cases.cases([16, 64], ["1GiB", ALL], ["backward", "clipped"], ["fp32", "int8"], [])
    assert len(found) == 2 * (2 + 2 * 2 * 2)
    assert found[0] == Case("forward_backward", 16)
    assert len(set(found)) == len(found)


def test_what_is_asked_for_twice_runs_once():
    assert len(cases.cases([16, 16], [ALL, ALL], ["backward"], ["fp32"], ["torch", "torch"])) == 5


def test_a_step_of_micro_batches_has_no_forecast_to_measure_for():
    found = cases.cases([16], ["1GiB"], ["backward"], ["fp32"], ["deepspeed"], 8)
    assert [one.kind for one in found] == ["forward_backward", "deepspeed", "infinity"]


def test_deepspeed_runs_before_those_that_get_its_memory():
    kinds = [one.kind for one in every(("torch", "deepspeed"))]
    assert kinds[:4] == ["forward_backward", "deepspeed", "plain", "plain_kernels"]


def test_a_contestant_is_chosen_by_part_of_its_name_in_any_case_and_the_computing_always():
    assert names(["SAME kernels", "512MiB, clipped, int8"]) == [
        "forward and backward alone",
        "PyTorch, same kernels",
        "Infinity, 512MiB, clipped, int8 state",
    ]
    assert "forward and backward beside updates" in names(["beside updates", "512MiB, clipped, int8"])
    assert names(["SAME kernels"]) == ["forward and backward alone", "PyTorch, same kernels"]


@pytest.mark.parametrize(
    ("only", "peers", "complaint"),
    [
        (["nobody"], ["torch"], "'nobody' is in no name.*PyTorch, same kernels"),
        ([], ["torch"], "add --peer deepspeed"),
        (["DeepSpeed's memory"], ["deepspeed"], "its name to --only"),
    ],
)
def test_a_choice_that_cannot_run_says_what_is_missing(only, peers, complaint):
    with pytest.raises(ConfigError, match=complaint):
        names(only, peers)


def test_all_is_a_budget_for_all_state_and_gradients():
    assert ours(ALL).settings("269m", None)["host_memory"] > 16 * parameter_count("269m")


def test_deepspeeds_memory_is_what_it_took():
    assert ours(EQUAL).settings("269m", 12345)["host_memory"] == 12345
    with pytest.raises(ConfigError, match="did not run"):
        ours(EQUAL).settings("269m", None)


def test_peers_take_no_settings_of_ours():
    assert PLAIN.settings("269m", None) == {}
    assert RIVAL.settings("269m", None)["zero_optimization"]["stage"] == 3
    assert RIVAL.settings("269m", None, 8)["gradient_accumulation_steps"] == 8


@pytest.mark.parametrize(
    "arguments",
    [["--host-memory", "much"], ["--rounds", "0"], ["--steps", "x"], ["--model", "9t"], ["--peer", "magic"]],
)
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(SystemExit):
        parsed(*arguments)


# A race


class FakeGauge:
    source = "a fake"

    def __init__(self):
        self.asked = []

    def measure(self, percent):
        self.asked.append(percent)
        return SPEEDS


def test_rounds_alternate_and_the_disk_is_measured_around_each_of_our_runs(monkeypatch, tmp_path):
    ran = []

    def measure(environment, kind, model, folder, settings):
        ran.append((environment.python, kind, settings.get("host_memory")))
        tolls = {"request_s": 4e-5, "asking": 0.3, "computing_asked": 0.2, "use_s": 5e-4}
        engine = {"working": 0.6, **tolls} if kind == "beside_updates" else RUN.engine
        return replace(RUN, peak_nbytes=1000 * len(ran), seconds=float(len(ran)), engine=engine)

    monkeypatch.setattr(step, "measure", measure)
    monkeypatch.setattr(cores, "cores", lambda state_dtype: replace(CORES, update=float(len(ran))))
    options = parsed("--rounds", "2", "--host-memory", SMALL, EQUAL, "--peer", "deepspeed")
    entries = cases.cases([64], options.host_memory, ["backward"], ["fp32"], options.peer)
    gauge, out = FakeGauge(), StringIO()
    elsewhere = replace(OWN, python="/venv/bin/python")
    rounds = []
    for found in step.race(options, entries, elsewhere, gauge, tmp_path, Console(file=out)):
        rounds.append([len(each) for each in found.values()])
    assert rounds == [[1] * 5, [2] * 5]
    assert [(python == "/venv/bin/python", kind) for python, kind, _ in ran] == [
        (False, "forward_backward"),
        (True, "deepspeed"),
        (False, "beside_updates"),
        (False, "infinity"),
        (False, "infinity"),
    ] * 2
    assert [memory for _, _, memory in ran] == [None, None, None, SMALL, 2000, None, None, None, SMALL, 7000]
    assert gauge.asked == [54] * 8
    assert [one.compute_s for one in found[EXACT]] == [1.0, 6.0]
    assert [one.cores.update for one in found[EXACT]] == [3.0, 8.0]  # anew for each run, right before it
    assert [one.cores.computing for one in found[EXACT]] == [1 / 3, 6 / 8]
    seen = {(one.cores.working, one.cores.request_s, one.cores.use_s) for one in found[EXACT]}
    assert seen == {(0.6, 4e-5, 5e-4)}
    assert {(one.cores.asking, one.cores.computing_asked) for one in found[EXACT]} == {(0.3, 0.2)}
    assert len(out.getvalue().splitlines()) == 10


# What is concluded


def seconds(found):
    """Return rounds of these seconds per step, by case."""
    return {case: [a_round(seconds=one) for one in each] for case, each in found.items()}


def test_ratios_pair_the_runs_of_one_round():
    found = seconds({RIVAL: [1.0, 6.0], EXACT: [0.5, 2.0]})
    assert step.quotients(found, RIVAL, EXACT) == [2.0, 3.0]
    assert step.quotients(found, PLAIN, EXACT) == []


def test_a_line_is_held_against_deepspeed_or_else_plain_pytorch():
    assert step.base_of(seconds({PLAIN: [1.0], RIVAL: [1.0]}), 64) == RIVAL
    assert step.base_of(seconds({PLAIN: [1.0], RIVAL: [1.0]}), 16) is None
    assert step.base_of(seconds({KERNELS: [1.0], PLAIN: [1.0]}), 64) == PLAIN


def test_verdicts_hold_each_contestant_against_its_own_rival():
    found = seconds(
        {
            RIVAL: [5.0],
            EXACT: [2.5],
            ours(state_dtype="int8"): [2.0],
            ours(EQUAL): [1.1],
            ours(ALL): [1.05],
            PLAIN: [1.0],
            KERNELS: [0.7],
        }
    )
    lines = step.verdicts(found, parsed("--host-memory", SMALL, EQUAL, ALL))
    assert [line.rpartition(": ")[2] for line in lines[:5]] == [
        "2.00 ✓",
        "2.50 ✓",
        "4.55 ✓",
        "1.10 ✓",
        "1.50 ✗",
    ]
    assert [line.split(":")[0] for line in lines[:2]] == ["64 tokens"] * 2
    assert ["T* / step" in line for line in lines[5:]] == [True, True]  # the two at the small budget


def test_steps_whose_updates_are_made_ahead_are_held_against_deepspeed():
    found = seconds({RIVAL: [5.0], EXACT: [2.0], ours(update="foreseen"): [2.2]})
    lines = step.verdicts(found, parsed())
    assert [line.rpartition(": ")[2] for line in lines[:2]] == ["2.50 ✓", "2.27 ✓"]


def test_with_micro_batches_deepspeed_is_the_only_rival():
    found = seconds({RIVAL: [5.0], EXACT: [2.0], PLAIN: [1.0]})
    lines = step.verdicts(found, parsed("--micro-batches", "8"))
    assert lines[0] == (
        "64 tokens: ≥ 2.3 times as fast as DeepSpeed, 512MiB, exact state, 8 micro-batches: 2.50 ✓"
    )
    assert ["T* / step" in line for line in lines] == [False, True]


def test_the_floors_verdict_is_the_median_of_the_ratios_within_rounds():
    found = seconds({EXACT: [16.25, 18.0, 65.0]})
    assert step.verdicts(found, parsed()) == [
        "≥ 0.9 T* / step, Infinity, 512MiB, backward, fp32 state, 64 tokens: 0.90 ✓"
    ]


def test_what_was_not_run_has_no_verdict():
    assert step.verdicts(seconds({PLAIN: [1.0]}), parsed()) == []


def test_a_row_has_what_a_prediction_is_checked_against():
    rounds = [a_round(seconds=65.0), a_round(seconds=32.5), a_round(seconds=26.0)]
    row = step.row_of("269m", EXACT, rounds, [2.0, 3.0, 4.0])
    expected = {
        "model": "269m",
        "tokens": 64,
        "host_memory": 4096,
        "state_dtype": "fp32",
        "update": "backward",
        "max_norm": None,
        "seconds": 32.5,
        "read_nbytes": 14_000.0,
        "written_nbytes": 12_000.0,
        "parameters": 1000,
        "peak_rss": 1 << 20,
        "loss": 9.0,
        "compute_s": 5.0,
        "disk": {"read": 2000.0, "write": 3000.0, "mixed": 1600.0},
        "floor_s": 16.25,
        "binding": "mixed",
        "ratio": 0.5,
        "own_disk": {"read": 4000.0, "write": 4000.0, "mixed": 3250.0},
        "own_floor_s": 8.0,
        "own_ratios": [8 / 65, 8 / 32.5, 8 / 26],
        "cores": asdict(CORES),
        "resident": False,
    }
    assert {key: row[key] for key in expected} == expected
    clipped = step.row_of("269m", replace(EXACT, update="clipped"), rounds, [])
    assert (clipped["update"], clipped["max_norm"]) == ("forward", 1.0)


def test_a_run_that_keeps_all_in_memory_is_resident_and_peers_have_no_floor():
    memory = {**RUN.engine, "nvme_nbytes": 0}
    assert step.row_of("269m", ours(ALL), [a_round(engine=memory)], [])["resident"]
    assert "floor_s" not in step.row_of("269m", PLAIN, [a_round(engine={})], [])


def test_the_findings_are_json_and_a_table_and_a_picture():
    found = seconds({Case("forward_backward", 64): [5.0], PLAIN: [40.0], EXACT: [32.5]})
    findings = step.findings_of(found, parsed("--peer", "torch"), "a fake")
    json.dumps(findings.rows, default=vars)
    assert [column.heading for column in findings.columns][-1] == "times as fast as PyTorch"
    assert [row["times_as_fast"] for row in findings.rows] == [[8.0], None, [40 / 32.5]]
    for row in findings.rows:
        shown = {one.key: one.show(row[one.key]) for one in findings.columns if row.get(one.key) is not None}
        assert shown["all_seconds"] == f"{row['seconds']:.2f}"
    assert shown["disk"] == shown["own_disk"] == "0.00 / 0.00 / 0.00"
    axes = Figure().add_subplot()
    findings.draw(axes)
    assert [bar.get_width() for bar in axes.patches] == [5.0, 40.0, 32.5]
    assert list(axes.get_lines()[0].get_xdata()) == [16.25]


def test_a_disk_that_cannot_be_measured_has_no_column():
    found = {EXACT: [replace(a_round(), before=Speeds(), after=Speeds())]}
    findings = step.findings_of(found, parsed(), "not measured")
    assert not {"disk", "own_disk", "own_ratios"} & {column.key for column in findings.columns}
    assert (findings.rows[0]["disk"], findings.rows[0]["own_disk"]) == (None, None)
    assert findings.rows[0]["binding"] == "compute"


def test_a_range_is_told_where_there_are_several_rounds():
    assert step.spread([2.0, 1.0, 9.0]) == "2.00 (1.00-9.00)"
    assert step.spread([2.0]) == "2.00"


# The command

TINY = ["bench", "step", "--model", "1m", "--tokens", "16", "--steps", "4", "--rounds", "1"]
TINY += ["--host-memory", "4MiB", "--disk-seconds", "1", "--disk-size", "32MiB"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "3"], "first 3 are not counted"),
        (["--peer", "deepspeed"], "needs --venv"),
        (["--peer", "deepspeed", "--venv", "/nowhere"], "cannot import deepspeed"),
        (["--only", "nobody"], "'nobody' is in no name"),
        (["--json", "/nowhere/a.json"], "no folder /nowhere"),
        (["--nvme", "/nowhere"], "--nvme /nowhere: there is no such folder"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_measured(capsys, folder, arguments, said):
    assert cli.main([*TINY, "--nvme", str(folder), *arguments]) == 1
    message = capsys.readouterr().err
    assert message.startswith("infinity bench step: ")
    assert said in message
    assert list(folder.iterdir()) == []


@pytest.mark.disk
def test_a_full_disk_is_told_and_left_empty(capsys, folder, monkeypatch):
    class Full:
        f_bavail, f_frsize = 1000, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    assert cli.main([*TINY, "--nvme", str(folder)]) == 1
    message = capsys.readouterr().err
    assert os.strerror(errno.ENOSPC) in message
    assert "4096000 B free" in message
    assert list(folder.iterdir()) == []


def mentioning(text: str) -> list[str]:
    """Return the command lines of all processes that name something."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in line:
                found.append(line)
    return found


@pytest.mark.disk
@pytest.mark.multi
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_leaves_neither_files_nor_processes(folder, number, code):
    out = folder / "out.json"
    nvme = folder / "nvme"
    nvme.mkdir()
    command = [sys.executable, "-m", "infinity", *TINY, "--steps", "1000000", "--nvme", nvme, "--json", out]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not any("contestant.py" in line for line in mentioning(str(nvme))):
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            process.send_signal(number)  # to the command alone: a terminal's Ctrl-C goes to it as well
            _, told = process.communicate(timeout=250)
        finally:
            process.kill()
    assert process.returncode == code, told
    assert "Traceback" not in told
    assert list(nvme.iterdir()) == []
    assert not out.exists()
    for _ in range(600):  # what was killed ends a little later
        if not mentioning(str(nvme)):
            break
        time.sleep(0.05)
    assert mentioning(str(nvme)) == []


REFUSED = """
import errno, sys
import seccomp_run
from contestants import Forked
from infinity import __main__ as cli
from infinity.bench.engine import step
from infinity.bench.engine.runs import OWN

seccomp_run.refuse(errno.EPERM)
step.OWN = Forked(OWN.python)
raise SystemExit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.skipif(disk.filesystem(Path("/dev/shm")) != "tmpfs", reason="no tmpfs at /dev/shm")  # noqa: S108
def test_it_works_on_a_tmpfs_with_io_uring_refused(tmp_path):
    out, picture = tmp_path / "step.json", tmp_path / "step.png"
    command = ["-c", REFUSED, *TINY, "--nvme", "/dev/shm/infinity-test"]  # noqa: S108
    command += ["--peer", "torch", "--json", str(out), "--plot", str(picture)]
    Path("/dev/shm/infinity-test").mkdir(exist_ok=True)  # noqa: S108
    done = python(*command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["contestant"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == [
        "forward and backward alone",
        "PyTorch",
        "PyTorch, same kernels",
        "forward and backward beside updates",
        "Infinity, 4MiB, backward, fp32 state",
    ]
    cores = rows["Infinity, 4MiB, backward, fp32 state"]["cores"]
    assert all(0 < cores[name] <= 1 for name in ("working", "asking", "computing_asked", "request_s"))
    assert cores["use_s"] >= 0
    row = rows["Infinity, 4MiB, backward, fp32 state"]
    assert row["io_engine"] != "io_uring"
    assert row["read_nbytes"] > 5 * row["parameters"]
    assert row["loss"] == rows["PyTorch, same kernels"]["loss"]  # bit for bit
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(Path("/dev/shm/infinity-test").iterdir()) == []  # noqa: S108
    Path("/dev/shm/infinity-test").rmdir()  # noqa: S108

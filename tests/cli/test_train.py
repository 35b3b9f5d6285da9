"""`infinity train` does what its log says: real text, a real disk, 0.9 M parameters at most."""

import functools
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from infinity import __main__ as cli
from infinity.cli import task
from infinity.cli import train as module
from infinity.cli.interrupted import Interrupted
from infinity.cli.presets import PRESETS, Preset, llama, recompute_blocks
from infinity.cli.schedule import learning_rate
from infinity.cli.settings import TrainSettings
from infinity.cli.text import default_text
from infinity.cli.train import disk_speed, train
from infinity.storage.disk_speed import DiskSpeed
from launches import Program, python

pytestmark = pytest.mark.disk

SCHEDULED = {"preset": "1m", "sequence": 16, "steps": 4, "warmup": 2, "lr": 3e-3}
SMALL = Preset(layers=2, hidden=64, intermediate=192, heads=1)
"""0.14 M parameters, a state of 1.6 MiB: what "1m" stands for where its size and learning do not matter."""


@pytest.fixture(autouse=True)
def text_found_once(monkeypatch):
    """The standard library's 2,000 files are looked through once for all trainings."""
    monkeypatch.setattr(task, "default_text", found_text)


found_text = functools.cache(default_text)


def run(folder: Path, name: str, **settings: object) -> list[dict]:
    """Train, and return the lines of the log; no picture is drawn. Without a preset, on SMALL."""
    out = folder / name
    with pytest.MonkeyPatch.context() as patch:
        if "preset" not in settings:
            patch.setitem(PRESETS, "1m", SMALL)
        patch.setattr(module, "plot_run", lambda *_: None)
        train(TrainSettings(**{**SCHEDULED, **settings}, out=str(out)), Console(quiet=True))
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(log: list[dict]) -> list[float]:
    return [step["loss"] for step in log]


def test_three_steps_leave_three_lines_a_picture_and_a_table(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = folder / "run"
    arguments = ["--preset", "1m", "--steps", "3", "--sequence", "32", "--lr", "1e-3", "--warmup", "1"]
    arguments += ["--host-memory", "2MiB"]
    assert cli.main(["train", *arguments, "--out", str(out)]) == 0
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [step["step"] for step in log] == [1, 2, 3]
    assert losses(log)[0] > max(losses(log)[1:])  # the text, Python's own, is another one on each machine
    assert log[0]["loss"] == pytest.approx(math.log(256), abs=0.3)
    for step in log:
        assert step["seconds"] > 0
        assert 0 < step["budget_held_nbytes"] <= 2 << 20
        assert step["grad_norm"] is None
    assert sorted(path.name for path in out.iterdir()) == ["log.jsonl", "loss.png"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "0.9 M" in printed.out
    assert "host_memory 2.0 MiB" in printed.out
    assert "step 3/3: loss" in printed.err


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param({}, id="update in the backward", marks=pytest.mark.slow),
        pytest.param({"max_norm": 0.5}, id="clipped", marks=pytest.mark.slow),
        pytest.param({"max_norm": 0.5, "accumulate": 2, "batch": 2}, id="clipped and accumulated"),
        pytest.param(
            {"checkpointing": False, "update": "forward"}, id="not checkpointed", marks=pytest.mark.slow
        ),
        pytest.param(
            {"accumulate": 3, "batch": 2, "update": "backward"}, id="accumulated, update in the backward"
        ),
        pytest.param(
            {"accumulate": 2, "checkpointing": False, "max_norm": 0.5}, id="accumulated, one fetch each"
        ),
        pytest.param({"offload_activations": "nvme"}, id="activations on NVMe"),
        pytest.param({"activation_memory": "64MiB"}, id="activations by budget"),
        pytest.param({"master_dtype": "fp24"}, id="masters in 24 bits", marks=pytest.mark.slow),
        pytest.param({"max_norm": 0.5, "speculate": True}, id="made ahead", marks=pytest.mark.slow),
        pytest.param(
            {"units": "block", "tile_above": "64KiB"}, id="blocks and tiles", marks=pytest.mark.slow
        ),
        pytest.param({"dtype": "fp32"}, id="in fp32", marks=pytest.mark.slow),
        pytest.param({"dtype": "fp32", "max_norm": 0.5, "accumulate": 2}, id="in fp32, clipped"),
    ],
)
def test_losses_equal_those_in_memory_bit_for_bit_at_any_budget(folder, recipe, one_thread):
    plain = run(folder, "plain", plain=True, **recipe)
    small = run(folder, "small", host_memory="512KiB", **recipe)
    large = run(folder, "large", host_memory="64MiB", **recipe)
    assert losses(small) == losses(plain)
    assert losses(large) == losses(plain)
    assert [step["lr"] for step in small] == [step["lr"] for step in plain]
    assert len(set(losses(plain))) == len(plain)


def test_fp16_learns_as_fp32_does_with_the_same_losses_at_any_budget(folder, one_thread):
    recipe = {"max_norm": 0.5, "accumulate": 2, "checkpointing": False}
    small = run(folder, "small", dtype="fp16", host_memory="1MiB", **recipe)
    large = run(folder, "large", dtype="fp16", host_memory="64MiB", **recipe)
    exact = run(folder, "exact", dtype="fp32", host_memory="64MiB", **recipe)
    assert losses(small) == losses(large) != losses(exact)
    assert losses(small) == pytest.approx(losses(exact), rel=2e-3)
    assert [one["grad_norm"] for one in small] == pytest.approx([one["grad_norm"] for one in exact], rel=0.02)
    assert [one["lr"] for one in small] == [one["lr"] for one in exact]


def test_where_fp16_overflows_neither_weights_nor_rates_move_and_the_scale_falls(folder, monkeypatch):
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**40, backoff_factor=2.0**-26)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    log = run(folder, "run", dtype="fp16", in_host_memory=True, host_memory="64MiB", max_norm=0.5)
    assert [one["grad_norm"] is None for one in log] == [True, False, False, False]
    assert log[1]["lr"] == log[0]["lr"] < log[2]["lr"]
    assert log[3]["loss"] < log[1]["loss"]


def test_a_run_goes_on_behind_a_step_that_overflowed_with_the_numbers_and_the_data_of_its_steps(
    folder, monkeypatch, one_thread
):
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**40, backoff_factor=2.0**-26)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    places = {name: [str(folder / name)] for name in ("at once", "in parts")}
    for (place,) in places.values():
        Path(place).mkdir()
    options = {"dtype": "fp16", "max_norm": 0.5, "host_memory": "1MiB", "durable": 1}
    whole = run(folder, "whole", nvme=places["at once"], **options)

    def stop(log, step):
        write(log, step)
        if step.step == 3:
            raise Interrupted(signal.SIGTERM)

    write = module.StepLog.write
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(module.StepLog, "write", stop)
        run(folder, "first", nvme=places["in parts"], **options)
    rest = run(folder, "second", nvme=places["in parts"], resume=True, **options)
    assert whole[0]["grad_norm"] is None
    assert [(one["step"], one["loss"]) for one in rest] == [(one["step"], one["loss"]) for one in whole[2:]]


@pytest.mark.slow
def test_micro_batches_that_share_a_fetch_learn_what_those_learn_that_fetch_once_each(folder, one_thread):
    options = {"preset": "1m", "host_memory": "1MiB", "accumulate": 4, "steps": 8}
    together = losses(run(folder, "together", **options))
    apart = losses(run(folder, "apart", **options, checkpointing=False))
    assert together[0] == pytest.approx(apart[0], rel=1e-5)
    assert together == pytest.approx(apart, rel=2e-3)
    assert together[-1] < together[0] - 0.2


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses_and_another_others(folder, one_thread):
    first = run(folder, "first", host_memory="1MiB", seed=7)
    again = run(folder, "again", host_memory="1MiB", seed=7)
    other = run(folder, "other", host_memory="1MiB", seed=8)
    assert losses(first) == losses(again)
    assert losses(first) != losses(other)


def test_without_an_nvme_folder_losses_are_the_same(folder, one_thread):
    nvme = run(folder, "nvme", host_memory="1MiB")
    host = run(folder, "host", host_memory="64MiB", in_host_memory=True)
    assert losses(nvme) == losses(host)


def command(folder: Path, out: str, *more: str) -> list[str]:
    """A durable run of eight steps in `folder`, as it is typed."""
    options = ["--preset", "1m", "--sequence", "48", "--steps", "8", "--lr", "3e-3", "--warmup", "2"]
    options += ["--host-memory", "2MiB", "--max-norm", "1", "--nvme", str(folder), "--out", str(folder / out)]
    return [sys.executable, "-m", "infinity", "train", *options, "--durable", *more]


def logged(path: Path) -> dict[int, float]:
    """Return the loss of each step in a log; a line that a kill has cut is none."""
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {step["step"]: step["loss"] for step in map(json.loads, lines)}


@pytest.mark.slow
def test_a_killed_run_goes_on_by_resume_with_the_losses_of_one_that_never_stopped(folder, tmp_path):
    whole = folder / "whole"
    whole.mkdir()
    assert python(*command(whole, "out")[1:], folder=tmp_path).returncode == 0
    expected = logged(whole / "out" / "log.jsonl")
    log = folder / "first" / "log.jsonl"
    killed = Program(*command(folder, "first")[1:], folder=tmp_path)
    while not killed.over() and (not log.exists() or len(logged(log)) < 3):
        time.sleep(0.01)
    killed.kill()
    assert killed.end().returncode == -signal.SIGKILL
    again = python(*command(folder, "no")[1:], folder=tmp_path)
    assert again.returncode != 0
    assert "Continue it with --resume" in again.stderr.replace("\n", " ")
    assert python(*command(folder, "second", "--resume")[1:], folder=tmp_path).returncode == 0
    before, after = logged(log), logged(folder / "second" / "log.jsonl")
    assert 1 < min(after) <= max(before) + 1
    assert list(after) == list(range(min(after), 9))
    assert {**after, **before} == expected
    assert {**before, **after} == expected


def test_resume_begins_a_run_where_there_is_none_and_says_so_and_then_goes_on_with_it(folder, capsys):
    begun = cli.main(["train", *command(folder, "first", "--resume", "--steps", "2")[4:]])
    said = " ".join(capsys.readouterr().out.split())
    assert (begun, list(logged(folder / "first" / "log.jsonl"))) == (0, [1, 2])
    assert re.search(r"--resume: \S+ holds no committed step; a new run begins there", said)
    again = cli.main(["train", *command(folder, "second", "--resume", "--steps", "3")[4:]])
    assert (again, list(logged(folder / "second" / "log.jsonl"))) == (0, [3])
    assert "--resume: continues after step 2, committed in " in capsys.readouterr().out
    assert cli.main(["train", *command(folder, "third", "--resume", "--steps", "3")[4:]]) == 0
    said = capsys.readouterr().out
    assert "--resume: continues after step 3" in said
    assert "nothing is left to train, as --steps asks for 3 in all" in said.replace("\n", " ")


def test_the_same_command_after_a_complete_run_says_that_it_is_complete(folder, capsys):
    saves = ("--resume", "--save", str(folder / "saved"))
    assert cli.main(["train", *command(folder, "first", *saves, "--steps", "2")[4:]]) == 0
    written = {path: path.stat().st_mtime_ns for path in (folder / "saved").iterdir()}
    capsys.readouterr()
    assert cli.main(["train", *command(folder, "second", *saves, "--steps", "2")[4:]]) == 0
    assert f"--save {folder / 'saved'} is there, and was left as it is" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (folder / "saved").iterdir()} == written
    assert cli.main(["train", *command(folder, "third", *saves, "--steps", "3")[4:]]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "exists, and is never overwritten, and the run is to go on after step 2 of 3" in said


def test_clipping_makes_the_norm_known(folder):
    log = run(folder, "run", host_memory="4MiB", max_norm=1.0)
    assert all(step["grad_norm"] > 0 for step in log)


def test_a_loss_that_is_no_number_ends_the_run_with_advice(folder, capsys):
    out = folder / "run"
    arguments = ["--preset", "1m", "--sequence", "32", "--steps", "50", "--lr", "1e38", "--warmup", "0"]
    assert cli.main(["train", *arguments, "--host-memory", "4MiB", "--out", str(out)]) == 1
    message = capsys.readouterr().err
    assert "smaller --lr" in message
    last = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert last["loss"] is None
    assert last["step"] < 50


def test_the_rate_rises_to_one_and_falls_to_a_tenth():
    rates = [learning_rate(number, 4, 20) for number in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[20] == pytest.approx(0.1)
    assert learning_rate(0, 0, 1) == 1


@pytest.mark.parametrize(
    ("settings", "update"),
    [
        ({}, "backward"),
        ({"max_norm": 1.0}, "forward"),
        ({"accumulate": 2}, "forward"),
        ({"update": "forward"}, "forward"),
        ({"speculate": True}, "forward"),
    ],
)
def test_updates_come_in_the_backward_where_nothing_has_to_wait(settings, update):
    assert TrainSettings(**settings).updates_in == update


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("1m", 0.8e6, 1.2e6),
        ("25m", 24e6, 27e6),
        ("125m", 120e6, 130e6),
        ("demo", 300e6, 330e6),
        ("350m", 340e6, 360e6),
        ("750m", 740e6, 770e6),
        ("1.1b", 1.05e9, 1.15e9),
        ("3b", 2.9e9, 3.1e9),
        ("7b", 6.9e9, 7.2e9),
    ],
)
def test_a_presets_name_says_its_size(name, least, most):
    assert least <= PRESETS[name].parameters <= most
    with torch.device("meta"):
        model = llama(PRESETS[name], sequence=32)
    assert model.num_parameters() == PRESETS[name].parameters


def test_an_interrupted_run_says_what_is_done_what_is_not_and_how_it_goes_on(folder, monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "1m", SMALL)

    def stop(log, step):
        write(log, step)
        if step.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    write = module.StepLog.write
    monkeypatch.setattr(module.StepLog, "write", stop)
    options = ["--durable", "--save", str(folder / "saved")]
    assert cli.main(["train", *command(folder, "out", *options)[4:]]) == 128 + signal.SIGTERM
    said = capsys.readouterr().out
    assert "stopped by a signal after step 2 of " in said
    assert "is written after the last step" in said
    assert "the same command with --resume goes on from the last committed step" in said
    assert not (folder / "saved").exists()


def test_a_signal_while_the_model_is_built_is_told_too(folder, monkeypatch, capsys):
    monkeypatch.setattr(module, "build", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    assert cli.main(["train", *command(folder, "out")[4:]]) == 128 + signal.SIGINT
    assert "stopped by a signal before a step began" in capsys.readouterr().out


@pytest.mark.parametrize("at", ["check_room", "an import"])
def test_a_signal_between_the_imports_and_the_first_step_is_told_as_one_before_it(
    folder, monkeypatch, capsys, at
):
    monkeypatch.setitem(PRESETS, "1m", SMALL)

    def stop(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    def swallowed(*_):
        try:
            stop()
        except Interrupted as error:
            raise ImportError("could not import") from error

    monkeypatch.setattr(module, *(("check_room", stop) if at == "check_room" else ("task_of", swallowed)))
    options = ["--save", str(folder / "saved")]
    assert cli.main(["train", *command(folder, "out", *options)[4:]]) == 128 + signal.SIGTERM
    said = capsys.readouterr().out
    assert "stopped by a signal before a step began" in said
    assert "after step" not in said


def test_an_interruption_is_no_error_that_except_exception_would_catch():
    assert not issubclass(Interrupted, Exception)


def known(**rates: float) -> DiskSpeed:
    """What the cache knows of a disk."""
    speed = {"read": 2e9, "write": 3e9, "mixed": 1e9, **rates}
    return DiskSpeed(**speed, depth=8, piece_nbytes=1 << 20, engine="threads", date="2026-05-01")


def test_a_filesystem_that_holds_several_folders_is_counted_once(folder, monkeypatch):
    monkeypatch.setattr(module, "measured", lambda *_: known())
    (folder / "a").mkdir()
    assert disk_speed([str(folder), str(folder / "a")], "threads").mixed == 1e9


def test_disks_add_up_where_all_of_them_were_measured(folder, monkeypatch):
    elsewhere = "/proc"
    assert os.stat(elsewhere).st_dev != os.stat(folder).st_dev
    speeds = {str(folder): known(), elsewhere: known(mixed=5e8)}
    monkeypatch.setattr(module, "measured", lambda place, _: speeds[place])
    assert disk_speed(list(speeds), "threads").mixed == 1.5e9
    speeds[elsewhere] = None
    assert disk_speed(list(speeds), "threads") is None
    speeds[elsewhere] = known(mixed=0)
    assert disk_speed(list(speeds), "threads") is None, "a rate of 0 is one that is not known"
    assert disk_speed([], "none") is None


def test_the_bound_stands_in_the_progress_line_and_in_the_table(folder, capsys, monkeypatch):
    monkeypatch.setitem(PRESETS, "1m", SMALL)
    monkeypatch.setattr(module, "measured", lambda *_: known(read=1e3, write=1e3, mixed=1e3))
    monkeypatch.setenv("COLUMNS", "200")
    train(TrainSettings(**SCHEDULED, out=str(folder / "run"), host_memory="512KiB"), Console())
    printed = capsys.readouterr()
    assert "the disk's mixed limit, process" in printed.err
    assert "of the disk's mixed limit" in printed.out
    assert "floor of a step" in printed.out


def test_without_a_measurement_the_table_says_how_to_get_one(folder, capsys, monkeypatch):
    monkeypatch.setitem(PRESETS, "1m", SMALL)
    monkeypatch.setattr(module, "measured", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "200")
    train(TrainSettings(**SCHEDULED, out=str(folder / "run"), host_memory="512KiB"), Console())
    assert "infinity doctor --measure" in capsys.readouterr().out


def test_the_log_says_how_long_each_step_waited(folder):
    log = run(folder, "run", host_memory="512KiB")
    assert all(0 <= step["stall_s"] <= step["seconds"] for step in log)
    assert sum(step["stall_s"] for step in log) > 0, "a small budget cannot have everything ready in time"
    assert {step["stall_s"] for step in run(folder, "plain", plain=True)} == {0.0}


def test_a_run_leaves_the_timeline_and_the_report_that_were_asked_for(folder, capsys, monkeypatch):
    monkeypatch.setitem(PRESETS, "1m", SMALL)
    trace, report = folder / "trace.json", folder / "report.html"
    train(
        TrainSettings(**SCHEDULED, out=str(folder / "run"), timeline=str(trace), report=str(report)),
        Console(soft_wrap=True),
    )
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [event["name"] for event in events if event.get("cat") == "steps"]
    assert steps == [f"step {number}" for number in range(1, SCHEDULED["steps"] + 1)]
    phases = [event["name"] for event in events if event.get("cat") == "compute"]
    assert phases.count("forward") == phases.count("backward") == SCHEDULED["steps"]
    assert {"memory: host", "memory: device", "memory: nvme"} <= {event["name"] for event in events}
    page = report.read_text()
    assert "<svg" in page
    assert "uses of units" in page
    printed = capsys.readouterr().out
    assert str(trace) in printed
    assert str(report) in printed


def test_two_folders_and_a_state_type_reach_the_configuration(folder, monkeypatch):
    class SeenError(Exception):
        pass

    def config(**given: object) -> None:
        raise SeenError(given)

    monkeypatch.setattr(module, "Config", config)
    settings = TrainSettings(**SCHEDULED, out=str(folder / "run"), nvme=["a", "b"], state_dtype="int8")
    with pytest.raises(SeenError) as seen:
        train(settings, Console(quiet=True))
    (given,) = seen.value.args
    assert (given["nvme"], given["state_dtype"]) == (["a", "b"], "int8")


def test_a_full_disk_is_told_with_the_file_what_is_free_and_what_to_do(folder, monkeypatch, capsys):
    class Full(module.StepLog):
        """Writes to a disk that has no room."""

        def __init__(self, path: Path, every: int) -> None:
            self._file = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115 - it is closed by close
            self._every = every

    class Status:
        f_bavail, f_frsize = 3, 1024

    monkeypatch.setattr(module, "StepLog", Full)
    monkeypatch.setattr(module.os, "statvfs", lambda _: Status)
    out = folder / "run"
    arguments = ["--preset", "1m", "--sequence", "32", "--steps", "2", "--no-nvme", "--out", str(out)]
    assert cli.main(["train", *arguments]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"infinity train: {out}/log.jsonl: No space left on device; 3.0 KiB are free. "
        "Free space there, or name another folder with --out."
    )


def test_blocks_are_recomputed_without_a_word(recwarn):
    with torch.device("meta"):
        model = llama(PRESETS["1m"], sequence=16)
    recwarn.clear()
    recompute_blocks(model)
    assert any(getattr(one, "gradient_checkpointing", False) for one in model.modules())
    assert [str(one.message) for one in recwarn] == []

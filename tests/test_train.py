"""`infinity train` does what its log says: real text, real disk, 0.9 M parameters. Nothing is faked."""

import builtins
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from infinity import cli
from infinity.presets import PRESETS, llama
from infinity.report import Meter, Run, Step, StepLog, plot_loss
from infinity.train import Interrupted, Settings, learning_rate, train

pytestmark = pytest.mark.disk

SCHEDULED = {"preset": "1m", "sequence": 48, "steps": 4, "warmup": 2, "lr": 3e-3}


@pytest.fixture
def one_thread():
    """torch repeats its own bits at the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(folder: Path, name: str, **settings: object) -> list[dict]:
    """Train, and return the lines of the log."""
    out = folder / name
    train(Settings(**{**SCHEDULED, **settings}, out=str(out)), Console(quiet=True))
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(log: list[dict]) -> list[float]:
    return [step["loss"] for step in log]


def test_three_steps_leave_three_lines_a_picture_and_a_table(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = folder / "run"
    arguments = ["--preset", "1m", "--steps", "3", "--lr", "1e-3", "--warmup", "1", "--host-memory", "2MiB"]
    assert cli.main(["train", *arguments, "--out", str(out)]) == 0
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [step["step"] for step in log] == [1, 2, 3]
    assert losses(log) == sorted(losses(log), reverse=True)
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
        pytest.param({}, id="update in the backward"),
        pytest.param({"max_norm": 0.5}, id="clipped"),
        pytest.param({"max_norm": 0.5, "accumulate": 2, "batch": 2}, id="clipped and accumulated"),
        pytest.param({"checkpointing": False, "update": "forward"}, id="not checkpointed"),
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


def test_the_first_steps_and_every_nth_are_logged(tmp_path):
    log = StepLog(tmp_path / "log", every=3)
    for number in range(1, 8):
        log.write(step(number))
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3, 6]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    log = StepLog(tmp_path / "log")
    log.write(step(1))
    assert json.loads((tmp_path / "log").read_text())["loss"] == 2.5
    log.close()
    with pytest.raises(FileExistsError):
        StepLog(tmp_path / "log")


def step(number: int, **values: object) -> Step:
    fields = {"loss": 2.5, "lr": 0.1, "grad_norm": None, "seconds": 0.5, "tokens_per_second": 10.0}
    nbytes = dict.fromkeys(
        ("nvme_read_nbytes", "nvme_written_nbytes", "rss_nbytes", "budget_held_nbytes"), 1000
    )
    return Step(step=number, **{**fields, **nbytes, **values})


def test_the_table_of_a_run_leaves_the_first_step_out_of_what_is_typical():
    run = Run("1m", parameters=1000, peak_nbytes=6000)
    run.steps = [step(1, seconds=100.0), *(step(number) for number in (2, 3, 4))]
    console = Console(width=160, record=True, quiet=True)
    with console.capture():
        pass
    wide = Console(width=160, file=None, record=True)
    with wide.capture() as captured:
        wide.print(run.table())
    assert "median 0.50 s" in captured.get()
    assert "50% of the state" in captured.get()


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    for module in [module for module in sys.modules if module.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install matplotlib" in str(plot_loss(tmp_path / "loss.png", [step(1)], "title"))
    assert not (tmp_path / "loss.png").exists()


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
    ],
)
def test_updates_come_in_the_backward_where_nothing_has_to_wait(settings, update):
    assert Settings(**settings).updates_in == update


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


def test_the_meter_sees_memory_that_is_taken_and_given_back():
    meter = Meter()
    taken = bytearray(64 << 20)
    taken[::4096] = b"x" * len(taken[::4096])
    del taken
    assert 50 << 20 < meter.peak_nbytes() < 200 << 20


def test_an_interruption_is_no_error_that_except_exception_would_catch():
    assert not issubclass(Interrupted, Exception)

"""The monitors of a DeepSpeed file: what rank 0 writes, and that no number follows from it. Trusted: plain
losses; the boards' packages are replaced by stand-ins.
"""

import builtins
import csv
import sys
import types

import pytest
import torch
from torch import nn

from infinity import deepspeed
from infinity.deepspeed.monitor import OPENS, Monitors

pytestmark = pytest.mark.usefixtures("repeatable")


def trained(steps=2, **sections):
    """Train with monitors; return the engine and the loss of every backward."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "infinity": {"host_memory": "16MiB"},
        **sections,
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
    engine = deepspeed.initialize(model=model, config=config)[0]
    losses = []
    for number in range(2 * steps):
        inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
        loss = engine(inputs.to(next(engine.parameters()).dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_files_are_deepspeeds_and_change_no_number(tmp_path):
    section = {"enabled": True, "output_path": str(tmp_path / "logs"), "job_name": "job"}
    _, plain = trained()
    _, losses = trained(csv_monitor=section, wall_clock_breakdown=True)
    assert losses == plain
    folder = tmp_path / "logs" / "job"
    means = [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2]
    header, *lines = rows(folder / "Train_Samples_train_loss.csv")
    assert header == ["step", "train_loss"]
    assert [samples for samples, _ in lines] == ["0", "4"], "the samples before the update"
    assert [float(value) for _, value in lines] == pytest.approx(means)
    assert rows(folder / "Train_Samples_lr.csv") == [["step", "lr"], ["4", "0.01"], ["8", "0.01"]]
    for what in ("forward", "backward", "step"):
        times = rows(folder / f"Train_Samples_elapsed_time_ms_{what}.csv")
        assert [samples for samples, _ in times] == ["step", "4", "8"]
        assert all(float(value) > 0 for _, value in times[1:])
    assert len(list(folder.iterdir())) == 5


def test_with_fp16_the_loss_scale_is_written(tmp_path):
    section = {"enabled": True, "output_path": str(tmp_path)}
    trained(1, csv_monitor=section, fp16={"enabled": True, "loss_scale": 64})
    found = rows(tmp_path / "DeepSpeedJobName" / "Train_Samples_loss_scale.csv")
    assert found == [["step", "loss_scale"], ["4", "64.0"]]


def test_tensorboard_and_wandb_get_the_same_scalars(tmp_path, monkeypatch):
    seen = []

    class SummaryWriter:
        def __init__(self, log_dir):
            seen.append(log_dir)

        def add_scalar(self, *event):
            seen.append(event)

        def flush(self):
            seen.append("flushed")

    board = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = SummaryWriter
    run = types.SimpleNamespace(log=lambda data, step: seen.append((data, step)))
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: seen.append(options) or run
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monitors = Monitors(
        {
            "tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
            "wandb": {"enabled": True, "team": "us"},
        }
    )
    monitors.write({"lr": 0.5}, 8)
    assert seen == [
        str(tmp_path / "job"),
        {"project": "deepspeed", "group": None, "entity": "us"},
        ("Train/Samples/lr", 0.5, 8),
        "flushed",
        ({"Train/Samples/lr": 0.5}, 8),
    ]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_board_that_is_not_installed_is_warned_of_once_and_stops_nothing(monkeypatch, name):
    real = builtins.__import__

    def without(module, *more):
        if module in ("wandb", "torch.utils.tensorboard"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(module, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.warns(UserWarning, match=f"{name} is enabled, but .*pip install {name}.*continues") as warned:
        engine, _ = trained(1, **{name: {"enabled": True}})
    assert len(warned) == 1
    assert engine.global_steps == 1


def test_a_folder_that_cannot_be_written_to_stops_nothing(tmp_path):
    (tmp_path / "file").touch()
    section = {"enabled": True, "output_path": str(tmp_path / "file")}
    with pytest.warns(UserWarning, match=r"csv_monitor cannot be opened .*Training continues"):
        assert not Monitors({"csv_monitor": section})
    monitors = Monitors({"csv_monitor": {"output_path": str(tmp_path)}})
    monitors.write({"lr": 1}, 1)
    (tmp_path / "DeepSpeedJobName" / "Train_Samples_loss.csv").mkdir()
    with pytest.warns(UserWarning, match="csv_monitor cannot be written to"):
        monitors.write({"loss": 1}, 1)
    assert not monitors
    monitors.write({"loss": 1}, 1)


def test_what_only_observes_is_left_out_with_one_warning():
    sections = {name: {"enabled": True} for name in ("comms_logger", "flops_profiler", "comet")}
    with pytest.warns(UserWarning, match="left out of the DeepSpeed configuration") as warned:
        settings = deepspeed.launch.read({"train_batch_size": 1, **sections})
    assert len(warned) == 1
    assert all(name in str(warned[0].message) for name in sections)
    assert settings.monitors == {}


def test_a_monitor_that_raises_an_error_of_its_own_is_warned_of_and_training_goes_on(monkeypatch):
    class BoardError(Exception):
        """As wandb's, where nobody is logged in."""

    def fails(_section):
        raise BoardError("No API key configured.\nUse wandb login")

    monkeypatch.setitem(OPENS, "wandb", fails)
    with pytest.warns(UserWarning, match="wandb cannot be opened .No API key configured.."):
        assert not Monitors({"wandb": {}})

    def begins(_section):
        return fails

    monkeypatch.setitem(OPENS, "wandb", begins)
    open_one = Monitors({"wandb": {}})
    with pytest.warns(UserWarning, match="cannot be written to .No API key configured."):
        open_one.write({"lr": 1.0}, 1)
    assert not open_one

"""Which of Config's settings `infinity train` has, and which it has not. Trusted: the docs' table of these.
Faked: the training, where a test says so.
"""

import dataclasses
import re
from pathlib import Path

import pytest
from rich.console import Console

from infinity import Config
from infinity import __main__ as cli
from infinity.cli import train as module
from infinity.cli.settings import PASSED_ON, TrainSettings
from infinity.cli.train import train

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def settings_of_config():
    return {one.name: one.default for one in dataclasses.fields(Config) if one.init}


def left_out():
    """Return the fields that the page names as no options, with what it says of them."""
    head = r"\| no option of `infinity train` \| why \|\n\|[-| ]+\|\n"
    (table,) = re.findall(head + r"((?:\|.*\n)+)", PAGE.read_text())
    rows = [re.findall(r"[^|]+", row)[:2] for row in table.splitlines()]
    return {name: why.strip() for names, why in rows for name in re.findall(r"`(\w+)`", names)}


def test_each_setting_of_config_is_an_option_or_is_left_out_for_a_reason_that_the_page_gives():
    fields, options, without = settings_of_config(), set(TrainSettings.__dataclass_fields__), left_out()
    assert sorted(fields.keys() - options) == sorted(without)
    assert all(without.values())


def test_what_is_passed_on_has_configs_names_and_defaults():
    fields, default = settings_of_config(), TrainSettings()
    assert {name: getattr(default, name) for name in PASSED_ON} == {name: fields[name] for name in PASSED_ON}


ASKED = {
    "master_dtype": "fp24",
    "state_dtype": "int4",
    "device_memory": "1GiB",
    "tile_above": "auto",
    "units": "block",
    "frozen_dtype": "nf4",
}


def test_options_come_to_config(monkeypatch, tmp_path):
    assert ASKED.keys() == set(PASSED_ON)
    seen = []
    monkeypatch.setattr("infinity.cli.train.train", lambda settings, _: seen.append(settings))
    monkeypatch.setattr("infinity.cli.main._check_data", lambda _: None)
    typed = [f"--{name.replace('_', '-')}={value}" for name, value in ASKED.items()]
    assert cli.main(["train", "--aio", "gds", *typed]) == 0
    (settings,) = seen
    given = {}

    class SeenError(Exception):
        pass

    def config(**settings):
        given.update(settings)
        raise SeenError

    monkeypatch.setattr(module, "Config", config)
    text = tmp_path / "text"
    text.write_text("It was the best of times. " * 50)
    asked = dataclasses.replace(settings, preset="1m", sequence=16, text=str(text), out=str(tmp_path / "run"))
    with pytest.raises(SeenError):
        train(asked, Console(quiet=True))
    assert {name: given[name] for name in PASSED_ON} == ASKED
    assert given["aio"] == "gds"


@pytest.mark.disk
def test_masters_in_24_bits_train_and_are_told(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "plot_run", lambda *_: None)
    text = tmp_path / "text"
    text.write_text("It was the best of times, it was the worst of times. " * 20)
    command = ["train", "--preset", "1m", "--sequence", "16", "--steps", "1", "--host-memory", "4MiB"]
    command += ["--text", str(text), "--nvme", str(folder), "--out", str(tmp_path / "run")]
    assert cli.main([*command, "--master-dtype", "fp24"]) == 0
    assert "0.9 M parameters, 9.6 MiB of state" in capsys.readouterr().out, "11 bytes of each"


def test_masters_in_24_bits_of_other_types_are_refused_by_name(capsys, tmp_path):
    assert (
        cli.main(["train", "--dtype", "fp32", "--master-dtype", "fp24", "--out", str(tmp_path / "run")]) != 0
    )
    assert "master_dtype='fp24' with dtype='fp32'" in capsys.readouterr().err

"""What all benchmarks tell, and the files they write. Trusted: rich, matplotlib; real files."""

import argparse
import json
import os
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from infinity.bench.findings import (
    Column,
    Findings,
    add_outputs,
    asked,
    check_outputs,
    gb_per_s,
    show,
    write,
    write_unfinished,
)
from infinity.errors import ConfigError

ROWS = [{"name": "io_uring [bold]", "rate": 2.31e9, "extra": [1, 2]}, {"name": "threads"}]
COLUMNS = [Column("name", "engine"), Column("rate", "read", gb_per_s)]


def draw(axes) -> None:
    axes.plot([1, 2, 3])


FOUND = Findings(
    "Bandwidth", ROWS, COLUMNS, verdicts=["≥ 0.97 of fio: 0.99 ✓"], options={"depth": 32}, draw=draw
)


def parsed(*arguments: object, plots: bool = True) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_outputs(parser, plots=plots)
    return parser.parse_args([str(argument) for argument in arguments])


def test_the_table_has_what_the_columns_name_the_verdicts_and_the_conditions(tmp_path):
    out = StringIO()
    show(FOUND, Console(file=out, width=160), tmp_path)
    shown = out.getvalue()
    for part in ("Bandwidth", "engine", "2.31 GB/s", "io_uring [bold]", "≥ 0.97 of fio: 0.99 ✓"):
        assert part in shown
    for condition in ("cpu ", "kernel ", "filesystem ", "torch ", "commit ", "date "):
        assert condition in shown
    assert "extra" not in shown
    assert "None" not in shown


def test_without_a_folder_no_filesystem_is_named():
    out = StringIO()
    show(FOUND, Console(file=out, width=160))
    assert "kernel " in out.getvalue()
    assert "filesystem" not in out.getvalue()


def test_json_and_plot_are_written_whole_with_the_conditions(tmp_path):
    options = parsed("--json", tmp_path / "a.json", "--plot", tmp_path / "a.png")
    check_outputs(options)
    write(FOUND, options, tmp_path)
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["rows"] == ROWS
    assert record["options"] == {"depth": 32}
    assert record["verdicts"] == ["≥ 0.97 of fio: 0.99 ✓"]
    assert {"kernel", "filesystem"} <= record["machine"].keys()
    assert {"torch", "commit", "date"} <= record["about"].keys()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png"]


def test_what_a_run_kept_while_it_went_on_is_gone_with_its_end_and_refused_before(tmp_path):
    path = tmp_path / "found.json"
    options = parsed("--json", path)
    for rates in ([1.0], [1.0, 2.0]):
        write_unfinished(replace(FOUND, rows=[{"rates": rates}]), options, tmp_path)
        kept = tmp_path / "found.unfinished.json"
        assert json.loads(kept.read_text())["rows"] == [{"rates": rates}]
        assert list(tmp_path.iterdir()) == [kept]
    with pytest.raises(ConfigError, match=r"found\.unfinished\.json is of a run that has not ended"):
        check_outputs(options)
    write(FOUND, options)
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_written_where_nothing_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(FOUND, parsed())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flag", "name", "said"),
    [
        ("--json", "there.json", "never overwritten"),
        ("--plot", "there.png", "never overwritten"),
        ("--json", "a.txt", "ends in .json"),
        ("--plot", "a.pdf", "ends in .png"),
        ("--json", "nowhere/a.json", "no folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path, flag, name, said):
    for there in ("there.json", "there.png"):
        (tmp_path / there).write_text("precious")
    with pytest.raises(ConfigError, match=said):
        check_outputs(parsed(flag, tmp_path / name))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="no right to write"):
        check_outputs(parsed("--json", tmp_path / "a.json"))


def test_a_plot_without_matplotlib_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_outputs(parsed("--json", tmp_path / "a.json"))
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        check_outputs(parsed("--plot", tmp_path / "a.png"))


def test_a_command_that_draws_nothing_offers_no_plot():
    with pytest.raises(SystemExit):
        parsed("--plot", "a.png", plots=False)
    check_outputs(parsed(plots=False))


def test_a_row_that_is_no_json_leaves_no_file(tmp_path):
    options = parsed("--json", tmp_path / "a.json")
    with pytest.raises(TypeError, match="cannot be part of a record"):
        write(Findings("", [{"a": object()}], []), options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_plot_that_ends_halfway_leaves_no_file(tmp_path, error):
    def failing(_) -> None:
        raise error

    options = parsed("--plot", tmp_path / "a.png")
    with pytest.raises(type(error)):
        write(Findings("", [], [], draw=failing), options)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_writing_names_the_file(tmp_path):
    def failing(_) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.png"
    with pytest.raises(OSError, match="No space") as caught:
        write(Findings("", [], [], draw=failing), argparse.Namespace(plot=path))
    assert caught.value.filename == str(path)


def test_a_record_leaves_out_places_and_what_argparse_adds():
    options = argparse.Namespace(nvme=["/x"], venv=Path("/y"), run=print, command="bench", depth=3)
    assert asked(options) == {"depth": 3}

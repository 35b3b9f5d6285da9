"""Folders that measurements may work in. Trusted: the filesystem; nothing is measured."""

import argparse
import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from infinity.bench.aio import io
from infinity.bench.engine import losses
from infinity.bench.engine.runs import folder_on
from infinity.bench.places import check_apart, check_folder, shared
from infinity.bench.planning import plan as planning
from infinity.errors import ConfigError


def asked(module, *arguments):
    """Run a command, which must refuse what was asked for."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    module.run(parser.parse_args([*map(str, arguments)]), Console(file=StringIO()))


def test_a_folder_that_is_not_there_is_refused_and_not_made(tmp_path):
    missing = tmp_path / "mistyped"
    expected = (
        f"--nvme {missing}: there is no such folder. Create it \\(mkdir -p\\) on the drive to measure\\.$"
    )
    with pytest.raises(ConfigError, match=expected), folder_on(missing):
        pass
    for module, before in ((io, []), (planning, ["check", "--model", "1m"])):
        with pytest.raises(ConfigError, match=expected):
            asked(module, *before, "--nvme", missing)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--nvme .*file: that is a file\. Name a folder"):
        check_folder(tmp_path / "file")


def test_a_folder_is_made_in_one_that_is_there_and_goes_again(tmp_path):
    with folder_on(tmp_path) as folder:
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused():
    with pytest.raises(ConfigError, match="may not write there"):
        check_folder("/proc/sys")


def test_a_module_of_its_own_refuses_it_as_a_wrong_argument(tmp_path, capsys):
    with pytest.raises(SystemExit):
        losses.main(["--nvme", str(tmp_path / "missing")])
    assert "there is no such folder" in capsys.readouterr().err


def test_one_folder_is_not_two_drives_whatever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("a")
    check_apart(["a", "b"])
    for other in ("a", "a/.", "link", str(tmp_path / "a")):
        with pytest.raises(ConfigError, match=f"--nvme a and --nvme {other} are one folder"):
            check_apart(["b", "a", other])
    monkeypatch.setattr(io, "opened", lambda *_: pytest.fail("too late"))
    with pytest.raises(ConfigError, match="are one folder"):
        asked(io, "--nvme", "a", "--nvme", "a/.")


def test_folders_of_one_filesystem_are_named_together(tmp_path):
    (tmp_path / "a").mkdir()
    here, below = str(tmp_path), str(tmp_path / "a")
    assert list(shared([here, below, "/proc"])) == [
        f"{here} and {below} lie on one filesystem: that is one disk, not several"
    ]
    assert list(shared([here, "/proc"])) == []
    assert Path("/proc").stat().st_dev != tmp_path.stat().st_dev

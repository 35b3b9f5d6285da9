"""The folder of a durable run on hostile ground: planted links, other owners, a second run. Real files."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from children import Child
from infinity import ConfigError, aio
from infinity.durable.folder import RUN, RunFolder

pytestmark = pytest.mark.disk
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def run(folder):
    found = RunFolder(str(folder))
    yield found
    found.close()


def place(folder):
    return folder / RUN / "rank0"


def test_folders_and_files_are_for_their_owner_alone(folder, run):
    run.write_slot(0, b"commit")
    for path in (folder / RUN, place(folder)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((place(folder) / "commit-0").stat().st_mode) == 0o600


def test_slots_are_read_as_they_were_written(folder, run):
    assert run.read_slots() == [b"", b""]
    run.write_slot(1, b"older" * 100)
    run.write_slot(0, b"newer")
    run.write_slot(1, b"x" * 200_000)
    first, second = run.read_slots()
    assert (first.rstrip(b"\0"), second.rstrip(b"\0")) == (b"newer", b"x" * 200_000)


def test_a_second_run_is_refused_by_name_until_the_first_ends(folder, run):
    with pytest.raises(ConfigError, match="rank0 belongs to a durable run that another process has open"):
        RunFolder(str(folder))
    run.close()
    RunFolder(str(folder)).close()


def test_a_forked_child_does_not_keep_the_lock(folder, run):
    def stay(say):
        say(here=True)
        signal.pause()

    child = Child(stay)
    while not child.over() and not child.said:
        time.sleep(0.001)
    run.close()
    try:
        RunFolder(str(folder)).close()
    finally:
        os.kill(child.pid, signal.SIGKILL)
        while not child.over():
            time.sleep(0.001)
    assert child.last["here"]


def test_another_process_is_refused(folder, run):
    code = f"from infinity.durable.folder import RunFolder; RunFolder({str(folder)!r})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "that another process has open" in ended.stderr


@pytest.mark.parametrize("name", [RUN, f"{RUN}/rank0"])
@pytest.mark.parametrize("to", ["folder", "file", "nothing"])
def test_a_link_in_the_place_of_a_folder_is_refused_and_what_it_leads_to_untouched(
    folder, tmp_path, name, to
):
    elsewhere = tmp_path / "elsewhere"
    if to == "folder":
        elsewhere.mkdir()
    elif to == "file":
        elsewhere.write_text("precious")
    at = folder / name
    at.parent.mkdir(mode=0o700, exist_ok=True)
    at.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is a link or a file, expected a folder"):
        RunFolder(str(folder))
    assert to != "folder" or list(elsewhere.iterdir()) == []
    assert to != "file" or elsewhere.read_text() == "precious"


@pytest.mark.parametrize("kind", ["link", "second name", "pipe", "folder", "readable"])
def test_a_planted_commit_is_refused(folder, run, tmp_path, kind):
    at, precious = place(folder) / "commit-0", place(folder) / "precious"
    precious.write_bytes(b"precious")
    if kind == "link":
        at.symlink_to(precious)
    elif kind == "second name":
        at.hardlink_to(precious)
    elif kind == "pipe":
        os.mkfifo(at)
    elif kind == "folder":
        at.mkdir()
    else:
        at.write_bytes(b"theirs")
        at.chmod(0o644)
    refused = (ConfigError, aio.IoError if kind == "folder" else ConfigError)
    for use, error in zip((run.read_slots, lambda: run.write_slot(0, b"ours")), refused, strict=True):
        with pytest.raises(error, match="commit-0"):
            use()
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
def test_a_planted_file_of_extents_is_refused(folder, run, tmp_path, kind):
    name = f"state-{'0' * 16}-0"
    at, precious = place(folder) / name, place(folder) / "precious"
    precious.write_bytes(b"precious")
    at.symlink_to(precious) if kind == "link" else os.mkfifo(at) if kind == "pipe" else at.hardlink_to(
        precious
    )
    with aio.open_engine(str(folder)) as engine:
        with pytest.raises(ConfigError, match=name):
            run.open_state(engine, name)
        with pytest.raises(FileExistsError):
            run.create_state(engine, name)
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_in_is_refused(folder, run, mode):
    run.close()
    (folder / RUN).chmod(mode)
    with pytest.raises(ConfigError, match=r"belong to user \d+, and nobody else may write in it"):
        RunFolder(str(folder))


def test_everybodys_folder_is_refused_unless_names_in_it_stay(folder):
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="another user could replace the durable run"):
        RunFolder(str(folder))
    folder.chmod(0o1777)
    RunFolder(str(folder)).close()


@root
@pytest.mark.parametrize("name", [RUN, f"{RUN}/rank0", ""])
def test_a_folder_of_somebody_else_is_refused(folder, run, name):
    run.close()
    os.chown(folder / name, 65534, 65534)
    with pytest.raises(ConfigError, match=r"user 65534|belongs to user 65534"):
        RunFolder(str(folder))


@root
def test_a_file_of_somebody_else_is_refused(folder, run):
    run.write_slot(0, b"commit")
    os.chown(place(folder) / "commit-0", 65534, 65534)
    with pytest.raises(ConfigError, match="user 65534"):
        run.read_slots()


def test_wiping_removes_the_runs_files_and_nothing_else(folder, run):
    run.write_slot(0, b"commit")
    ours, theirs = place(folder) / f"state-{'a' * 16}-0", place(folder) / "state-of-mind"
    ours.touch()
    theirs.touch()
    run.wipe()
    assert [path.name for path in Path(place(folder)).iterdir()] == ["state-of-mind"]


def test_a_folder_that_is_not_there_is_named(folder):
    with pytest.raises(ConfigError, match="there is no such folder"):
        RunFolder(str(folder / "nowhere"))
    with pytest.raises(ConfigError, match="so no durable run"):
        RunFolder(str(folder), create=False)

"""infinity.wipe: what it removes, and what it refuses to touch. Real files, real runs."""

import os
import signal
import subprocess
import sys
import time

import pytest

import infinity
from children import Child
from fragile import Run
from infinity import ConfigError
from infinity.durable.folder import RUN, RunFolder

pytestmark = pytest.mark.disk


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def planted(base, *ranks):
    """Leave a run's files in the folders of these ranks, as a process that is gone has."""
    for rank in ranks:
        run = RunFolder(str(base), rank)
        run.write_slot(0, b"commit")
        run.write_slot(1, b"commit")
        path = base / RUN / f"rank{rank}" / f"state-{'a' * 16}-0"
        path.write_bytes(b"x" * 8192)
        path.chmod(0o600)
        run.close()


def test_wiping_removes_the_run_of_every_rank_and_says_how_many_bytes_that_were(folder):
    planted(folder, 0, 1, 12)
    assert infinity.wipe(folder) >= 3 * 8192
    assert tree(folder) == [RUN, f"{RUN}/rank0", f"{RUN}/rank1", f"{RUN}/rank12"]


def test_what_else_lies_there_stays(folder):
    planted(folder, 0)
    for name in ("precious", f"{RUN}/precious", f"{RUN}/rank0/state-of-mind"):
        (folder / name).write_text("precious")
    infinity.wipe(str(folder))
    assert tree(folder) == [RUN, f"{RUN}/precious", f"{RUN}/rank0", f"{RUN}/rank0/state-of-mind", "precious"]


def test_several_folders_are_wiped_together(folder):
    folders = [folder / name for name in "ab"]
    for one in folders:
        one.mkdir()
        planted(one, 0)
    infinity.wipe(folders)
    assert all(tree(one) == [RUN, f"{RUN}/rank0"] for one in folders)


def test_what_is_empty_has_nothing_to_wipe(folder):
    assert infinity.wipe(folder) == 0
    planted(folder, 0)
    infinity.wipe(folder)
    assert infinity.wipe(folder) == 0


def test_a_run_begins_anew_in_a_folder_that_was_wiped(folder):
    run = Run(folder)
    run.train(2)
    run.kill()
    infinity.wipe(folder)
    run = Run(folder)
    assert run.first == 0
    run.train(1)
    run.kill()


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ("model.safetensors", "config.json"),
            r"holds no durable run, but config\.json, model\.safetensors\.",
        ),
        (tuple("abcdefg"), "holds no durable run, but a, b, c, d, e and 2 more"),
        ((f"{RUN}/notes",), f"{RUN} holds no durable run, but notes"),
    ],
)
def test_a_folder_of_other_things_is_refused_with_what_was_found_and_nothing_is_removed(folder, names, says):
    for name in names:
        path = folder / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text("precious")
    before = tree(folder)
    with pytest.raises(ConfigError, match=rf"{says}.*Nothing was removed\."):
        infinity.wipe(folder)
    assert tree(folder) == before


def test_the_folder_within_is_refused_and_the_one_to_name_is_told(folder):
    planted(folder, 0)
    before = tree(folder)
    for inner in (folder / RUN, folder / RUN / "rank0"):
        with pytest.raises(ConfigError, match=f"the one with {RUN} in it"):
            infinity.wipe(inner)
    assert tree(folder) == before


@pytest.mark.parametrize(
    ("name", "says"),
    [("nowhere", "there is no such folder"), ("file", "is a file. Name the folder")],
)
def test_what_is_no_folder_is_refused(folder, name, says):
    (folder / "file").write_text("precious")
    with pytest.raises(ConfigError, match=says):
        infinity.wipe(folder / name)
    assert tree(folder) == ["file"]


@pytest.mark.parametrize("given", ["", [], None])
def test_no_folder_at_all_is_refused(given, folder, monkeypatch):
    planted(folder, 0)
    monkeypatch.chdir(folder)
    before = tree(folder)
    with pytest.raises(ConfigError, match="Nothing was removed"):
        infinity.wipe(given)
    assert tree(folder) == before


@pytest.mark.parametrize("name", [RUN, f"{RUN}/rank1"])
def test_a_link_in_the_place_of_a_folder_is_refused_and_what_it_leads_to_stays(folder, name):
    base, elsewhere = folder / "base", folder / "elsewhere"
    base.mkdir()
    elsewhere.mkdir()
    planted(elsewhere, 0, 1)
    if name != RUN:
        planted(base, 0)
    (base / name).symlink_to(elsewhere / name)
    before = tree(folder)
    with pytest.raises(ConfigError, match="is a link or a file, expected a folder"):
        infinity.wipe(base)
    assert tree(folder) == before


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_run_in_which_others_may_write_is_refused(folder, mode):
    planted(folder, 0)
    (folder / RUN).chmod(mode)
    before = tree(folder)
    with pytest.raises(
        ConfigError, match=r"belong to user \d+, and nobody else may write in it.*Nothing was removed"
    ):
        infinity.wipe(folder)
    assert tree(folder) == before


def test_a_folder_in_the_place_of_a_file_is_refused_before_anything_is_removed(folder):
    planted(folder, 0, 1)
    (folder / RUN / "rank1" / "part-of").mkdir()
    before = tree(folder)
    with pytest.raises(ConfigError, match="part-of is a folder, expected a file of a run"):
        infinity.wipe(folder)
    assert tree(folder) == before


def test_a_run_that_is_under_way_is_refused_and_goes_on(folder):
    run = Run(folder)
    run.train(2)
    with pytest.raises(
        ConfigError, match=r"rank0 belongs to a durable run that another process has open.*Nothing was"
    ):
        infinity.wipe(folder)
    assert len(run.train(4)) == 2
    infinity.commit(run.model)
    run.kill()
    run = Run(folder)
    assert run.first == 4
    run.kill()


def test_a_run_of_which_another_process_has_one_rank_is_refused_whole(folder):
    planted(folder, 0, 1)

    def hold(say):
        held = RunFolder(str(folder), 1)
        say(here=held.path)
        signal.pause()

    child = Child(hold)
    while not child.over() and not child.said:
        time.sleep(0.001)
    before = tree(folder)
    try:
        with pytest.raises(
            ConfigError, match=r"rank1 belongs to .*or end that process\. Nothing was removed"
        ):
            infinity.wipe(folder)
        assert tree(folder) == before
    finally:
        os.kill(child.pid, signal.SIGKILL)
        while not child.over():
            time.sleep(0.001)
    infinity.wipe(folder)
    assert tree(folder) == [RUN, f"{RUN}/rank0", f"{RUN}/rank1"]


def test_wiping_works_from_a_shell(folder):
    planted(folder, 0)
    code = f"import infinity; infinity.wipe({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert tree(folder) == [RUN, f"{RUN}/rank0"]


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: infinity.Config(nvme=folder, durable=True, wipe=True),
        lambda folder: infinity.Init(nvme=folder, durable=True, wipe=True),
    ],
    ids=["Config", "Init"],
)
def test_the_option_of_before_warns_at_the_line_that_gives_it(folder, make):
    with pytest.warns(
        DeprecationWarning, match=r"^wipe=True will be removed in the next release: call infin"
    ) as caught:
        make(folder)
    assert [one.filename for one in caught] == [__file__]

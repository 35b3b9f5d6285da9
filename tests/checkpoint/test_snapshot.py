"""A copy of a durable run, taken while it trains, and resumed. Real files; clones where there is mkfs.xfs."""

import os

import pytest

import infinity
from fragile import STEPS, Run, same
from infinity import ConfigError, snapshot
from mounts import ground, root

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable"), pytest.mark.timeout(400)]


@pytest.mark.parametrize("paths", [1, 2])
def test_a_snapshot_is_a_run_of_its_own_that_goes_on_with_the_same_bits(folder, paths):
    nvme = [folder / f"nvme{number}" for number in range(paths)]
    for one in nvme:
        one.mkdir()
    run = Run([*map(str, nvme)])
    run.train(3)
    taken = infinity.snapshot(run.model, folder / "copy")
    losses = run.train()
    taken.wait()
    assert (taken.done, taken.step, taken.folder) == (True, 3, folder / "copy")
    infinity.commit(run.model)
    state = run.state()
    places = (
        [folder / "copy"] if paths == 1 else [folder / "copy" / f"path{number}" for number in range(paths)]
    )
    again = Run([*map(str, places)], resume={"check": True})
    assert again.first == 3
    assert again.train() == losses
    assert same(again.state(), state)
    again.kill()
    run.kill()
    run = Run([*map(str, nvme)])
    assert run.first == STEPS
    assert same(run.state(), state)


def test_while_a_copy_is_made_no_step_is_committed_and_training_goes_on(folder, monkeypatch):
    import threading

    go, real = threading.Event(), snapshot.__globals__["_copy"]

    def slow(*args):
        go.wait(60)
        real(*args)

    monkeypatch.setitem(snapshot.__globals__, "_copy", slow)
    monkeypatch.setitem(snapshot.__globals__, "_clone", lambda *_: False)
    run = Run(folder)
    run.train(2)
    taken = infinity.snapshot(run.model, folder / "copy")
    run.train(5)
    assert (run.committed, taken.done, (folder / "copy").exists()) == (2, False, False)
    go.set()
    taken.wait()
    run.train()
    assert infinity.commit(run.model) == STEPS
    assert (run.committed, Run(folder / "copy").first) == (STEPS, 2)


@root
def test_where_files_can_share_blocks_a_snapshot_takes_no_space(folder):
    with ground("xfs", folder) as place:
        run = Run(place)
        run.train(2)
        before = os.statvfs(place).f_bfree
        taken = infinity.snapshot(run.model, place / "copy")
        assert (taken.cloned, taken.done) == (True, True)
        after = os.statvfs(place)
        assert (before - after.f_bfree) * after.f_frsize < 1 << 20
        run.train()
        infinity.commit(run.model)
        state = run.state()
        run.kill()
        again = Run(place / "copy", resume={"check": True})
        assert again.first == 2
        again.train()
        assert same(again.state(), state)
        again.kill()


def test_a_failed_copy_leaves_no_folder_and_the_run_commits_again(folder, monkeypatch):
    def fails(*_):
        raise OSError(28, "no space left")

    monkeypatch.setitem(snapshot.__globals__, "_copy", fails)
    monkeypatch.setitem(snapshot.__globals__, "_clone", lambda *_: False)
    run = Run(folder)
    run.train(2)
    with pytest.raises(OSError, match="no space left"):
        infinity.snapshot(run.model, folder / "copy").wait()
    assert sorted(path.name for path in folder.iterdir()) == ["infinity-run"]
    run.train(3)
    infinity.commit(run.model)
    assert run.committed == 3


def test_a_folder_that_is_there_is_replaced_only_when_asked_and_nothing_but_a_snapshot_ever(folder):
    run = Run(folder)
    run.train(2)
    (folder / "copy").mkdir()
    (folder / "copy" / "precious").touch()
    with pytest.raises(FileExistsError, match=r"precious.*not an older snapshot"):
        infinity.snapshot(run.model, folder / "copy", overwrite=True)
    infinity.snapshot(run.model, folder / "again").wait()
    (folder / "again" / "notes.txt").write_text("mine")
    run.train(3)
    with pytest.raises(FileExistsError, match="overwrite=True replaces it"):
        infinity.snapshot(run.model, folder / "again")
    infinity.snapshot(run.model, folder / "again", overwrite=True).wait()
    with pytest.raises(FileExistsError, match="no process has open"):
        infinity.snapshot(run.model, folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["again", "copy", "infinity-run"]
    assert run.train(4)
    run.kill()
    assert (folder / "again" / "notes.txt").read_text() == "mine"
    again = Run(folder / "again", resume={"check": True})
    assert again.first == 3


def test_without_durable_there_is_nothing_to_copy(folder):
    with pytest.raises(ConfigError, match="built without durable=True"):
        infinity.snapshot(Run(folder, durable=False).model, folder / "copy")

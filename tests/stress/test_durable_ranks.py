"""Durable runs of several ranks: forked processes over gloo, killed one by one or all at once, and resumed.

Trusted: runs that nothing disturbed. What a commit holds, and how it is written, is tested with one rank.
"""

import os
import random
import shutil
import signal
import time

import pytest

import trials
from children import Child
from infinity import snapshot
from infinity.durable.commit import read_slot
from infinity.durable.folder import RunFolder
from places import SEED

pytestmark = [pytest.mark.disk, pytest.mark.multi, pytest.mark.timeout(600)]
RANKS = 2


def ended(team):
    """Wait for all; what each said, by key."""
    while not team.over():
        time.sleep(0.002)
    return team.last


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """By way to update: each rank's losses and digest (buffers are its own), and the seconds it took."""

    class Undisturbed(dict):
        def __missing__(self, update):
            began = time.monotonic()
            team = trials.together(str(tmp_path_factory.mktemp("plain")), RANKS, update=update)
            digests = [one["digest"] for one in ended(team)]
            self[update] = team.losses, digests, time.monotonic() - began
            assert team.losses[0] != team.losses[1]
            return self[update]

    return Undisturbed()


def check_end(folder, undisturbed, update, least):
    """Resume to the end: every rank at one step, at `least`, with the bits of the undisturbed run."""
    team = trials.together(str(folder), RANKS, update=update)
    said = ended(team)
    expected, digests, _ = undisturbed[update]
    assert [one.get("digest") for one in said] == digests, said
    assert said[0]["first"] == said[1]["first"] >= least
    for losses, there in zip(team.losses, expected, strict=True):
        assert all(loss == there[step] for step, loss in losses.items())
    return said[0]["first"]


@pytest.mark.slow
def test_updates_by_turns_have_the_bits_of_those_in_the_forward(folder, undisturbed):
    """Ranks time their steps by themselves, and agree on how many updates the backward makes."""
    team = trials.together(str(folder), RANKS, update="auto")
    digests = [one.get("digest") for one in ended(team)]
    losses, expected, _ = undisturbed["forward"]
    assert digests == expected
    assert team.losses == losses


def newest(folder, rank):
    """Return the last step that a rank has committed: 0 for none."""
    files = (folder / "infinity-run" / f"rank{rank}").glob("commit-*")
    commits = [read_slot(path.read_bytes(), "slot") for path in files]
    return max((commit.step for commit in commits if commit is not None), default=0)


def dies(folder, at, after):
    """Return what kills rank 1 right before, or after, its commit of step `at` is written, once that of the
    other rank is on the disk: else the other might end for want of rank 1 before it has written its own.
    """

    def before(rank):
        if rank == 1:
            real, calls = RunFolder.write_slot, []

            def write_slot(run, number, data):
                calls.append(1)
                if len(calls) == at:
                    if after:
                        real(run, number, data)
                    while newest(folder, 0) < at:
                        time.sleep(0.002)
                    os.kill(os.getpid(), signal.SIGKILL)
                real(run, number, data)

            RunFolder.write_slot = write_slot

    return before


@pytest.mark.parametrize(("after", "first"), [(False, 2), (True, 3)])
def test_a_step_is_committed_when_every_rank_has_written_it(folder, undisturbed, after, first):
    said = ended(trials.together(str(folder), RANKS, dies(folder, 3, after)))
    assert "RanksError" in said[0]["crash"] or "EngineFailedError" in said[0]["crash"]
    assert [newest(folder, rank) for rank in range(RANKS)] == [3, first]  # one is ahead, or none
    assert check_end(folder, undisturbed, "forward", first) == first


def test_a_rank_that_dies_before_the_first_commit_of_all_lets_the_run_begin_anew(folder, undisturbed):
    ended(trials.together(str(folder), RANKS, dies(folder, 1, after=False)))
    assert check_end(folder, undisturbed, "forward", 0) == 0


@pytest.mark.parametrize("trial", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2, 3))])
def test_ranks_killed_at_random_moments_go_on_with_the_same_bits(folder, undisturbed, trial):
    rng = random.Random(f"{SEED} {trial}")
    update, least = rng.choice(["forward", "backward"]), 0
    for _ in range(rng.randint(1, 3)):
        team = trials.together(str(folder), RANKS, update=update)
        time.sleep(rng.random() * undisturbed[update][2])
        for child in rng.sample(team.children, RANKS):
            if child.status is None:
                os.kill(child.pid, signal.SIGKILL)
                time.sleep(rng.choice([0, rng.random() * 0.2]))
        least = max([least, *(one.get("committed") or 0 for one in ended(team))])
    check_end(folder, undisturbed, update, least)


@pytest.mark.parametrize("paths", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_snapshot_of_several_ranks_is_a_run_that_goes_on_with_the_same_bits(folder, undisturbed, paths):
    nvme = [folder / f"nvme{number}" for number in range(paths)]
    for one in nvme:
        one.mkdir()
    said = ended(trials.together([*map(str, nvme)], RANKS, copy=folder / "copy"))
    assert [one["copied"] for one in said] == [3, 3], said
    assert [one["digest"] for one in said] == undisturbed["forward"][1]
    assert check_end(folder / "copy", undisturbed, "forward", 3) == 3


@pytest.mark.parametrize("end", [pytest.param("fails", marks=pytest.mark.slow), "dies"])
def test_a_rank_that_is_lost_while_it_copies_leaves_no_snapshot_and_the_run_goes_on(folder, undisturbed, end):
    def before(rank):
        def fails(*_):
            if end == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "no space left")

        if rank == 1:
            snapshot.__globals__["_write_commit"] = fails

    said = ended(trials.together(str(folder), RANKS, before, copy=folder / "copy"))
    missing = "rank 1 did not answer" if end == "dies" else "rank 1: OSError: [Errno 28] no space left"
    assert missing in said[0]["crash"]
    assert sorted(path.name for path in folder.iterdir()) == ["infinity-run"]
    assert check_end(folder, undisturbed, "forward", 3) == 3


def test_folders_that_do_not_belong_together_are_refused_on_every_rank(folder):
    ended(trials.together(str(folder), RANKS, steps=3))
    crashes = [one["crash"] for one in ended(trials.together(str(folder), 3, host_memory="1MiB"))]
    assert all("ConfigError: the durable runs in the folders of 3 ranks" in crash for crash in crashes)
    assert all("rank 1 of 2" in crash for crash in crashes)
    (alone,) = ended(trials.Team([Child(lambda say: trials.train(say, str(folder)))]))
    assert "Start as many ranks as the run had" in alone["crash"]
    shutil.rmtree(folder / "infinity-run" / "rank1")
    crashes = [one["crash"] for one in ended(trials.together(str(folder), RANKS))]
    assert all("no step in common: rank 0: step 3, step 2; rank 1: none" in crash for crash in crashes)

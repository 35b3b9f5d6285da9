"""Durable runs where the machine gives little: few descriptors, no locked memory, full and read-only disks.

Limits are set in forked children. A full disk is a small tmpfs, where root may mount one.
"""

import contextlib
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import fragile
import infinity
import trials
from children import ended
from infinity import ConfigError
from infinity.aio import IoError, StorageFullError
from infinity.durable.folder import RunFolder
from infinity.storage.generations import TwinStore
from mounts import device, ground, mounted, root, run
from places import SUPPORT
from seccomp_run import refuse
from trials import NAMED

pytestmark = [pytest.mark.disk, pytest.mark.multi, pytest.mark.timeout(400)]


def limited(what, least, folder, **settings):
    def work(say):
        resource.setrlimit(what, (least, least))
        trials.train(say, str(folder), 3, **settings)

    return work


@pytest.mark.parametrize("aio", ["io_uring", "threads", "buffered"])
@pytest.mark.parametrize("what", [resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK], ids=["files", "memlock"])
def test_64_descriptors_and_64_kib_of_locked_memory_are_enough(folder, aio, what):
    said = ended(limited(what, 64 if what == resource.RLIMIT_NOFILE else 64 << 10, folder, aio=aio))
    assert said["committed"] == 3, said


def test_too_few_descriptors_are_an_error_with_a_cure_and_the_run_stays(folder):
    def few(say):
        torch.set_num_threads(1)
        run = fragile.Run(folder)
        run.train(2)
        infinity.commit(run.model)
        run.kill()
        here = len(list(Path("/proc/self/fd").iterdir()))
        enough = here + 48
        for more in range(8):
            resource.setrlimit(resource.RLIMIT_NOFILE, (here + more, enough))
            with contextlib.suppress(OSError, ConfigError):
                fragile.Run(folder).kill()
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, enough))
        say(first=fragile.Run(folder).first)

    assert ended(few).get("first") == 2


@root
def test_a_disk_without_room_for_two_generations_is_named_with_the_numbers_before_training(folder):
    with mounted(folder, "-t", "tmpfs", "-o", "size=400k", "tmpfs"):
        with pytest.raises(StorageFullError) as caught:
            fragile.Run(folder)
        for part in ("allocating", "B free", "for: ", "allocated so far"):
            assert part in str(caught.value)
        caught = None
        gc.collect()
        assert list((folder / "infinity-run" / "rank0").iterdir()) == []


@root
def test_a_disk_that_becomes_read_only_stops_the_run_by_name_and_loses_no_commit(folder):
    def work(say):
        torch.set_num_threads(1)
        with device(folder, 64 << 20) as name:
            run("mkfs.ext4", "-q", name)
            with mounted(folder / "place", name) as place:
                training = fragile.Run(place)
                training.train(3)
                infinity.commit(training.model)
                run("mount", "-o", "remount,abort", place)
                try:
                    training.train(20)
                except NAMED as error:
                    say(refused=f"{type(error).__name__}: {error}")
                training.kill()
            with mounted(folder / "place", name) as place:
                again = fragile.Run(place)
                say(first=again.first)
                again.kill()

    said = ended(work)
    assert said.get("first", 0) >= 3, said
    assert "infinity-run" in said["refused"]


def test_a_folder_that_cannot_be_written_is_refused_by_name(folder):
    place = folder / "place"
    place.mkdir(mode=0o500)
    if os.geteuid() == 0:
        os.chown(place, 65534, 65534)
        folder.chmod(0o755)

    def work(say):
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        with pytest.raises(PermissionError) as caught:
            RunFolder(str(place))
        say(refused=str(caught.value))

    assert "infinity-run" in ended(work)["refused"]


def test_a_forked_worker_neither_holds_the_lock_nor_disturbs_the_run(folder):
    run = fragile.Run(folder)
    run.train(2)
    data = torch.utils.data.DataLoader(list(range(8)), num_workers=2, multiprocessing_context="fork")
    seen = [int(one) for one in data]
    assert seen == list(range(8))
    workers = iter(data)
    next(workers)
    run.train(4)
    infinity.commit(run.model)
    run.kill()
    run = fragile.Run(folder)
    assert run.first == 4
    del workers


def test_an_interpreter_that_ends_in_the_middle_leaves_a_run_to_go_on_with(folder):
    code = f"""
        import sys; sys.path.insert(0, {str(SUPPORT)!r})
        import torch; torch.set_num_threads(1)
        import fragile
        run = fragile.Run({str(folder)!r})
        run.train(3)
        run.model(run.loader.next(), seldom=False).backward()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    assert fragile.Run(folder).first in (2, 3)  # step 3 was on its way


# Grounds and disturbances on which the bits are those of an undisturbed run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return trials.plain({}, str(tmp_path_factory.mktemp("undisturbed")))


def same_bits(place, undisturbed, disturb=lambda: None):
    """Train, be killed, resume, all of it disturbed: to the bits of a run that was not."""

    def work(say, steps):
        disturb()
        trials.train(say, str(place), steps)

    first = ended(lambda say: work(say, 3))
    second = ended(lambda say: work(say, trials.STEPS))
    assert (first.get("committed"), second.get("first")) == (3, 3), (first, second)
    assert second["digest"] == undisturbed["digest"]


@root
@pytest.mark.parametrize("kind", ["tmpfs", "overlay", "4 KiB sectors", "xfs"])
def test_on_every_ground_a_run_goes_on_with_the_same_bits(folder, undisturbed, kind):
    with ground(kind, folder) as place:
        same_bits(place, undisturbed)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_where_io_uring_is_refused_a_run_goes_on_with_the_same_bits(folder, undisturbed, number):
    same_bits(folder, undisturbed, lambda: refuse(number))


def test_signals_in_the_middle_of_every_wait_change_nothing(folder, undisturbed):
    caught = []

    def disturb():
        signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)

    same_bits(folder, undisturbed, disturb)


def test_a_wall_clock_that_jumps_by_years_changes_nothing(folder, undisturbed):
    jumps = iter(range(10**9))

    def disturb():
        time.time = lambda: (-1) ** (jump := next(jumps)) * 1e9 * jump

    same_bits(folder, undisturbed, disturb)


@root
def test_a_real_quota_that_a_run_reaches_is_named_and_once_raised_the_run_goes_on(folder, undisturbed):
    """On btrfs, which writes nothing where it was: there a run can reach its quota after its first step."""

    def work(say):
        torch.set_num_threads(1)
        with ground("btrfs", folder) as place:
            run("btrfs", "quota", "enable", place)
            training = fragile.Run(place)
            training.train(2)
            infinity.commit(training.model)
            run("btrfs", "qgroup", "limit", "1M", place)
            try:
                training.train(20)
            except NAMED as error:
                say(refused=f"{type(error).__name__}: {error}")
            training.kill()
            run("btrfs", "qgroup", "limit", "none", place)
            trials.train(say, str(place))

    said = ended(work)
    assert said["refused"].startswith("IoError"), said
    for part in ("Disk quota exceeded", "raise the quota", "infinity-run"):
        assert part in said["refused"]
    assert (said["first"] >= 2, said["digest"]) == (True, undisturbed["digest"])


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_why_a_commit_could_not_be_written_is_what_the_training_says(folder, undisturbed, update):
    def work(say):
        torch.set_num_threads(1)
        training = fragile.Run(folder, update=update)
        training.train(2)
        infinity.commit(training.model)
        room, fail = RunFolder.write_slot, TwinStore.fail

        def fail_slowly(store, error):
            fail(store, error)
            time.sleep(0.2)  # the lane, woken, goes first

        RunFolder.write_slot, TwinStore.fail = no_room, fail_slowly
        try:
            training.train(20)
        except NAMED as error:
            say(refused=f"{type(error).__name__}: {error}")
        training.kill()
        RunFolder.write_slot, TwinStore.fail = room, fail
        trials.train(say, str(folder), update=update)

    said = ended(work)
    assert said["refused"].startswith("IoError: write of a commit: No space left on device"), said
    assert (said["first"], said["digest"]) == (2, undisturbed["digest"])


def no_room(_folder, _number, data):
    """Write nothing, late: everybody waits for this commit."""
    time.sleep(0.2)
    raise IoError.of_request(
        errno.ENOSPC, "write", "commit-0", offset=0, nbytes=len(data), failed_at=0, what="a commit"
    )


def test_a_quota_that_is_used_up_is_named_and_the_run_goes_on_later(folder, undisturbed):
    def work(say):
        trials.with_fault(60, -errno.EDQUOT, str(folder), {})(say)

    said = ended(work)
    assert said["end"] == IoError.__name__, said
    for part in ("Disk quota exceeded", "raise the quota", "infinity-run"):
        assert part in said["message"]
    assert not said["leaked"]
    again = ended(lambda say: trials.train(say, str(folder)))
    assert (again["first"] >= (said["committed"] or 0), again["digest"]) == (True, undisturbed["digest"])

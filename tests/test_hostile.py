"""Durable runs where the machine gives little: few descriptors, no locked memory, full and read-only disks.

Limits are set in forked children. A full disk is a small tmpfs, where root may mount one.
"""

import contextlib
import gc
import os
import resource
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
from infinity import ConfigError
from infinity.aio import StorageFullError
from infinity.runfolder import RunFolder
from trials import Child

pytestmark = [pytest.mark.disk, pytest.mark.multi, pytest.mark.timeout(120)]
MOUNT, UMOUNT, MKFS = "/bin/mount", "/bin/umount", "/sbin/mkfs.ext4"
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")


def ended(work):
    """What a forked child said, by key."""
    child = Child(work)
    while not child.over():
        time.sleep(0.01)
    return {key: value for line in child.said for key, value in line.items()}


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


@contextlib.contextmanager
def mounted(folder, *options):
    subprocess.run([MOUNT, *options, str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run([UMOUNT, "-l", str(folder)], check=True)


@root
def test_a_disk_without_room_for_two_generations_is_named_with_the_numbers_before_training(folder):
    with mounted(folder, "-t", "tmpfs", "-o", "size=400k,mode=700", "tmpfs"):
        with pytest.raises(StorageFullError) as caught:
            fragile.Run(folder)
        for part in ("allocating", "B free", "for: ", "allocated so far"):
            assert part in str(caught.value)
        caught = None
        gc.collect()
        assert list((folder / "infinity-run" / "rank0").iterdir()) == []


@root
def test_a_disk_that_becomes_read_only_stops_the_run_by_name_and_loses_no_commit(folder):
    image, place = folder / "image", folder / "place"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run([MKFS, "-q", image], check=True)

    def work(say):
        with mounted(place, "-o", "loop", str(image)):
            place.chmod(0o700)
            torch.set_num_threads(1)
            run = fragile.Run(place)
            run.train(3)
            infinity.commit(run.model)
            subprocess.run([MOUNT, "-o", "remount,ro", str(place)], check=False, capture_output=True)
            try:
                run.train(20)
                say(refused="no")
            except Exception as error:  # noqa: BLE001
                say(refused=f"{type(error).__name__}: {error}")
            run.kill()
            subprocess.run([MOUNT, "-o", "remount,rw", str(place)], check=False, capture_output=True)
            again = fragile.Run(place)
            say(first=again.first)
            again.kill()

    said = ended(work)
    assert said.get("first", 0) >= 3, said


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
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
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

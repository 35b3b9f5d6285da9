"""`infinity doctor` says what is there. Trusted: the machine; what it lacks is asked for or faked by name."""

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from infinity import __main__ as cli
from infinity.cli import doctor
from infinity.storage import disk_speed as disk
from places import SUPPORT

pytestmark = pytest.mark.disk


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.delenv("INFINITY_AIO", raising=False)


def found(folder: Path | str, *, measure=False) -> dict[str, doctor.Finding]:
    examination = doctor.examine(str(folder), measure=measure)
    return {finding.subject: finding for finding in examination.findings}


def test_it_names_the_engine_and_leaves_nothing_behind(folder, capsys):
    assert cli.main(["doctor", "--nvme", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "training can run here" in printed
    for subject in ("I/O engine", "O_DIRECT", "memlock limit", "free space", "CPU", "memory", "torch"):
        assert subject in printed
    assert any(kind in printed for kind in ("io_uring: ", "threads: ", "buffered: "))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["threads", "buffered"])
def test_an_engine_that_was_forced_is_said_to_be(folder, capsys, monkeypatch, kind):
    monkeypatch.setenv("INFINITY_AIO", kind)
    assert cli.main(["doctor", "--nvme", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert f"{kind}: asked for by INFINITY_AIO" in printed
    assert "unset INFINITY_AIO" in printed


def test_an_unknown_engine_is_fatal_with_its_cure(folder, monkeypatch):
    monkeypatch.setenv("INFINITY_AIO", "magic")
    engine = found(folder)["I/O engine"]
    assert engine.fatal
    assert "magic" in engine.found
    assert engine.fix == "unset INFINITY_AIO"


@pytest.mark.parametrize("kind", ["file", "missing"])
def test_a_folder_that_cannot_be_used_ends_with_one(folder, capsys, kind):
    path = folder / kind
    if kind == "file":
        path.touch()
    assert cli.main(["doctor", "--nvme", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "training cannot run here" in printed
    assert kind in printed


def test_io_uring_refused_is_found_with_its_cause_and_cure(folder):
    refuse = [sys.executable, str(SUPPORT / "seccomp_run.py"), "EPERM"]
    command = [*refuse, sys.executable, "-m", "infinity", "doctor", "--nvme", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "threads: io_uring does not work here" in done.stdout
    assert "kernel.io_uring_disabled=0" in done.stdout


def test_a_filesystem_without_direct_io_is_named_with_advice(folder, monkeypatch):
    def refuse(path, kind=None):
        raise doctor.aio.EngineUnavailableError.of_kind("threads", errno.EINVAL, "trying it", str(path))

    monkeypatch.setattr(doctor.aio, "open_engine", refuse)
    assert "ext4" in found(folder)["O_DIRECT"].fix


@pytest.mark.parametrize(
    ("release", "limit", "said", "fix"),
    [
        ("6.1.0-18-amd64", 64 << 10, "64.0 KiB: enough", ""),
        ("5.12.0", 64 << 10, "64.0 KiB: enough", ""),
        ("5.10.0-28", 64 << 10, "64.0 KiB: io_uring's rings count", "ulimit -l unlimited"),
        ("5.4.0", 8 << 20, "8.0 MiB: io_uring's rings count", ""),
        ("5.4.0", resource.RLIM_INFINITY, "none", ""),
    ],
)
def test_the_memlock_limit_matters_where_the_kernel_counts_rings_against_it(
    folder, monkeypatch, release, limit, said, fix
):
    monkeypatch.setattr(doctor.platform, "release", lambda: release)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (limit, limit))
    told = found(folder)["memlock limit"]
    assert told.found.startswith(said)
    assert told.fix == fix


@pytest.mark.parametrize(("path", "fix"), [("/usr/bin/fio", ""), (None, "apt install fio")])
def test_fio_is_looked_for_and_training_does_not_need_it(folder, monkeypatch, path, fix):
    monkeypatch.setattr(doctor.shutil, "which", lambda _: path)
    told = found(folder)["fio"]
    assert (told.fix, told.fatal) == (fix, False)
    assert "infinity bench io --peer fio" in told.found


def test_a_folder_in_memory_is_no_nvme():
    if disk.filesystem(Path("/dev/shm")) != "tmpfs":  # noqa: S108
        pytest.skip("no tmpfs at /dev/shm")
    assert "it lies in memory" in found("/dev/shm")["folder"].fix  # noqa: S108


def test_free_space_is_told_in_parameters(folder, monkeypatch):
    class Status:
        f_blocks, f_bavail, f_frsize = 10**9, 12 * 10**6, 1000

    monkeypatch.setattr(doctor.os, "statvfs", lambda path: Status)
    space = found(folder)["free space"]
    assert "room for 1.0 G parameters" in space.found
    assert "667 M if gradients spill" in space.found
    assert not space.fatal
    Status.f_bavail = 0
    assert found(folder)["free space"].fatal


def test_a_speed_is_shown_once_it_was_measured(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path))
    before = found(folder)["speed"]
    assert ("not measured yet" in before.found, before.fix) == (True, "infinity doctor --measure")
    speed = disk.DiskSpeed(2.5e9, 1.25e9, 3e9, 16, 1 << 20, "io_uring", "2026-05-01")
    disk._keep(str(folder), speed)
    expected = (
        "read 2.50, write 1.25, mixed 3.00 GB/s; 16 requests of 1.0 MiB in flight; "
        "measured on 2026-05-01 with io_uring"
    )
    after = found(folder)["speed"]
    assert (after.found, after.fix) == (expected, "")


def test_it_measures_when_asked_and_says_what_hinders_it(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path))
    monkeypatch.setenv("INFINITY_AIO", "buffered")
    assert "page cache" in found(folder, measure=True)["speed"].found
    monkeypatch.delenv("INFINITY_AIO")
    monkeypatch.setattr(disk, "_TRIALS_S", 0.0)
    shown = found(folder, measure=True)["speed"].found
    assert " GB/s" in shown
    assert found(folder)["speed"].found == shown
    assert list(folder.iterdir()) == []


def test_a_disk_that_was_to_be_measured_and_is_full_is_not_well(folder, monkeypatch, capsys):
    def full(_: str) -> disk.DiskSpeed:
        raise doctor.aio.StorageFullError.of_file(errno.ENOSPC, str(folder), needed=128 << 20, free=4096)

    monkeypatch.setattr(disk, "measure", full)
    assert cli.main(["doctor", "--nvme", str(folder)]) == 0, "it was not asked to measure"
    assert "could be measured" not in capsys.readouterr().out
    assert cli.main(["doctor", "--measure", "--nvme", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "training can run here; not every disk could be measured" in printed
    assert "4096 B free" in printed


def test_each_of_several_folders_has_its_rows_and_one_drive_is_warned_of(folder, capsys):
    for name in "ab":
        (folder / name).mkdir()
    examination = doctor.examine([str(folder / "a"), str(folder / "b"), str(folder / "missing")])
    firsts = [group[0] for group in examination.groups]
    assert [first.subject for first in firsts] == ["folder", "folder", "folder", "striping", "kernel"]
    assert [first.fatal for first in firsts] == [False, False, True, False, False]
    assert f"{folder}/a and {folder}/b lie on one filesystem" in firsts[3].found
    assert not examination.healthy
    assert "striping" not in found(folder)

"""`infinity doctor` says what is there. Trusted: the machine; what it lacks is asked for or faked by name."""

import contextlib
import errno
import os
import resource
import subprocess
import sys
import types
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
    told = found("/dev/shm")["folder"]  # noqa: S108
    assert "tmpfs: its files are in memory, so training there saves none" in told.found
    assert told.mark[0] == "warn"


def test_a_folder_of_the_kernels_stores_no_files(capsys):
    assert cli.main(["doctor", "--nvme", "/proc"]) == 1
    (told,) = doctor.examine("/proc").groups[0]
    assert told.found == "nvme='/proc' is the kernel's (proc): it stores no files"
    assert (told.fatal, told.fix) == (True, "Name a folder on an NVMe drive.")


def test_a_missing_folder_is_named_with_its_cure_beside_it(folder):
    told = found(folder / "missing")["folder"]
    assert told.found == f"nvme='{folder}/missing': there is no such folder"
    assert told.fix.startswith("Create it (mkdir -p)")


def test_each_finding_is_a_row_of_80_columns_with_its_cure_on_a_line_of_its_own(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    assert cli.main(["doctor", "--nvme", str(folder)]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("infinity doctor")
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in title, "colours are for terminals"
    rows = [line for line in lines if line.startswith(("ok ", "warn ", "FAIL "))]
    subjects = [one.subject for one in doctor.examine(str(folder)).findings]
    assert [row[6 : 6 + len(one)] for row, one in zip(rows, subjects, strict=True)] == subjects
    (cure,) = [line for line in lines if "apt install fio" in line]
    assert cure.strip() == "-> apt install fio"


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_are_shown_on_a_terminal_unless_no_color_is_set(folder, no_color, coloured):
    ours, theirs = os.openpty()
    environment = {**os.environ, "NO_COLOR": no_color, "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "infinity", "doctor", "--nvme", "/proc"]
    subprocess.run(command, stdout=theirs, env=environment, check=False)
    os.close(theirs)
    printed = b""
    with contextlib.suppress(OSError):  # the end of what was written
        while part := os.read(ours, 1 << 16):
            printed += part
    os.close(ours)
    assert b"stores no files" in printed
    assert (b"\x1b[31m" in printed) is coloured


@pytest.mark.parametrize(
    ("flags", "warned"), [("sse4_2 avx2", True), ("avx2 avx512f", False), ("avx2 amx_bf16", False)]
)
def test_a_cpu_that_emulates_bf16_products_is_told_to_train_in_fp32(
    folder, monkeypatch, tmp_path, flags, warned
):
    info = tmp_path / "cpuinfo"
    info.write_text(f"model name\t: A CPU\nflags\t\t: {flags}\n")
    monkeypatch.setattr(doctor, "_CPUINFO", info)
    told = found(folder)
    assert "A CPU, " in told["CPU"].found
    assert ("bf16 on this CPU" in told) is warned
    if warned:
        assert 'dtype="fp32"' in told["bf16 on this CPU"].fix


@pytest.mark.parametrize(("cuda", "fix"), [("None", "install torch for CUDA"), ("'12.8'", "")])
def test_a_gpu_that_torch_was_not_built_for_is_named(folder, monkeypatch, tmp_path, cuda, fix):
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    monkeypatch.setattr(doctor, "_GPUS", tmp_path / "gpus")
    (tmp_path / "version.py").write_text(f"__version__ = '2.9'\ncuda: Optional[str] = {cuda}\n")
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: spec)
    told = found(folder)
    assert "NVIDIA H200" in told["torch"].found
    assert told["torch"].fix.startswith(fix)
    assert bool(told["torch"].fix) is bool(fix)
    assert "bf16 on this CPU" not in told or fix


def test_it_says_whether_ranks_share_memory_here_or_why_not(folder, monkeypatch):
    assert found(folder)["several ranks"].found == "share memory by themselves, where the CPU computes"
    monkeypatch.setattr(doctor, "why_not_by_itself", lambda: "RLIMIT_AS=9")
    assert found(folder)["several ranks"].found == "share no memory here: RLIMIT_AS=9"
    monkeypatch.setattr(doctor, "why_not_here", lambda: "PermissionError: no sockets")
    assert found(folder)["several ranks"].found == "share no memory here: PermissionError: no sockets"


def test_few_open_files_are_warned_of(folder, monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 256))
    told = found(folder)["open files limit"]
    assert (told.found, told.fix) == ("256 at once", "ulimit -n 1024")


def test_a_models_needs_are_compared_with_space_and_memory(folder, monkeypatch, capsys):
    assert cli.main(["doctor", "--nvme", str(folder), "--model", "1m"]) == 0
    printed = capsys.readouterr().out
    assert "1m, 1 M parameters: 10.5 MiB of state, 15.8 MiB if gradients spill; that fits" in printed
    assert "model in memory" in printed
    monkeypatch.setattr(doctor, "_free_nbytes", lambda _: 12 << 20)
    assert "free 3.8 MiB" in found_for("1m", folder)["model on NVMe"].fix
    monkeypatch.setattr(doctor, "_free_nbytes", lambda _: 9 << 20)
    assert found_for("1m", folder)["model on NVMe"].fatal
    monkeypatch.setattr(doctor, "available_nbytes", lambda: 200 << 10)
    assert "set host_memory to" in found_for("1m", folder)["model in memory"].fix


def found_for(model: str, folder: Path) -> dict[str, doctor.Finding]:
    examination = doctor.examine(str(folder), model=lambda: cli._outline_of(model))
    return {finding.subject: finding for finding in examination.findings}


def test_a_model_that_is_not_there_is_named(capsys):
    assert cli.main(["doctor", "--model", "8q"]) == 1
    assert "8q" in capsys.readouterr().err


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
    assert "not measured;" in before.found
    assert before.fix == f"infinity doctor --measure --nvme {folder}"
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
    printed = " ".join(capsys.readouterr().out.split())
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

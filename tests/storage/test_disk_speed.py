"""The measurement of a disk and its cache. Trusts the clock and the disk; how fast it is does not matter."""

import contextlib
import errno
import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from infinity import aio
from infinity.aio.measure import MIXED
from infinity.errors import UnsupportedError
from infinity.storage import disk_speed as disk

pytestmark = pytest.mark.disk

SPEED = disk.DiskSpeed(1e9, 2e9, 2.5e9, 16, 1 << 18, "threads", "2026-05-01")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Measuring is on, and short; nothing is cached yet."""
    place = tmp_path / "cache" / "infinity"
    monkeypatch.setenv("INFINITY_CACHE", str(place))
    monkeypatch.delenv("INFINITY_MEASURE")
    monkeypatch.delenv("INFINITY_AIO", raising=False)
    for name in ("_FILL_S", "_TRIAL_S", "_ALONE_S", "_BESIDE_S"):
        monkeypatch.setattr(disk, name, 0.01)
    monkeypatch.setattr(disk, "_FILE_NBYTES", 32 << 20)
    return place


def available(folder, kind):
    try:
        aio.open_engine(folder, kind).close()
    except aio.EngineUnavailableError as error:
        pytest.skip(str(error))


# Measuring


@pytest.mark.parametrize("kind", ["io_uring", "threads"])
def test_a_measurement_is_kept_for_all_folders_of_the_filesystem_and_leaves_no_file(folder, kind):
    available(folder, kind)
    (folder / "below").mkdir()
    speed = disk.measure(str(folder), kind)
    assert min(speed.read, speed.write, speed.mixed, speed.beside) > 0
    assert speed.taken > 0
    assert speed.engine == kind
    assert (speed.piece_nbytes, speed.depth) in disk._CHOICES[kind]
    assert disk.measured(str(folder / "below"), kind) == speed
    assert [path.name for path in folder.iterdir()] == ["below"]


def test_a_start_measures_once(folder, monkeypatch):
    first = disk.speed_of(str(folder))
    monkeypatch.setattr(disk, "_measure", lambda *_: pytest.fail("measured again"))
    assert disk.speed_of(str(folder)) == first
    assert first.mixed > 0


def test_measuring_again_replaces_what_was_kept(folder):
    disk._keep(str(folder), SPEED)
    assert disk.measure(str(folder), "threads") != SPEED
    assert disk.measured(str(folder), "threads") != SPEED


def test_a_speed_of_another_day_is_measured_anew_and_one_of_today_is_kept(folder, monkeypatch):
    monkeypatch.setenv("INFINITY_AIO", "threads")
    disk._keep(str(folder), SPEED)
    anew = disk.speed_today(str(folder))
    assert (anew.date, anew.engine) == (disk.today(), "threads")
    assert anew != SPEED
    assert disk.speed_today(str(folder)) == disk.measured(str(folder)) == anew


def test_a_speed_of_another_day_stays_where_nothing_is_to_be_measured_or_can_be(folder, monkeypatch, caplog):
    monkeypatch.setenv("INFINITY_AIO", "threads")
    disk._keep(str(folder), SPEED)
    monkeypatch.setattr(disk, "_room", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no room")))
    assert disk.speed_today(str(folder)) == SPEED
    assert "no room" in caplog.text
    assert SPEED.date in caplog.text
    monkeypatch.setenv("INFINITY_MEASURE", "0")
    monkeypatch.setattr(disk, "_measure", lambda *_: pytest.fail("measured"))
    assert disk.speed_today(str(folder)) == SPEED


def test_mixed_means_reads_and_writes_half_and_half(folder):
    memory = aio.AlignedMemory(4 * disk._REQUEST_NBYTES)
    with aio.open_engine(folder) as engine, engine.open_nameless(folder) as file:
        file.allocate(0, 32 << 20)
        before = engine.statistics()
        moved, _ = disk._move(engine, file, memory, MIXED, 32 << 20, 60.0, 96 << 20)
        after = engine.statistics()
    assert moved == 96 << 20
    assert after.bytes_read - before.bytes_read == after.bytes_written - before.bytes_written == 48 << 20


def test_of_equal_rates_the_one_with_least_in_flight_is_taken_and_of_these_the_largest_pieces():
    rates = {(32, 1 << 20): 2.00e9, (16, 1 << 20): 1.96e9, (8, 4 << 20): 2.02e9, (8, 1 << 20): 1.5e9}
    assert disk.best(rates) == (1.96e9, 16, 1 << 20)
    assert disk.best({**rates, (64, 1 << 18): 1.96e9}) == (1.96e9, 16, 1 << 20)


def test_as_much_is_in_flight_as_a_busy_core_may_leave_the_drive_alone_for():
    rates = {(8, 1 << 19): 3.1e9, (16, 1 << 20): 3.0e9, (32, 1 << 19): 3.0e9, (32, 1 << 20): 2.8e9}
    assert disk.best(rates) == (3.0e9, 16, 1 << 20)
    fast = {(8, 1 << 19): 7.1e9, (16, 1 << 20): 7.0e9}
    assert disk.best(fast) == (7.0e9, 16, 1 << 20)  # nothing was measured that covers more
    slow = {(8, 1 << 19): 0.2e9, (32, 1 << 20): 0.2e9}
    assert disk.best(slow) == (0.2e9, 8, 1 << 19)


def test_the_mix_is_measured_once_more_while_every_core_computes(folder, monkeypatch):
    def busy():
        return [one for one in threading.enumerate() if one.name == "infinity-computing"]

    seen = []
    real = disk._move

    def noting(engine, *rest):
        seen.append(len(busy()))
        return real(engine, *rest)

    monkeypatch.setattr(disk, "_move", noting)
    disk.measure(str(folder))
    cores = len(os.sched_getaffinity(0))
    assert set(seen[:-1]) == {0}
    assert seen[-1] == cores
    assert not busy()


def test_what_computes_beside_is_no_part_of_what_the_drive_takes_of_the_cores(folder, monkeypatch):
    with disk._computing() as computed_s:
        assert not computed_s
    assert len(computed_s) == len(os.sched_getaffinity(0))
    others_s, moved = iter([1.0, 4.0]), []
    real = disk._move
    monkeypatch.setattr(disk, "_move", lambda *given: moved.append(real(*given)) or moved[-1])
    monkeypatch.setattr(disk, "_others_s", lambda: next(others_s))
    monkeypatch.setattr(disk, "_computing", lambda: contextlib.nullcontext([1.0, 1.5]))
    speed = disk.measure(str(folder))
    assert speed.taken == pytest.approx(0.5 / moved[-1][0])


def test_a_disk_that_was_measured_otherwise_before_is_measured_anew(folder, cache):
    disk._keep(str(folder), SPEED)
    assert disk.measured(str(folder)) == SPEED
    (cache / disk._CACHE).rename(cache / "disks.json")
    assert disk.measured(str(folder)) is None


# What hinders it


class Full:
    f_blocks, f_bavail, f_frsize = 10**6, 100, 4096


@pytest.fixture
def full(monkeypatch):
    monkeypatch.setattr(disk.os, "statvfs", lambda _: Full)


@pytest.mark.usefixtures("full")
def test_too_little_room_is_an_error_with_the_numbers(folder):
    with pytest.raises(aio.StorageFullError, match=str(folder)) as caught:
        disk.measure(str(folder))
    assert (caught.value.needed, caught.value.free) == (128 << 20, 409600)


@pytest.mark.usefixtures("full")
def test_a_start_goes_on_with_defaults_where_measuring_fails_and_says_why(folder, caplog):
    with caplog.at_level(logging.WARNING, "infinity"):
        speed = disk.speed_of(str(folder), "threads")
    assert speed == disk.DiskSpeed(0, 0, 0, 8, 1 << 20, "threads", "")
    assert "No space left" in caplog.text
    assert "8 requests of 1.0 MiB" in caplog.text


def test_a_folder_that_is_not_there_is_named(folder, caplog):
    missing = str(folder / "missing")
    with pytest.raises(FileNotFoundError, match="missing"):
        disk.measure(missing)
    assert disk.measured(missing) is None
    assert disk.speed_of(missing).mixed == 0
    assert "missing" in caplog.text


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_an_engine_that_was_named_and_does_not_work_is_refused_once(folder, monkeypatch, caplog, by):
    def refusing(folder, kind=None, **settings):
        raise aio.EngineUnavailableError.of_kind("io_uring", errno.EPERM, "starting it", folder)

    monkeypatch.setattr(aio, "open_engine", refusing)
    monkeypatch.setenv("INFINITY_AIO", "io_uring" if by == "environment" else "")
    with pytest.raises(aio.EngineUnavailableError, match="io_uring"):
        disk.speed_of(str(folder), "io_uring" if by == "argument" else None)
    assert caplog.text == ""
    monkeypatch.setenv("INFINITY_AIO", "")
    assert disk.speed_of(str(folder)).mixed == 0
    assert "io_uring" in caplog.text


def test_the_page_cache_is_not_measured(folder, caplog):
    with pytest.raises(UnsupportedError, match="page cache"):
        disk.measure(str(folder), "buffered")
    assert disk.speed_of(str(folder), "buffered") == disk.default_speed("buffered")
    assert caplog.text == ""


def test_measuring_at_start_can_be_switched_off_and_the_cache_is_read_all_the_same(
    folder, monkeypatch, caplog
):
    monkeypatch.setenv("INFINITY_MEASURE", "0")
    assert disk.speed_of(str(folder), "threads") == disk.default_speed("threads")
    disk._keep(str(folder), SPEED)
    assert disk.speed_of(str(folder), "threads") == SPEED
    assert caplog.text == ""


# The cache


def test_each_engine_has_its_own_entry_and_the_best_one_is_shown(folder, monkeypatch):
    disk._keep(str(folder), SPEED)
    assert disk.measured(str(folder), "io_uring") is None
    assert disk.measured(str(folder)) == SPEED
    ring = disk.DiskSpeed(1e9, 2e9, 3e9, 32, 1 << 20, "io_uring", "2026-05-02")
    disk._keep(str(folder), ring)
    assert disk.measured(str(folder)) == ring
    monkeypatch.setenv("INFINITY_AIO", "threads")
    assert disk.measured(str(folder)) == SPEED


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"nonsense",
        b"[1, 2]",
        b"[" * 100_000,
        b'{"KEY": 1}',
        b'{"KEY": {"read": 1}}',
        *(
            json.dumps({"KEY": {**disk.asdict(SPEED), name: value}}).encode()
            for name, value in [
                ("read", float("nan")),
                ("mixed", -1),
                ("write", "fast"),
                ("depth", 0),
                ("depth", 8.5),
                ("depth", 10**6),
                ("piece_nbytes", 1000),
                ("piece_nbytes", None),
                ("engine", "magic"),
                ("date", 7),
                ("colour", "red"),
            ]
        ),
    ],
)
def test_a_damaged_cache_counts_as_empty_and_is_replaced(folder, cache, content):
    key = f"{disk._identity(str(folder))} threads"
    cache.mkdir(parents=True)
    (cache / disk._CACHE).write_bytes(content.replace(b"KEY", key.encode()))
    assert disk.measured(str(folder), "threads") is None
    disk._keep(str(folder), SPEED)
    assert disk.measured(str(folder), "threads") == SPEED
    assert [path.name for path in cache.iterdir()] == [disk._CACHE]


def test_a_cache_that_cannot_be_written_is_logged_and_no_more(folder, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "file" / "below"))
    assert disk.speed_of(str(folder)).mixed > 0
    assert "could not be cached for the next start" in caplog.text


def test_the_cache_is_where_such_files_belong(monkeypatch, tmp_path):
    monkeypatch.delenv("INFINITY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk.cache_folder() == tmp_path / "xdg" / "infinity"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk.cache_folder() == tmp_path / ".cache" / "infinity"


SECOND = """
import sys
from infinity.storage import disk_speed as disk
print("ready", flush=True)
print(disk.speed_of(sys.argv[1], "threads").date)
"""


def test_of_two_processes_that_start_one_measures_and_the_other_takes_its_result(folder):
    with disk._alone():
        command = [sys.executable, "-c", SECOND, str(folder)]
        second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert second.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(1)
        disk._keep(str(folder), SPEED)
    assert second.communicate(timeout=60)[0] == f"{SPEED.date}\n"
    assert second.returncode == 0


WRITER = """
import sys
from dataclasses import replace
from infinity.storage import disk_speed as disk
speed = disk.DiskSpeed(1, 1, 1, 16, 4096, "threads", "")
for number in range(30):
    with disk._alone():
        disk._keep(sys.argv[1], replace(speed, engine=sys.argv[2], depth=number + 1))
"""


def test_a_cache_written_by_two_processes_at_once_can_be_read_at_any_moment_and_loses_nothing(folder):
    disk._keep(str(folder), SPEED)
    commands = [[sys.executable, "-c", WRITER, str(folder), kind] for kind in ("threads", "io_uring")]
    writers = [subprocess.Popen(command) for command in commands]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        assert disk.measured(str(folder)) is not None
        seen += 1
        time.sleep(0.005)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen > 0
    assert [disk.measured(str(folder), kind).depth for kind in ("threads", "io_uring")] == [30, 30]


NOBODY = """
import os, sys
from infinity import aio; from infinity.storage import disk_speed as disk
aio.open_engine(sys.argv[2]).close()  # all is loaded now: nobody may not read this Python
if os.geteuid() == 0:  # root may write anywhere
    os.setgid(65534)
    os.setuid(65534)
try:
    disk.measure(sys.argv[1])
except OSError as error:
    print(type(error).__name__, error)
"""


def test_a_read_only_folder_is_refused(folder):
    readable = folder / "readable"
    readable.mkdir()
    folder.chmod(0o755)
    readable.chmod(0o555)
    command = [sys.executable, "-c", NOBODY, str(readable), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("EngineUnavailableError")
    assert "Permission denied" in done.stdout
    assert str(readable) in done.stdout

"""What a step is held against: the floor's arithmetic, fio's answers, bytes. Faked: the measurements.

The answer of fio is a recorded one (fio 3.33), shortened.
"""

import json
import os
import shutil
from dataclasses import replace

import pytest

from infinity import aio
from infinity.bench.aio.fio import Bandwidth, Fio, mean, rates, read_percent
from infinity.bench.engine import floor, traffic
from infinity.bench.engine.floor import Speeds
from infinity.bench.engine.runs import RunError
from measurements import DISK, RUN, SPEEDS, a_round

ANSWER = """{
  "fio version" : "fio-3.33",
  "timestamp" : 1795261757,
  "jobs" : [
    {
      "jobname" : "floor",
      "groupid" : 0,
      "error" : 0,
      "elapsed" : 2,
      "job options" : { "size" : "64m", "bs" : "1m", "iodepth" : "32", "rw" : "rw", "rwmixread" : "54" },
      "read" : { "io_bytes" : 707788800, "bw_bytes" : 684515280, "bw" : 668471, "iops" : 652.804642 },
      "write" : { "io_bytes" : 646971392, "bw_bytes" : 625697671, "bw" : 611032, "iops" : 596.711799 },
      "trim" : { "io_bytes" : 0, "bw_bytes" : 0, "bw" : 0 },
      "job_runtime" : 1034
    }
  ]
}
"""


def test_the_floor_is_the_slowest_part_of_a_step():
    terms = floor.terms(5.0, 14_000.0, 12_000.0, DISK)
    assert terms == floor.Terms(compute=5.0, read=7.0, write=4.0, mixed=16.25)
    assert (terms.floor_s, terms.binding) == (16.25, "mixed")


@pytest.mark.parametrize("part", ["compute", "read", "write", "mixed"])
def test_any_part_can_be_what_binds(part):
    parts = dict.fromkeys(("compute", "read", "write", "mixed"), 1.0) | {part: 2.0}
    assert (floor.Terms(**parts).floor_s, floor.Terms(**parts).binding) == (2.0, part)


def test_a_step_that_moves_nothing_is_bound_by_computing():
    terms = floor.terms(5.0, 0.0, 0.0, DISK)
    assert (terms.floor_s, terms.binding) == (5.0, "compute")


def test_where_the_disk_cannot_be_measured_computing_is_all_that_is_known():
    assert floor.terms(5.0, 1e12, 1e12, None) == floor.Terms(5.0, 0, 0, 0)
    assert replace(a_round(), after=Speeds()).disk is None


def test_a_round_uses_the_disk_as_it_was_around_its_run():
    slower = Speeds(replace(DISK, mixed=1000.0), replace(SPEEDS.own, mixed=1950.0))
    one = replace(a_round(seconds=20.0), after=slower)
    assert one.disk == replace(DISK, mixed=1300.0)
    assert one.terms.mixed == 20.0
    assert one.ratio == 1.0
    assert one.own_disk == replace(SPEEDS.own, mixed=2600.0)
    assert (one.own_floor_s, one.own_ratio) == (10.0, 0.5)


def test_without_fio_the_floor_is_what_our_own_engine_reached():
    ours = Speeds(own=DISK)
    one = replace(a_round(), before=ours, after=ours)
    assert one.disk == one.own_disk == DISK
    assert one.terms.floor_s == one.own_floor_s == 16.25


def test_the_mix_of_a_case_is_that_of_its_last_run_and_the_design_s_before_it():
    first, last = a_round(), a_round(read_per_parameter=3.0, written_per_parameter=1.0)
    assert floor.mix([first, last]) == 75
    assert floor.mix([]) == 54


# What measures the disk


@pytest.mark.disk
def test_without_fio_the_disk_is_measured_as_training_does(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    gauge = floor.gauge_on(folder, 64 << 20, 1)
    assert "fio is not installed" in gauge.source
    found = gauge.measure(54)
    assert found.fio is None
    assert min(found.own.read, found.own.write, found.own.mixed) > 0


@pytest.mark.disk
def test_the_page_cache_is_not_taken_for_the_disk(folder, monkeypatch):
    monkeypatch.setenv("INFINITY_AIO", "buffered")
    gauge = floor.gauge_on(folder, 1 << 30, 1)
    assert "not measured" in gauge.source
    assert gauge.measure(54) == Speeds()


def test_fio_gets_a_quarter_of_what_is_free_and_a_full_disk_is_told(fio_without_io_uring, monkeypatch):
    class Status:
        f_bavail, f_blocks, f_frsize = 60_000, 100_000, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Status)
    gauge = floor.gauge_on(fio_without_io_uring, 1 << 30, 1)
    assert gauge.source.startswith("fio in huge pages, libaio, 32 x 1.0 MiB; our engine: ")
    assert gauge.source.endswith("; O_DIRECT, the same 58.0 MiB, the run's own mix")
    assert f"--size={58 << 20}" in (fio_without_io_uring / "calls").read_text()
    Status.f_bavail = 30_000
    with pytest.raises(aio.StorageFullError, match="122880000 B free"):
        floor.gauge_on(fio_without_io_uring, 1 << 30, 1)


# fio


@pytest.mark.parametrize(
    ("read", "written", "percent"), [(14, 12, 54), (1, 1, 50), (1, 0, 99), (0, 1, 1), (0, 0, 54)]
)
def test_fio_always_mixes(read, written, percent):
    assert read_percent(read, written) == percent


def test_the_mean_of_two_measurements_is_taken_part_by_part():
    assert mean(DISK, Bandwidth(1000.0, 1000.0, 400.0)) == Bandwidth(1500.0, 2000.0, 1000.0)


def test_the_rates_of_a_recorded_answer_are_read_with_a_warning_before_them():
    assert rates("fio: this is a warning\n" + ANSWER) == (684515280.0, 625697671.0)


def test_a_failed_job_is_no_measurement():
    answer = json.loads(ANSWER)
    answer["jobs"][0]["error"] = 28
    with pytest.raises(RunError, match="errno 28"):
        rates(json.dumps(answer))


@pytest.mark.parametrize("text", ["", "fio: no space", "{}", '{"jobs": []}'])
def test_an_answer_without_a_job_is_quoted(text):
    with pytest.raises(RunError, match=r"no measurement.*it begins"):
        rates(text)


@pytest.fixture
def fio_without_io_uring(tmp_path, monkeypatch):
    """A program called fio that answers as fio does, but refuses io_uring."""
    (tmp_path / "answer.json").write_text(ANSWER)
    script = f"""#!/bin/sh
echo "$GLIBC_TUNABLES $@" >> {tmp_path}/calls
case "$*" in *--ioengine=io_uring*) echo "fio: engine io_uring not loadable" >&2; exit 1;; esac
cat {tmp_path}/answer.json
"""
    (tmp_path / "fio").write_text(script)
    (tmp_path / "fio").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_where_io_uring_is_refused_fio_uses_libaio(fio_without_io_uring):
    fio = Fio.on(fio_without_io_uring, 1 << 20, 1)
    assert fio.engine == "libaio"
    assert fio.measure(60) == Bandwidth(684515280.0, 625697671.0, 684515280.0 + 625697671.0)
    calls = (fio_without_io_uring / "calls").read_text().splitlines()
    assert [call.partition("--rw=")[2].split()[0] for call in calls] == [
        "write",
        "write",
        "read",
        "write",
        "rw",
    ]
    assert "--rwmixread=60" in calls[-1]
    assert all("--direct=1" in call and "--bs=1m" in call and "--iodepth=32" in call for call in calls)
    assert all(call.startswith("glibc.malloc.hugetlb=1 ") for call in calls)


def test_a_fio_that_works_with_no_engine_ends_with_its_words(fio_without_io_uring):
    (fio_without_io_uring / "fio").write_text("#!/bin/sh\necho no space left >&2; exit 3\n")
    with pytest.raises(RunError, match=r"(?s)libaio ended with exit code 3.*no space left"):
        Fio.on(fio_without_io_uring, 1 << 20, 1)


@pytest.mark.disk
@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_the_real_fio_measures_this_disk(folder):
    disk = Fio.on(folder, 4 << 20, 1).measure(54)
    assert min(disk.read, disk.write, disk.mixed) > 0


# Bytes


@pytest.mark.parametrize(
    ("state", "pinned", "limit"),
    [("fp32", 0, 26.5), ("bf16", 0, 18.5), ("int8", 0, 14.5), ("fp32", 0.5, 13.5), ("fp32", 1, 0.5)],
)
def test_what_a_step_may_move_shrinks_with_what_is_pinned(state, pinned, limit):
    assert traffic.limit(state, pinned) == limit


def test_a_row_takes_the_pinned_fraction_from_the_engine():
    run = replace(RUN, engine={"host_nbytes": 100, "nvme_nbytes": 300})
    row = traffic.row_of("fp32", "16MiB", run)
    assert (row.pinned, row.limit, row.bytes_per_parameter) == (0.25, 20.0, 26.0)
    assert not row.met
    assert traffic.row_of("fp32", "16MiB", replace(run, read_per_parameter=6.0)).met

"""`infinity bench io`. Trusts disk and clock: how fast they are does not matter. A fake stands for fio."""

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from infinity import aio
from infinity.aio.measure import MIXED, READ, WRITE, RequestStream, move
from infinity.bench.aio import cells, io, libaio, peers
from infinity.bench.aio.peers import FioPeer, Libaio, Measurement, Ours, Workload
from infinity.bench.engine.runs import RunError
from infinity.errors import ConfigError
from infinity.storage import disk_speed as disk
from mounts import mounted, root
from places import SUPPORT

pytestmark = pytest.mark.disk

QUICK = ["--size", "8MiB", "--seconds", "0.01", "--rounds", "1", "--request", "1MiB", "--piece", "256KiB"]
QUICK += ["--depth", "4"]


def options_of(*arguments):
    parser = argparse.ArgumentParser()
    io.add_arguments(parser)
    return parser.parse_args([*QUICK, *map(str, arguments)])


def run(*arguments):
    """Run the command; give what it prints."""
    console = Console(width=250, file=StringIO())
    assert io.run(options_of(*arguments), console) == 0
    return console.file.getvalue()


def rows_of(*arguments, out):
    run(*arguments, "--json", out)
    return json.loads(out.read_text())


def works(folder, kind):
    try:
        aio.open_engine(folder, kind).close()
    except aio.EngineUnavailableError:
        return False
    return True


# What is measured


def test_every_cell_is_measured_once_a_round_and_nothing_is_left_behind(folder, tmp_path):
    record = rows_of("--nvme", folder, "--rounds", 2, "--depth", 2, 4, out=tmp_path / "io.json")
    engines = [kind for kind in ("io_uring", "threads") if works(folder, kind)]
    keys = [(row["verb"], row["engine"], row["depth"]) for row in record["rows"]]
    assert sorted(keys) == sorted((v, e, d) for v in (READ, WRITE, MIXED) for e in engines for d in (2, 4))
    for row in record["rows"]:
        assert row["bytes_per_s"] > 0
        assert row["cpu_s_per_gb"] >= 0
        assert 0 < row["p50_s"] <= row["p95_s"] <= row["p99_s"] <= row["p99.9_s"]
        assert len(row["rounds"]) == 2
    assert list(folder.iterdir()) == []


def test_every_ring_and_the_page_cache_can_be_measured(folder, tmp_path):
    names = [name for name in io.ENGINES if works(folder, name.partition(":")[0])]
    record = rows_of("--nvme", folder, "--engine", *names, "--verb", "mixed", out=tmp_path / "io.json")
    assert [row["engine"] for row in record["rows"]] == names


@pytest.mark.parametrize(
    ("request_nbytes", "piece_nbytes", "depth", "in_flight"),
    [
        (4096, 1 << 20, 1, 1),
        (4096, 4096, 300, 0),
        (12288, 8192, 3, 0),
        (1 << 20, 12288, 7, 2),
        (4 << 20, 1 << 30, 1, 0),
        (36864, 4096, 4096, 5),
    ],
)
def test_any_size_and_depth_works_for_ours_and_for_libaio(
    folder, tmp_path, request_nbytes, piece_nbytes, depth, in_flight
):
    numbers = ["--request", request_nbytes, "--piece", piece_nbytes, "--depth", depth]
    record = rows_of(
        *("--nvme", folder, *numbers, "--in-flight", in_flight, "--peer", "libaio"), out=tmp_path / "io.json"
    )
    assert {row["engine"] for row in record["rows"]} >= {"threads", "libaio"}
    for row in record["rows"]:
        assert row["bytes_per_s"] > 0
        assert ("to libaio" in row) or row["engine"] != "io_uring"
        assert row["depth"] <= (256 if row["engine"] == "threads" else depth)


def test_several_folders_are_measured_each_alone_and_then_all_at_once(folder, tmp_path):
    places = [folder / "a", folder / "b"]
    for place in places:
        place.mkdir()
    nvme = [text for place in places for text in ("--nvme", place)]
    arguments = (*nvme, "--engine", "threads", "--verb", "read", "--peer", "libaio")
    record = rows_of(*arguments, out=tmp_path / "io.json")
    assert [(row["folders"], row["engine"]) for row in record["rows"]] == [
        *(("1", "threads"), ("1", "libaio"), ("2", "threads"), ("2", "libaio"), ("1+2", "threads"))
    ]
    text = run(*arguments)
    assert "folders" in text
    assert f"{places[0]} and {places[1]} lie on one filesystem" in text


def test_what_is_to_be_compared_stands_side_by_side_and_once():
    grid = {
        "verb": ["read"],
        "request": [4 << 20],
        "piece": [1 << 20, 8 << 20],
        "depth": [2],
        "in_flight": [0],
    }
    ours = [Ours("io_uring"), Ours("threads")]
    found = [(cell.mover.name, cell.work.piece_nbytes) for cell in cells.cells_of(grid, ours, [Libaio()], 1)]
    assert found == [(name, n << 20) for n in (1, 4) for name in ("io_uring", "threads", "libaio")]


def test_peers_get_what_reaches_the_kernel_from_ours():
    work = Workload("read", 4 << 20, 1 << 20, 32, 2)
    assert (work.block_nbytes, work.peers_depth) == (1 << 20, 8)  # two requests of four pieces
    assert Workload("read", 4 << 20, 1 << 20, 32, 99).peers_depth == 32
    assert Workload("read", 4096, 1 << 20, 32, 99).block_nbytes == 4096


def test_an_engine_is_never_asked_for_fewer_bytes_than_its_depth_holds():
    assert cells.requests_for(32 << 20, 4 << 20) == 24
    assert cells.requests_for(32 << 20, 64 << 20) == 2
    assert cells.requests_for(4 << 20, 4 << 20) == 3


def test_percentiles_are_requests_that_were_measured():
    assert peers.percentiles([float(n) for n in range(1000, 0, -1)]) == {
        "p50": 500.0,
        "p95": 950.0,
        "p99": 990.0,
        "p99.9": 999.0,
    }
    assert set(peers.percentiles([7.0]).values()) == {7.0}


def test_a_stream_moves_the_bytes_of_whole_requests_and_mixes_halves(folder):
    stream = RequestStream(MIXED, 1 << 20, 3)
    memory = stream.memory()
    with aio.open_engine(folder) as engine, engine.open_nameless(folder) as file:
        file.allocate(0, 8 << 20)
        before = engine.statistics()
        moved = move(engine, file, memory, stream, 8 << 20, seconds=60, at_most=20 << 20)
        after = engine.statistics()
        with pytest.raises(ValueError, match="do not fit into a file of 1048576 B"):
            move(engine, file, memory, stream, 1 << 20, seconds=1)
    assert moved.nbytes == 20 << 20
    assert len(moved.latencies_s) == 20
    assert after.bytes_read - before.bytes_read == after.bytes_written - before.bytes_written == 10 << 20


def test_memory_is_limited_however_much_is_in_flight():
    assert len(RequestStream(READ, 1 << 20, 4096).memory()) == 64 << 20
    assert len(RequestStream(READ, 100 << 20, 4096).memory()) == 100 << 20
    assert len(RequestStream(READ, 4096, 3).memory()) == 12288


# The verdicts


def samples(*rates, cpu=1.0):
    return [Measurement(rate, cpu, dict.fromkeys(peers.PERCENTILES, 0.1)) for rate in rates]


def cell(mover, depth=8):
    return cells.Cell(mover, Workload("read", 1 << 20, 1 << 20, depth, depth), (0,))


def test_the_best_cell_is_held_against_the_peers_best_round_by_round():
    found = {
        cell(Ours("io_uring")): samples(10.0, 4.0, 8.0),
        cell(Ours("io_uring"), 32): samples(1.0, 1.0, 1.0),
        cell(FioPeer("io_uring")): samples(5.0, 5.0, 5.0, cpu=2.0),
        cell(FioPeer("libaio"), 32): samples(10.0, 5.0, 8.0),
    }
    lines = list(io.verdicts_of(found))
    assert lines == [
        "≥ 0.97 of fio's best, io_uring, read: 1.00 ✓",
        "≤ 1 of the CPU time per GB of fio io_uring, io_uring, read: 0.50 ✓",
    ]
    assert io.row_of(cell(Ours("io_uring")), found)["to fio io_uring"] == 1.6
    assert "to fio libaio" not in io.row_of(cell(Ours("io_uring")), found)  # it had another depth


def test_cpu_time_is_compared_between_the_thriftiest_of_those_as_good_as_the_fastest():
    found = {
        cell(Ours("io_uring"), 8): samples(1.00, cpu=9.0),
        cell(Ours("io_uring"), 16): samples(0.96, cpu=5.0),
        cell(Ours("io_uring"), 32): samples(0.90, cpu=1.0),
    }
    assert cells.thriftiest(found, "read", "io_uring", (0,))[0].cpu_s_per_gb == 5.0
    assert cells.thriftiest(found, "write", "io_uring", (0,)) == []


# Keeping the best


def test_tune_keeps_the_best_setting_for_training(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "cache"))
    text = run("--nvme", folder, "--engine", "threads", "--depth", 2, 4, "--tune")
    speed = disk.measured(str(folder), "threads")
    assert speed.depth in {2, 4}
    assert speed.piece_nbytes == 256 << 10
    assert min(speed.read, speed.write, speed.mixed) > 0
    assert f"kept for training in {folder}, threads: {speed.depth} pieces of 256.0 KiB" in text
    assert disk.speed_of(str(folder), "threads") == speed


def test_what_would_be_kept_needs_all_three_rates(folder):
    for arguments in (["--verb", "read"], ["--engine", "buffered"]):
        with pytest.raises(ConfigError, match="--tune"):
            run("--nvme", folder, "--tune", *arguments)


def test_a_cache_that_cannot_be_written_is_told_before_anything_is_measured(folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(io, "measure", None)
    with pytest.raises(ConfigError, match=r"--tune.*below.*Set INFINITY_CACHE"):
        run("--nvme", folder, "--engine", "threads", "--tune")


# What is refused


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--request", "1000"], "--request 1000: O_DIRECT moves whole blocks of 4096 B"),
        (["--request", "0"], "--request 0"),
        (["--piece", "5000"], "--piece 5000"),
        (["--piece", "2GiB"], "--piece 2.0 GiB is more than 1.0 GiB"),
        (["--request", "8MiB"], "--request 8.0 MiB is more than 4.0 MiB.*half of it for mixed"),
        (["--depth", "0"], "--depth 0: expected a number from 1 to 4096"),
        (["--depth", "4097"], "--depth 4097"),
        (["--in-flight", "-1"], "--in-flight -1"),
        (["--rounds", "0"], "--rounds 0"),
        (["--seconds", "0"], "--seconds 0"),
        (["--json", "/dev/null"], "--json"),
    ],
)
def test_nonsense_is_refused_before_anything_is_written(folder, monkeypatch, arguments, match):
    monkeypatch.setattr(io, "opened", lambda *_: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=match):
        run("--nvme", folder, *arguments)


def test_a_file_that_would_fill_the_disk_is_refused_with_the_numbers(folder):
    (folder / "a").mkdir()
    with pytest.raises(ConfigError, match=r"--size 1\.0 TiB per folder needs 2\.0 TiB, and .* are free"):
        run("--nvme", folder, "--nvme", folder / "a", "--size", "1TiB")


def test_an_engine_that_does_not_work_is_told_and_the_others_are_measured(folder, monkeypatch):
    real = aio.open_engine

    def refusing(place, kind=None, **numbers):
        if kind == "io_uring":
            raise aio.EngineUnavailableError.of_kind(kind, errno.EPERM, "starting it", str(place))
        return real(place, kind, **numbers)

    monkeypatch.setattr(aio, "open_engine", refusing)
    text = run("--nvme", folder, "--verb", "read")
    assert "not measured: engine io_uring is not available: starting it: Operation not permitted" in text
    assert "threads" in text
    with pytest.raises(aio.EngineUnavailableError):
        run("--nvme", folder, "--engine", "io_uring", "threads")


# Peers


ANSWER = """fio: a warning
{"jobs": [{"error": 0, "usr_cpu": 1.0, "sys_cpu": 4.0, "job_runtime": 400, "mixed": {"io_bytes": 2000000000,
 "bw_bytes": 5000000000, "lat_ns": {"percentile": {"50.000000": 1000000, "95.000000": 2000000,
 "99.000000": 3000000, "99.900000": 4000000}}}}]}"""


@pytest.fixture
def fake_fio(tmp_path, monkeypatch):
    """A program called fio, which notes how it was called, looks at its file, and answers as fio does."""
    (tmp_path / "answer").write_text(ANSWER)
    script = f"""#!/bin/sh
echo "$GLIBC_TUNABLES $@" >> {tmp_path}/calls
for argument; do
case $argument in --filename=*) stat -Lc %s "${{argument#*=}}" >> {tmp_path}/sizes;; esac
done
cat {tmp_path}/answer
"""
    (tmp_path / "fio").write_text(script)
    (tmp_path / "fio").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_fio_works_on_the_same_file_with_the_same_settings(folder, fake_fio):
    record = rows_of("--nvme", folder, "--peer", "fio", "--verb", "mixed", out=fake_fio / "io.json")
    calls = (fake_fio / "calls").read_text().splitlines()
    assert (fake_fio / "sizes").read_text().split() == [str(8 << 20)] * 2
    assert [call.partition("ioengine=")[2].split()[0] for call in calls] == ["io_uring", "libaio"]
    for part in (
        "--rw=rw ",
        "--bs=262144 ",
        "--iodepth=4 ",
        "--direct=1 ",
        "--runtime=10ms ",
        "--size=8388608 ",
    ):
        assert all(part in call for call in calls), part
    assert all(call.startswith("glibc.malloc.hugetlb=1 ") for call in calls)
    (row,) = [row for row in record["rows"] if row["engine"] == "fio io_uring"]
    assert (row["bytes_per_s"], row["cpu_s_per_gb"], row["p99_s"]) == (5e9, 0.01, 0.003)
    assert any("of fio's best" in line for line in record["verdicts"])


def test_small_pages_are_for_all(folder, fake_fio, monkeypatch):
    huge = []
    real = RequestStream.memory
    monkeypatch.setattr(RequestStream, "memory", lambda self, *, huge=True: seen(huge, real(self)))

    def seen(asked, memory):
        huge.append(asked)
        return memory

    run("--nvme", folder, "--peer", "fio", "--peer", "libaio", "--verb", "read", "--small-pages")
    assert True not in huge[1:]  # the first fills the file
    assert all(call.startswith(" ") for call in (fake_fio / "calls").read_text().splitlines())


def test_a_fio_that_fails_or_is_missing_says_so(folder, fake_fio, monkeypatch):
    (fake_fio / "answer").write_text('{"jobs": [{"error": 0}]}')
    with pytest.raises(RunError, match="fio with io_uring wrote no measurement"):
        run("--nvme", folder, "--peer", "fio")
    (fake_fio / "fio").write_text("#!/bin/sh\necho no such engine >&2; exit 1\n")
    with pytest.raises(RunError, match=r"(?s)exit code 1.*no such engine"):
        run("--nvme", folder, "--peer", "fio")
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(RunError, match="apt install fio"):
        run("--nvme", folder, "--peer", "fio")
    assert list(folder.iterdir()) == []


def test_libaio_moves_the_right_bytes(folder):
    nbytes = 4 << 16  # what is in flight at once: however slow the machine, it is moved
    with peers.opened(str(folder), nbytes) as place:
        stream = RequestStream(WRITE, 1 << 16, 4)
        memory = stream.memory()
        memory.view[:] = b"w" * len(memory)
        written = libaio.move(place.direct.fd, memory, stream, nbytes, 0.05)
        assert os.pread(place.buffered.fd, nbytes, 0) == b"w" * nbytes
        stream = RequestStream(READ, 1 << 16, 4)
        memory.view[:] = bytes(len(memory))
        read = libaio.move(place.direct.fd, memory, stream, nbytes, 0.05)
        assert memory.view[:] == b"w" * len(memory)
    for moved in (written, read):
        assert moved.nbytes == len(moved.latencies_s) << 16 >= nbytes


def test_what_libaio_is_refused_or_gets_short_is_an_error(folder, monkeypatch):
    with peers.opened(str(folder), 1 << 20) as place:
        stream = RequestStream(READ, 1 << 20, 1)
        with pytest.raises(RunError, match="a request of 1048576 B returned"):
            os.ftruncate(place.direct.fd, 4096)
            libaio.move(place.direct.fd, stream.memory(), stream, 1 << 20, 0.01)
    with pytest.raises(RunError, match="io_submit failed: Bad file descriptor"):
        libaio.move(-1, stream.memory(), stream, 1 << 20, 0.01)
    with pytest.raises(RunError, match=r"io_setup failed: .*fs\.aio-max-nr"):
        many = RequestStream(READ, 4096, 1 << 24)
        libaio.call(
            "io_setup", libaio.ctypes.c_long(many.in_flight), libaio.ctypes.byref(libaio.ctypes.c_ulong(0))
        )
    monkeypatch.setattr(libaio.platform, "machine", lambda: "vax")
    with pytest.raises(RunError, match="vax"):
        libaio.call("io_setup")


def test_the_picture_shows_what_was_measured(folder, tmp_path):
    run("--nvme", folder, "--plot", tmp_path / "io.png")
    assert (tmp_path / "io.png").read_bytes().startswith(b"\x89PNG")


# Places


PROGRAM = """
import argparse, ctypes, functools, json, os, resource, sys
from rich.console import Console
from infinity.bench.aio import io
from infinity.bench.engine import runs
folder, out = sys.argv[1:3]
def run(out, *arguments):
    parser = argparse.ArgumentParser()
    io.add_arguments(parser)
    quick = ["--size", "8MiB", "--seconds", "0.01", "--rounds", "1", "--request", "1MiB", "--json", out]
    io.run(parser.parse_args(["--nvme", folder, *quick, *arguments]), Console())
"""


def program(code, *arguments, before=()):
    command = [*before, sys.executable, "-c", PROGRAM + code, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_where_io_uring_is_refused_the_rest_is_measured_fio_too(folder, fake_fio):
    refuse = [sys.executable, str(SUPPORT / "seccomp_run.py"), "EPERM"]
    out = fake_fio / "io.json"
    text = program('run(out, "--peer", "fio", "--depth", "4")', folder, out, before=refuse)
    assert "not measured: engine io_uring is not available" in text
    rows = json.loads(out.read_text())["rows"]
    assert {row["engine"] for row in rows} == {"threads", "fio libaio"}


ROOT_NO_MORE = """
run(out)  # all is imported now: nobody may not read this Python
os.chown(folder, 65534, 65534)
os.chmod(os.path.dirname(out), 0o777)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
os.setgroups([])
os.setgid(65534)
runs.version = functools.cache(runs.version)
runs.here()  # the checkout may lie in a folder that is closed to nobody
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else /proc/self stays root's
run(os.path.join(folder, "nobody.json"), "--depth", "256", "--request", "4MiB", "--peer", "libaio")
"""


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become nobody; others run the rest as themselves"
)
def test_nobody_with_8_mib_of_lockable_memory_measures_256_mib_in_flight(folder):
    with tempfile.TemporaryDirectory() as place:  # under a folder that nobody may enter
        program(ROOT_NO_MORE, folder, f"{place}/io.json")
    rows = json.loads((folder / "nobody.json").read_text())["rows"]
    kinds = {kind for kind in ("io_uring", "threads") if works(folder, kind)}
    assert {row["engine"] for row in rows} == kinds | {"libaio"}
    assert {row["depth"] for row in rows if row["engine"] != "libaio"} == {256}


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs here")  # noqa: S108
def test_a_tmpfs_is_measured(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        assert "mixed" in run("--nvme", name, "--peer", "libaio")
        assert list(Path(name).iterdir()) == []


@root
def test_a_full_filesystem_is_refused_with_its_numbers_and_stays_as_it_was(folder):
    with mounted(folder, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        with pytest.raises(ConfigError, match=r"needs 8\.0 MiB, and 4\.0 MiB are free"):
            run("--nvme", folder)
        with pytest.raises(aio.StorageFullError, match="8388608 B"), peers.opened(str(folder), 8 << 20):
            pass
        status = os.statvfs(folder)
        assert (status.f_bfree, list(folder.iterdir())) == (status.f_blocks, [])


def test_ctrl_c_ends_it_soon_and_leaves_nothing(folder, tmp_path):
    command = [sys.executable, "-u", "-c", PROGRAM + 'run(out, "--rounds", "900")', str(folder)]
    out = tmp_path / "io.json"
    with subprocess.Popen([*command, str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert b"900 rounds" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in errors
    assert (list(folder.iterdir()), out.exists()) == ([], False)

"""What needs a process of its own: signals, forks, exits, limits, and kernels that refuse io_uring.

Trusts the kernel.  The package `infinity` around aio is faked, so that these processes start without torch.
"""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity import aio
from places import SUPPORT

pytestmark = pytest.mark.disk

PREAMBLE = """
import errno, gc, os, resource, signal, sys, threading, types
infinity = types.ModuleType("infinity")
infinity.__path__ = [{package!r}]
sys.modules["infinity"] = infinity
from infinity import aio
from infinity.aio import faults
folder, kind = {folder!r}, {kind!r}
N = 1 << 16
def hold(engine, held):
    engine.library.aio_hold(engine.pointer, held)
def begin():
    engine = aio.open_engine(folder, kind, piece_nbytes=4096 * 4)
    file = engine.open_nameless(folder)
    file.allocate(0, N)
    memory = aio.AlignedMemory(N)
    memory.view[:] = b"x" * N
    return engine, file, memory
"""
PACKAGE = Path(aio.__file__).parent.parent


def command(code, folder, kind, package=PACKAGE):
    preamble = PREAMBLE.format(package=str(package), folder=str(folder), kind=kind)
    return [sys.executable, "-W", "error", "-c", preamble + code]


def run(code, folder, kind, before=()):
    process = subprocess.run(
        [*before, *command(code, folder, kind)], check=False, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(params=aio.KINDS)
def kind(request, folder):
    try:
        aio.open_engine(folder, request.param).close()
    except aio.EngineUnavailableError as error:
        pytest.skip(str(error))
    return request.param


# Signals


def interrupt(code, folder, kind):
    """Run code that says "waiting" and then waits for ever; press Ctrl-C; what it prints before it ends."""
    with subprocess.Popen(
        command(code, folder, kind), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return output


@pytest.mark.parametrize(
    "wait", ["write.wait()", "engine.drain()", "engine.wait_any([write])", "file.close()", "time.sleep(900)"]
)
def test_ctrl_c_is_noticed_and_leaves_the_request_in_flight(folder, kind, wait):
    code = f"""
import time
engine, file, memory = begin()
hold(engine, 1)
write = engine.write(file, 0, memory.address, N, owner=memory)
try:
    print("waiting", flush=True)
    {wait}
except KeyboardInterrupt:
    print("interrupted", write.done, engine.statistics().in_flight)
hold(engine, 0)
write.wait()
memory.view[:] = bytes(N)
engine.read(file, 0, memory.address, N, owner=memory).wait()
print(memory.view == b"x" * N)
"""
    assert interrupt(code, folder, kind) == "interrupted False 1\nTrue\n"


def test_the_threads_of_an_engine_take_no_signals(folder, kind):
    """One that took Ctrl-C would keep it from Python's main thread."""
    output = run(
        """
engine, file, memory = begin()
main = str(os.getpid())
for task in os.listdir("/proc/self/task"):
    if task != main:
        with open(f"/proc/self/task/{task}/status") as lines:
            status = lines.read()
        blocked = int(status.split("SigBlk:")[1].split()[0], 16)
        print(blocked >> signal.SIGINT - 1 & blocked >> signal.SIGTERM - 1 & 1)
engine.close()
""",
        folder,
        kind,
    )
    assert set(output.split()) == {"1"}


# Forks


def test_a_forked_child_gets_an_error_and_the_parent_goes_on(folder, kind):
    output = run(
        """
engine, file, memory = begin()
hold(engine, 1)
write = engine.write(file, 0, memory.address, N, owner=memory)
child = os.fork()
if child == 0:
    refused = 0
    for attempt in (
        lambda: engine.read(file, 0, memory.address, N),
        lambda: engine.open_nameless(folder),
        lambda: write.wait(),
        engine.drain,
        engine.statistics,
        lambda: engine.wait_any([write]),
    ):
        try:
            attempt()
        except aio.ForkedError:
            refused += 1
    print("refused", refused, write.done, "forked" in repr(engine), "closed" in repr(file), flush=True)
    file.close()
    engine.close()
    del write, file, engine, memory
    gc.collect()
    sys.exit(7)
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status))
hold(engine, 0)
write.wait()
memory.view[:] = bytes(N)
engine.read(file, 0, memory.address, N, owner=memory).wait()
print(memory.view == b"x" * N)
""",
        folder,
        kind,
    )
    assert output == "refused 6 False True True\nchild 7\nTrue\n"


def test_forks_at_any_moment_neither_hang_nor_disturb(folder, kind):
    output = run(
        """
engine, file, memory = begin()
stop = False
errors = []
def work():
    try:
        while not stop:
            engine.write(file, 0, memory.address, N, owner=memory).wait()
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        del engine, file, memory
        gc.collect()
        os._exit(0)
    signal.alarm(30)
    assert os.waitpid(child, 0)[1] == 0
stop = True
for thread in threads:
    thread.join()
print(errors, engine.statistics().failed)
""",
        folder,
        kind,
    )
    assert output == "[] 0\n"


def test_a_lock_held_when_a_child_is_forked_does_not_stop_it(folder, kind):
    output = run(
        """
engine, file, memory = begin()
write = engine.write(file, 0, memory.address, N, owner=memory)
while not engine.library.aio_done(write._request):
    pass
locked, leave = threading.Event(), threading.Event()
def hold_lock():
    with engine._lock:
        locked.set()
        leave.wait()
threading.Thread(target=hold_lock).start()
locked.wait()
if (child := os.fork()) == 0:
    signal.alarm(20)
    print(write.done, flush=True)
    write.wait()
    os._exit(0)
print(os.waitpid(child, 0)[1])
leave.set()
""",
        folder,
        kind,
    )
    assert output == "True\n0\n"


# Exits


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "sys.exit(0)",
        "del engine, file, memory, writes",
        "threading.Thread(target=writes[-1].wait, daemon=True).start()",
        "threading.Thread(target=engine.drain, daemon=True).start()",
        "sys.modules['builtins'].kept = (engine, writes)",
    ],
)
def test_exit_with_requests_in_flight_neither_crashes_nor_hangs(folder, kind, ending):
    run(
        f"""
engine, file, memory = begin()
hold(engine, 1)
writes = [engine.write(file, 0, memory.address, N, owner=memory) for _ in range(100)]
{ending}
""",
        folder,
        kind,
    )


# Refusals


@pytest.mark.parametrize("number", ["EPERM", "ENOSYS"])
def test_where_io_uring_is_refused_threads_are_used_and_the_reason_is_given(folder, number):
    refuse = [sys.executable, str(SUPPORT / "seccomp_run.py"), number]
    output = run(
        """
engine = aio.open_engine(folder)
print(engine.kind, engine.direct)
print(engine.reason)
try:
    aio.open_engine(folder, "io_uring")
except aio.EngineUnavailableError as error:
    print(error.errno, error.kind)
    print(error)
""",
        folder,
        None,
        before=refuse,
    )
    lines = output.splitlines()
    assert lines[0] == "threads True"
    assert re.fullmatch(
        rf"threads: io_uring does not work here \(starting it: .*\({number}\); likely cause: .*\)", lines[1]
    )
    assert lines[2].endswith(" io_uring")
    assert lines[3].startswith("engine io_uring is not available: starting it: ")
    assert "likely cause: " in output
    assert "try: " in output


def test_a_limit_on_file_sizes_is_an_error_and_kills_nobody(folder, kind):
    output = run(
        """
engine = aio.open_engine(folder, kind)
file = engine.open_nameless(folder)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, 1 << 15))
try:
    file.allocate(0, N)
except aio.StorageFullError as error:
    print(errno.errorcode[error.errno], error.needed)
memory = aio.AlignedMemory(N)
try:
    engine.write(file, 0, memory.address, N, owner=memory, what="layers.2.v").wait()
except aio.IoError as error:
    print(errno.errorcode[error.errno], error.failed_at, error.what)
""",
        folder,
        kind,
    )
    assert output == "EFBIG 65536\nEFBIG 32768 layers.2.v\n"


def test_too_few_descriptors_or_threads_are_a_clean_error(folder):
    output = run(
        """
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
used = len(os.listdir("/proc/self/fd"))
for more in range(6):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, hard))
    try:
        aio.open_engine(folder, "io_uring").close()
        print("opened")
    except OSError as error:
        print(errno.errorcode[error.errno])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(len(os.listdir("/proc/self/fd")) - used)
""",
        folder,
        None,
    )
    lines = output.split()
    assert lines[-1] == "0"
    assert set(lines[:-1]) <= {"EMFILE", "opened", "EPERM", "ENOSYS", "ENOTSUP"}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_built_without_liburing_it_works_and_says_so(folder):
    copy = folder / "package" / "aio"
    shutil.copytree(PACKAGE / "aio", copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    sources = sorted(str(path) for path in copy.glob("*.c"))
    flags = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
    subprocess.run(["cc", *flags, "-pthread", *sources, "-o", copy / "_aio.so"], check=True)  # noqa: S607
    code = """
engine, file, memory = begin()
engine.write(file, 0, memory.address, N, owner=memory).wait()
print(engine.reason)
"""
    process = subprocess.run(
        command(code, folder, None, package=copy.parent),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("threads: io_uring does not work here (starting it: Operation not supp")


def test_a_stale_library_is_refused(folder):
    copy = folder / "package" / "aio"
    shutil.copytree(PACKAGE / "aio", copy, ignore=shutil.ignore_patterns("__pycache__"))
    header = (copy / "aio.h").read_text()
    (copy / "aio.h").write_text(header.replace("uint32_t awaited;", "uint32_t awaited, another, more;"))
    process = subprocess.run(
        command("aio.open_engine(folder)", folder, None, package=copy.parent),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "built from another version of aio.h" in process.stderr

"""Memory whose pages a ring holds. Trusts the file system under `folder`; a limit is a process's own."""

import subprocess
import sys
from pathlib import Path

import pytest

from aio_cases import PIECE, open_or_skip, random_memory
from infinity import aio
from infinity.aio import faults

pytestmark = pytest.mark.disk

NBYTES = 32 * PIECE


@pytest.fixture
def engine(folder):
    with open_or_skip(folder, "io_uring") as engine:
        yield engine


@pytest.fixture
def memory(engine):
    """Memory of which the middle is registered, with all kinds of neighbours."""
    memory = random_memory(NBYTES)
    engine.register(memory.address + 8 * PIECE, 16 * PIECE, memory)
    if not engine.registered_nbytes:
        pytest.skip(engine.reason)
    return memory


def moved(engine, move, *arguments):
    """Move a request; how many of its pieces lay in registered memory."""
    before = engine.statistics().registered
    move(*arguments).wait()
    return engine.statistics().registered - before


def test_what_lies_inside_goes_without_looking_for_its_pages_and_all_bytes_are_right(engine, file, memory):
    sent = bytes(memory.view)
    assert moved(engine, engine.write, file, 0, memory.address, NBYTES) == 16
    memory.view[:] = bytes(NBYTES)
    assert moved(engine, engine.read, file, 0, memory.address, NBYTES) == 16
    assert memory.view == sent


@pytest.mark.parametrize(
    ("begin", "end", "inside"),
    [
        (8 * PIECE - aio.BLOCK, 8 * PIECE + 3 * aio.BLOCK, 0),  # across its first byte
        (24 * PIECE - aio.BLOCK, 24 * PIECE + 3 * aio.BLOCK, 0),  # across its last
        (24 * PIECE - aio.BLOCK, 24 * PIECE, 1),
        (8 * PIECE, 8 * PIECE + aio.BLOCK, 1),
        (24 * PIECE, 25 * PIECE, 0),
        (7 * PIECE, 8 * PIECE, 0),
    ],
)
def test_a_piece_that_is_not_wholly_inside_goes_the_usual_way(engine, file, memory, begin, end, inside):
    address, nbytes, sent = memory.address + begin, end - begin, bytes(memory.view[begin:end])
    assert moved(engine, engine.write, file, begin, address, nbytes) == inside
    memory.view[begin:end] = bytes(nbytes)
    assert moved(engine, engine.read, file, begin, address, nbytes) == inside
    assert memory.view[begin:end] == sent


@pytest.mark.parametrize("result", [-11, -4, aio.BLOCK, 100, faults.DELAY])
def test_what_is_cut_short_or_refused_for_now_goes_on_there(engine, file, memory, result):
    sent = bytes(memory.view)
    faults.inject(engine, 10, result)
    engine.write(file, 0, memory.address, NBYTES).wait()
    memory.view[:] = bytes(NBYTES)
    faults.inject(engine, 12, result)
    engine.read(file, 0, memory.address, NBYTES).wait()
    assert memory.view == sent
    assert engine.statistics().registered == 32


def test_an_error_there_is_told_as_any_other(engine, file, memory):
    faults.inject(engine, 1, -5)
    with pytest.raises(aio.IoError, match=r"read of layers\.3\.m: Input/output error"):
        engine.read(file, 0, memory.address + 8 * PIECE, PIECE, what="layers.3.m").wait()


def test_memory_is_registered_once_and_the_reason_tells(engine, memory):
    assert engine.registered_nbytes == 16 * PIECE
    assert engine.reason.endswith(f"; {16 * PIECE} B of memory are registered")
    with pytest.raises(ValueError, match="registered memory already"):
        engine.register(memory.address, PIECE, memory)
    engine.close()
    with pytest.raises(aio.EngineClosedError):
        engine.register(memory.address, PIECE, memory)


def test_requests_in_flight_do_not_hold_it_up(engine, file):
    """The kernel must not wait for them first, the read that wakes the ring's thread among them."""
    memory = random_memory(NBYTES)
    faults.inject(engine, 1, faults.DELAY)
    write = engine.write(file, 0, memory.address, PIECE)
    engine.register(memory.address, NBYTES, memory)
    write.wait()
    assert engine.read(file, 0, memory.address, PIECE).wait() is None


@pytest.mark.parametrize("kind", ["threads", "buffered"])
def test_other_engines_have_no_use_for_it(folder, kind):
    memory = random_memory(NBYTES)
    with open_or_skip(folder, kind) as engine:
        before = engine.reason
        engine.register(memory.address, NBYTES, memory)
        assert (engine.registered_nbytes, engine.reason) == (0, before)


LIMITED = """
import os, resource, sys, types
infinity = types.ModuleType("infinity")
infinity.__path__ = [sys.argv[1]]
sys.modules["infinity"] = infinity
from infinity import aio
folder = os.open(sys.argv[2], os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
aio.open_engine(folder, "io_uring").close()  # what nobody may not read (a checkout in /root) is loaded
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
engine = aio.open_engine(folder, "io_uring")
memory = aio.AlignedMemory(4 << 20)
memory.view[:] = os.urandom(len(memory))
engine.register(memory.address, len(memory), memory)
file = engine.open_nameless(folder)
engine.write(file, 0, memory.address, len(memory)).wait()
sent = bytes(memory.view)
memory.view[:] = bytes(len(memory))
engine.read(file, 0, memory.address, len(memory)).wait()
print(memory.view == sent, engine.registered_nbytes, engine.statistics().registered)
print(engine.reason)
"""


def test_a_limit_on_locked_memory_costs_the_saving_and_nothing_else(folder):
    open_or_skip(folder, "io_uring").close()
    package = Path(aio.__file__).parent.parent
    folder.chmod(0o777)
    command = [sys.executable, "-W", "error", "-c", LIMITED, str(package), str(folder)]
    process = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    facts, reason = process.stdout.splitlines()
    assert facts == "True 0 0"
    assert reason.endswith(
        f"; 0 B of memory are registered, not {4 << 20}: Cannot allocate memory (ENOMEM); "
        "RLIMIT_MEMLOCK is too low for it; `ulimit -l` higher"
    )

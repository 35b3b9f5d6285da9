"""Every fault at every place of a small run: the right bytes, or an error that names the request.

Trusts that infinity.aio.faults puts a fault where it says; the transfers around it are real.
"""

import errno
import os
import random
import threading
from pathlib import Path

import pytest

import aio_cases
from aio_cases import PIECE, open_or_skip
from infinity import aio
from infinity.aio import faults

pytestmark = pytest.mark.disk

REQUEST = 3 * PIECE  # three pieces
REQUESTS = 3
ATTEMPTS = REQUESTS * 3  # of an undisturbed pass


@pytest.fixture(params=aio.KINDS)
def engine(request, folder):
    with open_or_skip(folder, request.param, depth=4, threads=3) as engine:
        yield engine


@pytest.fixture
def file(engine, folder):
    with engine.open_nameless(folder) as file:
        file.allocate(0, REQUESTS * REQUEST)
        yield file


def random_memory(seed):
    return aio_cases.random_memory(REQUESTS * REQUEST, seed)


def run_pass(start, file, memory):
    """Move all of `memory` in three requests; the error of each, or None."""
    places = range(0, len(memory), REQUEST)
    completions = [start(file, p, memory.address + p, REQUEST, what=f"at {p}", owner=memory) for p in places]
    errors = []
    for completion in completions:
        try:
            completion.wait()
            errors.append(None)
        except aio.IoError as error:
            errors.append(error)
    return errors


def parts(memory):
    return [bytes(memory.view[p : p + REQUEST]) for p in range(0, len(memory), REQUEST)]


def disturbed(engine, file, direction, nth, result, seed):
    """Write and read one pass with one fault in one of the two; (errors, what was written, what was read)."""
    written, read = random_memory(seed), aio.AlignedMemory(REQUESTS * REQUEST)
    if direction == "write":
        faults.inject(engine, nth, result)
        errors = run_pass(engine.write, file, written)
        assert run_pass(engine.read, file, read) == [None] * REQUESTS
    else:
        assert run_pass(engine.write, file, written) == [None] * REQUESTS
        faults.inject(engine, nth, result)
        errors = run_pass(engine.read, file, read)
    return errors, parts(written), parts(read)


LENGTHS = [1, 511, 512, 4095, 4096, 4097, 8192, PIECE - 4097, PIECE - 4096, PIECE - 1, PIECE]


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_short_transfer_is_continued(engine, file, direction):
    for seed, nbytes in enumerate(LENGTHS):
        before = engine.statistics()
        nth = 1 + seed % ATTEMPTS
        errors, written, read = disturbed(engine, file, direction, nth, nbytes, seed)
        assert errors == [None] * REQUESTS
        assert written == read, f"seed {seed}, {nbytes} B"
        after = engine.statistics()
        more = (after.continued - before.continued) + (after.retries - before.retries)
        assert more == (nbytes < PIECE)


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
def test_an_interrupted_transfer_is_tried_again(engine, file, direction, number):
    for nth in range(1, ATTEMPTS + 1):
        errors, written, read = disturbed(engine, file, direction, nth, -number, nth)
        assert errors == [None] * REQUESTS
        assert written == read, f"attempt {nth}"
    assert engine.statistics().retries == ATTEMPTS


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("result", [-errno.EIO, -errno.ENOSPC, -errno.ECANCELED, -errno.ENODATA, 0])
def test_a_failed_transfer_fails_its_request_and_no_other(engine, file, direction, result):
    for nth in range(1, ATTEMPTS + 1):
        errors, written, read = disturbed(engine, file, direction, nth, result, nth)
        failed = [i for i, error in enumerate(errors) if error]
        assert len(failed) == 1, f"attempt {nth}"
        error = errors[failed[0]]
        assert error.errno == (-result or errno.EIO)
        assert (error.offset, error.nbytes) == (failed[0] * REQUEST, REQUEST)
        assert error.offset <= error.failed_at < error.offset + REQUEST
        assert error.what == f"at {error.offset}"
        assert str(error).startswith(f"{direction} of at {error.offset}: ")
        assert error.cause
        assert error.cure
        for i in range(REQUESTS):
            assert (written[i] == read[i]) or i in failed
        assert engine.statistics().pieces_in_flight == 0
    assert engine.statistics().failed == ATTEMPTS


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
def test_retries_end(engine, file, number):
    memory = random_memory(0)
    for nth in range(1, 40):
        faults.inject(engine, nth, -number)
    with pytest.raises(aio.IoError) as caught:
        engine.write(file, 0, memory.address, PIECE, owner=memory).wait(30)
    assert caught.value.errno == number
    assert engine.statistics().retries == 20


def test_progress_renews_the_patience_for_retries(engine, file):
    memory, read = random_memory(0), aio.AlignedMemory(PIECE)
    for nth in range(1, 61):
        faults.inject(engine, nth, aio.BLOCK if nth in (16, 32, 48) else -errno.EAGAIN)
    engine.write(file, 0, memory.address, PIECE, owner=memory).wait(30)
    faults.inject(engine, 1, 0)
    with pytest.raises(aio.IoError):
        engine.read(file, 0, read.address, PIECE, owner=read).wait()
    engine.read(file, 0, read.address, PIECE, owner=read).wait()
    assert read.view == memory.view[:PIECE]


def test_a_request_with_a_failed_piece_is_over_only_when_all_its_pieces_are(engine, file):
    """The other pieces were started: the kernel may write to their memory as long as they last."""
    memory = aio.AlignedMemory(REQUESTS * REQUEST)
    for nth in range(1, 9):
        for later in range(20):  # whatever else is in flight is slowed down by its retries
            faults.inject(engine, nth + 1 + later, -errno.EAGAIN)
        faults.inject(engine, nth, -errno.EIO)
        with pytest.raises(aio.IoError):
            engine.read(file, 0, memory.address, len(memory), owner=memory).wait(30)
        assert engine.statistics().pieces_in_flight == 0
        run_pass(engine.read, file, memory)  # uses up the faults that are left
        run_pass(engine.read, file, memory)
        run_pass(engine.read, file, memory)


@pytest.mark.parametrize("seed", range(5))
def test_a_storm_of_faults_never_gives_wrong_bytes(engine, file, seed):
    choices = (-errno.EIO, -errno.EAGAIN, -errno.EINTR, 0, 1, 4096, 5000, PIECE - 1)
    dice = random.Random(seed)
    for round_ in range(20):
        written, read = random_memory(dice.random()), aio.AlignedMemory(REQUESTS * REQUEST)
        for nth in dice.sample(range(1, 20), 6):
            faults.inject(engine, nth, dice.choice(choices))
        write_errors = run_pass(engine.write, file, written)
        read_errors = run_pass(engine.read, file, read)
        pairs = zip(parts(written), parts(read), write_errors, read_errors, strict=True)
        for expected, actual, write_error, read_error in pairs:
            assert write_error or read_error or expected == actual, f"seed {seed}, round {round_}"
        for _ in range(5):
            run_pass(engine.read, file, read)  # uses up the faults that are left


@pytest.mark.parametrize("kind", aio.KINDS)
def test_faults_among_pieces_that_are_submitted_in_several_batches_do_no_harm(folder, kind):
    """A ring submits a few MiB at a time: twelve pieces of 1 MiB are six batches."""
    nbytes = 12 << 20
    written, read = aio.AlignedMemory(nbytes), aio.AlignedMemory(nbytes)
    written.view[:] = random.Random(0).randbytes(nbytes)
    try:
        engine = aio.open_engine(folder, kind, piece_nbytes=1 << 20, depth=12, threads=4)
    except aio.EngineUnavailableError as error:
        pytest.skip(str(error))
    with engine, engine.open_nameless(folder) as file:
        for start, memory in ((engine.write, written), (engine.read, read)):
            with faults.held(engine):
                for nth, result in ((2, -errno.EAGAIN), (3, 4096), (7, -errno.EINTR), (12, 5000)):
                    faults.inject(engine, nth, result)
                moving = start(file, 0, memory.address, nbytes, owner=memory)
            moving.wait()
        statistics = engine.statistics()
    assert written.view == read.view
    assert (statistics.retries, statistics.continued) == (4, 4)


def test_too_many_faults_and_nonsense_are_refused(engine):
    with pytest.raises(ValueError, match="expected 1 or more"):
        faults.inject(engine, 0, -errno.EIO)
    for _ in range(64):
        faults.inject(engine, 1000, -errno.EIO)
    with pytest.raises(ValueError, match="too many"):
        faults.inject(engine, 1000, -errno.EIO)


@pytest.mark.parametrize("answers", [True, False])
def test_the_time_that_the_process_was_stopped_is_not_taken_for_a_disk_that_hangs(engine, file, answers):
    memory = random_memory(0)
    engine.hang_s = 5.0 if answers else 0.5
    with faults.held(engine):
        moving = engine.write(file, 0, memory.address, REQUEST, owner=memory)
        moving._request.began_ns -= 10**12  # as if the clock had gone on while nothing ran
        if answers:
            timer = threading.Timer(0.2, engine.library.aio_hold, (engine.pointer, 0))
            timer.start()
            moving.wait()
            timer.join()
        else:
            with pytest.raises(aio.IoTimeoutError, match="the disk does not answer"):
                moving.wait()
            engine.hung = False
    moving.wait()


def ring_descriptors():
    links = Path("/proc/self/fd").iterdir()
    return {int(link.name) for link in links if link.is_symlink() and "io_uring" in str(link.readlink())}


def test_a_ring_that_breaks_fails_every_request_and_says_so(folder):
    before = ring_descriptors()
    try:
        engine = aio.open_engine(folder, "io_uring", depth=1)
    except aio.EngineUnavailableError as error:
        pytest.skip(str(error))
    memory = random_memory(0)
    file = engine.open_nameless(folder)
    with faults.held(engine):
        write = engine.write(file, 0, memory.address, PIECE, owner=memory, what="layers.5")
        others = [
            engine.write(file, 0, memory.address, PIECE, owner=memory, priority=one) for one in aio.Priority
        ]
        (ring,) = ring_descriptors() - before
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, ring)  # the descriptor stays taken: the engine will close it
    with pytest.raises((aio.IoError, aio.IoEngineFailedError)):
        write.wait(60)
    assert {one.name: other.done for one, other in zip(aio.Priority, others, strict=True)} == {
        "URGENT": False,  # the kernel had it
        "NORMAL": True,
        "BEHIND": True,
    }
    with pytest.raises((aio.IoEngineFailedError, aio.IoError)):
        engine.read(file, 0, memory.address, PIECE, owner=memory).wait(60)
    with pytest.raises(aio.IoEngineFailedError):
        engine.drain(10)
    engine.close()
    os.close(null)

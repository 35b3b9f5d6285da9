"""Trusts the file system under folder and the kernel.  Nothing is faked but a disk that hangs (`held`)."""

import errno
import gc
import os
import pickle
import random
import threading
import time
import weakref
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aio_cases import PIECE, open_or_skip, random_memory
from covers import examples
from infinity import aio
from infinity.aio import faults
from leftovers import settled

pytestmark = pytest.mark.disk

# Right bytes


def test_many_requests_in_random_order_give_the_right_bytes(engine, file):
    count, nbytes = 256, aio.BLOCK
    order = random.Random(1)
    written, read = random_memory(count * nbytes), aio.AlignedMemory(count * nbytes)
    places = list(range(0, count * nbytes, nbytes))
    order.shuffle(places)
    writes = [engine.write(file, p, written.address + p, nbytes, owner=written) for p in places]
    order.shuffle(writes)
    for write in writes:
        write.wait()
    order.shuffle(places)
    ranks = [aio.Priority.URGENT, aio.Priority.NORMAL, aio.Priority.BEHIND]
    reads = [
        engine.read(file, p, read.address + p, nbytes, owner=read, priority=ranks[p // nbytes % 3])
        for p in places
    ]
    engine.drain()
    assert all(read.done for read in reads)
    assert written.view == read.view


def test_requests_that_others_follow_begin_with_the_last_or_when_somebody_waits(engine, file):
    memory = random_memory(4 * PIECE)

    def write(number, more):
        address = memory.address + number * PIECE
        return engine.write(file, number * PIECE, address, PIECE, owner=memory, more=more)

    together = [write(number, number < 3) for number in range(4)]
    while not all(one.done for one in together):  # looks, and waits for none
        time.sleep(0.001)
    waits = (lambda one: one.wait(), lambda one: engine.wait_any([one]), lambda _: engine.drain())
    for wait in waits:
        engine.drain()
        alone = write(0, True)
        wait(alone)
        assert alone.done


def test_a_large_request_is_split_into_pieces_and_put_together_again(engine, file):
    nbytes = 33 * PIECE + aio.BLOCK
    written, read = random_memory(nbytes), aio.AlignedMemory(nbytes)
    before = engine.statistics()
    engine.write(file, aio.BLOCK, written.address, nbytes, owner=written).wait()
    engine.read(file, aio.BLOCK, read.address, nbytes, owner=read).wait()
    after = engine.statistics()
    assert written.view == read.view
    assert after.requests - before.requests == 2
    assert after.pieces - before.pieces == 2 * 34
    assert (after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written) == (nbytes,) * 2
    assert after.in_flight == after.pieces_in_flight == after.failed == 0
    assert 1 <= after.high_water <= 8


@settings(
    deadline=None, max_examples=examples(10, 30), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    extents=st.lists(
        st.tuples(st.integers(0, 60 * PIECE), st.integers(0, 4 * PIECE), st.booleans()), max_size=12
    )
)
def test_any_sizes_and_offsets_give_what_a_file_in_memory_gives(engine, file, extents):
    unit = aio.BLOCK if file.direct else 1
    model, memory = bytearray(64 * PIECE), random_memory(64 * PIECE)
    engine.write(file, 0, memory.address, len(memory), owner=memory).wait()
    model[:] = memory.view
    memory.view[:] = memory.view[::-1]
    for start, size, write in extents:
        offset, nbytes = start // unit * unit, size // unit * unit
        if write:
            engine.write(file, offset, memory.address + offset, nbytes, owner=memory).wait()
            model[offset : offset + nbytes] = memory.view[offset : offset + nbytes]
        else:
            read = aio.AlignedMemory(max(nbytes, 1))
            engine.read(file, offset, read.address, nbytes, owner=read).wait()
            assert read.view[:nbytes] == model[offset : offset + nbytes]


def test_several_threads_use_one_engine(engine, file):
    wrong = []

    def work(number):
        written, read = random_memory(PIECE, number), aio.AlignedMemory(PIECE)
        for _ in range(20):
            engine.write(file, number * PIECE, written.address, PIECE, owner=written).wait()
            read.view[:] = bytes(PIECE)
            engine.read(file, number * PIECE, read.address, PIECE, owner=read).wait()
            if read.view != written.view:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def started(folder, kind, ranks):
    """Queue a request of one piece per rank while the disk hangs; the ranks in the order they were served."""
    memory = aio.AlignedMemory(PIECE)
    with open_or_skip(folder, kind, depth=1, threads=1) as engine, engine.open_nameless(folder) as file:
        file.allocate(0, PIECE)
        engine.write(file, 0, memory.address, PIECE, owner=memory).wait()
        with faults.held(engine):
            reads = [
                (engine.read(file, 0, memory.address, PIECE, owner=memory, priority=aio.Priority[rank]), rank)
                for rank in ranks
            ]
        engine.drain()
        return [rank for _, rank in sorted(reads, key=lambda read: read[0].ended_s)]


@pytest.mark.parametrize("kind", aio.KINDS)
def test_urgent_requests_overtake_all_that_wait(folder, kind):
    order = started(folder, kind, ["BEHIND", "NORMAL", "URGENT", "BEHIND", "NORMAL", "URGENT"])
    assert order == ["URGENT"] * 2 + ["NORMAL"] * 2 + ["BEHIND"] * 2


@pytest.mark.parametrize("kind", aio.KINDS)
def test_what_goes_behind_has_its_turn_all_the_same(folder, kind):
    order = started(folder, kind, ["BEHIND"] * 3 + ["NORMAL"] * 8)
    assert order == ["NORMAL"] * 3 + ["BEHIND"] + ["NORMAL"] * 3 + ["BEHIND"] + ["NORMAL"] * 2 + ["BEHIND"]


@pytest.mark.parametrize("kind", aio.KINDS)
@pytest.mark.parametrize(
    ("behind", "ahead"), [("BEHIND", "NORMAL"), ("NORMAL", "URGENT"), ("BEHIND", "URGENT")]
)
@pytest.mark.parametrize("again", [0, 3])
def test_a_read_is_not_held_up_by_a_large_write_that_came_before_it(folder, kind, behind, ahead, again):
    """Nor by one whose pieces the drive sends back."""
    memory = aio.AlignedMemory(48 * PIECE)
    with open_or_skip(folder, kind, depth=1, threads=1) as engine, engine.open_nameless(folder) as file:
        file.allocate(0, 48 * PIECE)
        engine.write(file, 0, memory.address, 48 * PIECE, owner=memory).wait()
        with faults.held(engine):
            for nth in range(1, again + 1):
                faults.inject(engine, nth, -errno.EAGAIN)
            writes = [
                engine.write(
                    *(file, n * 4 * PIECE, memory.address, 4 * PIECE),
                    owner=memory,
                    priority=aio.Priority[behind],
                )
                for n in range(12)
            ]
            read = engine.read(file, 0, memory.address, 4 * PIECE, owner=memory, priority=aio.Priority[ahead])
        engine.drain()
        ends_s = [write.ended_s for write in writes]
    # Of those behind, one piece in four is moved meanwhile: fewer than one write, of four pieces.
    assert min(ends_s) > read.ended_s


@pytest.mark.parametrize("kind", aio.KINDS)
def test_a_stream_of_reads_does_not_stop_the_writes_behind_it(folder, kind):
    """Their memory is what the next reads wait for: of every four pieces one is theirs."""
    order = started(folder, kind, ["NORMAL"] * 40 + ["BEHIND"] * 10)
    places = [place for place, rank in enumerate(order) if rank == "BEHIND"]
    assert places == list(range(3, 40, 4))


def test_requests_tell_when_they_were_accepted_and_when_they_were_over(engine, file):
    memory = random_memory(3 * PIECE)
    before_s = time.perf_counter()
    with faults.held(engine):
        write = engine.write(file, 0, memory.address, 3 * PIECE, owner=memory)
        accepted_s = time.perf_counter()
        assert (before_s <= write.began_s <= accepted_s, write.ended_s) == (True, None)
    write.wait()
    assert accepted_s <= write.ended_s <= time.perf_counter()
    faults.inject(engine, 1, -errno.EIO)
    failed = engine.read(file, 0, memory.address, PIECE, owner=memory)
    with pytest.raises(aio.IoError):
        failed.wait()
    nothing = engine.read(file, 0, memory.address, 0)
    assert write.ended_s <= failed.began_s <= failed.ended_s <= nothing.began_s <= nothing.ended_s


def test_nothing_to_move_is_done_at_once(engine, file):
    with faults.held(engine):
        assert engine.read(file, 0, aio.BLOCK, 0).done


# Errors


def test_unaligned_requests_on_direct_files_are_refused_before_submission(engine, file):
    memory = aio.AlignedMemory(2 * aio.BLOCK)
    for shift in ((1, 0, 0), (0, 512, 0), (0, 0, 100)):
        offset, address, nbytes = shift[0], memory.address + shift[1], aio.BLOCK + shift[2]
        if file.direct:
            with pytest.raises(ValueError, match=r"layers\.3.*whole blocks of 4096 B"):
                engine.read(file, offset, address, nbytes, what="layers.3")
        else:
            engine.read(file, offset, address, nbytes, owner=memory).wait()
    for numbers in ((-aio.BLOCK, memory.address, 0), (0, 0, aio.BLOCK), (0, memory.address, -aio.BLOCK)):
        with pytest.raises(ValueError, match="out of range"):
            engine.write(file, *numbers)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 * PIECE])
def test_reading_past_the_end_of_a_file_is_an_error_that_says_so(engine, folder, size):
    memory = aio.AlignedMemory(4 * PIECE)
    with engine.open_nameless(folder) as file:
        os.ftruncate(file.fd, size)
        completion = engine.read(file, 0, memory.address, 4 * PIECE, what="layers.17.hi", owner=memory)
        with pytest.raises(aio.IoError) as first:
            completion.wait()
        with pytest.raises(aio.IoError) as second:
            completion.wait()
    error = first.value
    assert str(error) == str(second.value)
    assert (error.errno, error.offset, error.nbytes, error.what) == (errno.EIO, 0, 4 * PIECE, "layers.17.hi")
    assert size - aio.BLOCK < error.failed_at <= size
    for part in ("read of layers.17.hi: end of file", str(folder), f"{4 * PIECE} B at offset 0", "try: "):
        assert part in str(error)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 (errors travel between processes)
    assert (str(copy), copy.errno, copy.what) == (str(error), errno.EIO, "layers.17.hi")


def test_a_flush_that_fails_names_the_drive_and_readers_of_the_file_as_causes(file, monkeypatch):
    def failing(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(aio.IoError, match=r"(?s)flush of the file.*drive.*Page cache.*`dmesg`") as caught:
        file.sync()
    assert caught.value.errno == errno.EIO


def test_a_failed_write_does_not_disturb_the_others(engine, file):
    memory = random_memory(PIECE)
    good = [engine.write(file, p * PIECE, memory.address, PIECE, owner=memory) for p in range(4)]
    bad = engine.write(file, 0, aio.BLOCK, PIECE, what="nobody's memory")
    for completion in good:
        completion.wait()
    with pytest.raises(aio.IoError, match="Bad address") as caught:
        bad.wait()
    assert caught.value.errno == errno.EFAULT


# Waiting


def test_a_wait_ends_after_its_timeout_and_the_request_goes_on(engine, file):
    memory = random_memory(PIECE)
    with faults.held(engine):
        write = engine.write(file, 0, memory.address, PIECE, what="layers.0", owner=memory)
        with pytest.raises(aio.IoTimeoutError, match=r"not done after 0.05 s: .*write of layers.0"):
            write.wait(0.05)
        with pytest.raises(aio.IoTimeoutError):
            engine.drain(0.05)
        with pytest.raises(aio.IoTimeoutError):
            engine.wait_any([write], 0.05)
        with pytest.raises(aio.IoTimeoutError):
            write.wait(0)
        assert not write.done
        assert "in flight" in repr(write)
    write.wait(60)
    assert write.done


def test_wait_any_gives_the_request_that_is_over(engine, file):
    memory = aio.AlignedMemory(PIECE)
    over = engine.read(file, 0, memory.address, PIECE, owner=memory)
    over.wait()
    with faults.held(engine):
        pending = engine.read(file, 0, memory.address, PIECE, owner=memory)
        assert engine.wait_any([pending, over]) is over
        timer = threading.Timer(0.05, lambda: engine.library.aio_hold(engine.pointer, 0))
        timer.start()
        assert engine.wait_any([pending]) is pending
        timer.join()
    with pytest.raises(ValueError, match="at least one"):
        engine.wait_any([])


class Owner:
    """Something whose end can be observed."""


def test_a_dropped_completion_keeps_its_memory_until_the_kernel_is_done(engine, file):
    memory = random_memory(PIECE)
    owner = Owner()
    end = weakref.ref(owner)
    with faults.held(engine):
        engine.write(file, 0, memory.address, PIECE, owner=owner)
        del owner
        gc.collect()
        assert end() is not None
        assert engine.statistics().in_flight == 1
    engine.drain()
    assert end() is None


def test_memory_is_let_go_of_without_anybody_waiting(engine, file):
    memory = aio.AlignedMemory(aio.BLOCK)
    ends = []
    for _ in range(50):
        owner = Owner()
        ends.append(weakref.ref(owner))
        read = engine.read(file, 0, memory.address, aio.BLOCK, owner=owner)
        while not engine.library.aio_done(read._request):
            pass
    del owner
    assert sum(end() is not None for end in ends) <= 2


def test_an_owner_may_use_the_engine_when_it_is_let_go_of(engine, file):
    memory = aio.AlignedMemory(aio.BLOCK)
    more = []

    class Chained:
        def __del__(self):
            mine = aio.AlignedMemory(aio.BLOCK)
            more.append(engine.read(file, 0, mine.address, aio.BLOCK, owner=mine))

    for _ in range(10):
        engine.read(file, 0, memory.address, aio.BLOCK, owner=Chained()).wait()
    engine.drain()
    assert len(more) == 10


# Life


def test_closing_a_file_waits_for_its_requests(engine, folder):
    memory = random_memory(PIECE)
    file = engine.open_nameless(folder)
    with faults.held(engine):
        write = engine.write(file, 0, memory.address, PIECE, owner=memory)
        timer = threading.Timer(0.05, lambda: engine.library.aio_hold(engine.pointer, 0))
        timer.start()
        file.close()
        timer.join()
    assert write.done
    write.wait()
    file.close()
    assert "closed" in repr(file)
    with pytest.raises(ValueError, match="is closed"):
        engine.read(file, 0, memory.address, PIECE, owner=memory)
    assert engine.statistics().in_flight == 0


def test_closing_an_engine_finishes_what_was_submitted(folder):
    for kind in aio.KINDS:
        engine = open_or_skip(folder, kind)
        memory = random_memory(32 * PIECE)
        file = engine.open_nameless(folder)
        with faults.held(engine):
            writes = [engine.write(file, p * PIECE, memory.address, PIECE, owner=memory) for p in range(32)]
            engine.close()
        assert all(write.done for write in writes)
        engine.close()
        assert "closed" in repr(engine)
        with pytest.raises(aio.EngineClosedError):
            engine.read(file, 0, memory.address, PIECE)
        with pytest.raises(aio.EngineClosedError):
            engine.open_nameless(folder)
        file.close()


def test_a_forgotten_engine_ends_by_itself(folder):
    for kind in aio.KINDS:
        before = threads_and_descriptors()
        engine = open_or_skip(folder, kind)
        file, memory = engine.open_nameless(folder), random_memory(PIECE)
        engine.write(file, 0, memory.address, PIECE, owner=memory)
        del engine, file
        gc.collect()
        assert has_left_nothing(before)


def threads_and_descriptors():
    gc.collect()
    return settled(lambda: tuple(len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("task", "fd")))


def has_left_nothing(before):
    """Whether there are no more threads and descriptors than before, some time: others may end meanwhile."""
    for _ in range(200):
        if all(now <= was for now, was in zip(threads_and_descriptors(), before, strict=True)):
            return True
        time.sleep(0.05)
    return False


def test_nothing_leaks_from_a_hundred_engines(folder):
    for kind in aio.KINDS:
        open_or_skip(folder, kind).close()
        before = threads_and_descriptors()
        for _ in range(100):
            with open_or_skip(folder, kind, threads=2) as engine, engine.open_nameless(folder):
                pass
        assert has_left_nothing(before)

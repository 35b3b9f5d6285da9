"""Two generations of an extent: what a commit names is never overwritten.

Trusted: the fake disk's bytes. A model of plain arrays says what each generation must hold.
"""

import random
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeDisk
from infinity.errors import EngineFailedError
from infinity.sizes import BLOCK
from infinity.storage.generations import TwinStore, among, put
from infinity.storage.memory import Arena, view
from infinity.storage.store import Request

BLOCKS = 12
RANGES = st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS), st.integers(0, 1))


class Disk(FakeDisk):
    """A FakeDisk whose places can be named."""

    def describe(self, extent):
        return [extent.offset, extent.nbytes]

    def free(self, extent):
        self.freed = [*getattr(self, "freed", []), extent]


def filled(value, blocks=1):
    arena = Arena(blocks * BLOCK)
    view(arena.address, arena.nbytes)[:] = bytes([value]) * arena.nbytes
    return arena


def write(store, extent, block, value, blocks=1):
    arena = filled(value, blocks)
    store.write(Request(extent, block * BLOCK, arena.address, arena.nbytes, "x.hi", arena)).wait()


def read(store, extent, blocks=BLOCKS):
    arena = Arena(blocks * BLOCK)
    store.read(Request(extent, 0, arena.address, arena.nbytes, "x.hi", arena)).wait()
    return list(bytes(view(arena.address, arena.nbytes))[::BLOCK])


def committed(disk, place, runs):
    """What the bytes named by a commit hold, by block."""
    sides = [disk.data[offset : offset + nbytes : BLOCK] for offset, nbytes in place]
    return [
        sides[side][at // BLOCK]
        for start, stop, side in among(runs, 0, runs[-1][0])
        for at in range(start, stop, BLOCK)
    ]


@given(st.lists(RANGES, max_size=20))
def test_runs_are_a_short_way_to_write_an_array(puts):
    runs, plain = ((BLOCKS, 0),), [0] * BLOCKS
    for start, length, side in puts:
        stop = min(start + length, BLOCKS)
        runs = put(runs, start, stop, side)
        plain[start:stop] = [side] * (stop - start)
    assert [side for start, stop, side in among(runs, 0, BLOCKS) for _ in range(start, stop)] == plain
    assert len(runs) == 1 + sum(one != other for one, other in pairwise(plain))


@given(st.integers(0, 1 << 30))
def test_whatever_is_written_the_last_commit_stays_and_reads_see_the_newest(seed):
    rng, disk = random.Random(seed), Disk(seed, delay_s=0)
    store = TwinStore(disk)
    extents = [store.allocate(BLOCKS * BLOCK, "x.hi") for _ in range(2)]
    now = [[0] * BLOCKS for _ in extents]
    named = None
    for turn in range(1, 30):
        number, block = rng.randrange(2), rng.randrange(BLOCKS)
        blocks = rng.randint(1, BLOCKS - block)
        write(store, extents[number], block, turn, blocks)
        now[number][block : block + blocks] = [turn] * blocks
        if rng.random() < 0.3:
            store.begin_commit(extents)
            named = [store.describe(extent) for extent in extents], [list(one) for one in now]
            store.end_commit(turn)
        assert [read(store, extent) for extent in extents] == now
        if named is not None:
            places, values = named
            assert [committed(disk, *one) for one in places] == values


def test_a_write_waits_while_both_sides_are_named_and_no_longer():
    disk = Disk(delay_s=0)
    store = TwinStore(disk)
    extent = store.allocate(BLOCKS * BLOCK, "x.hi")
    write(store, extent, 0, 1, BLOCKS)
    store.begin_commit([extent])
    store.end_commit(1)
    write(store, extent, 0, 2, 4)
    store.begin_commit([extent])
    write(store, extent, 4, 3, 4)  # of these blocks one side alone is named
    thread = threading.Thread(target=write, args=(store, extent, 0, 3))
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()
    assert read(store, extent)[:8] == [2] * 4 + [3] * 4
    store.end_commit(2)
    thread.join(60)
    assert read(store, extent)[0] == 3


def write_other(store, other, value):
    arena = filled(value, BLOCKS)
    other.store.write(Request(other, 0, arena.address, arena.nbytes, "x.hi", arena)).wait()


def test_the_other_side_is_nobodys_until_the_twin_turns_to_it():
    store = TwinStore(Disk(delay_s=0))
    extent = store.allocate(BLOCKS * BLOCK, "x.hi")
    write(store, extent, 0, 1, BLOCKS)
    store.begin_commit([extent])
    store.end_commit(1)
    for turned in (False, True):
        other = store.other_side(extent)
        write_other(store, other, 5 + turned)
        assert read(store, extent) == [1] * BLOCKS
    assert other.store.turn(other) == extent == other.store.twin(other)
    assert read(store, extent) == [6] * BLOCKS
    assert store.other_side(extent) is None, "it is what the commit names"
    store.begin_commit([extent])
    assert store.other_side(extent) is not None, "it will be free"
    store.end_commit(2)
    write(store, extent, 3, 7)
    assert store.other_side(extent) is None, "one block is of no commit"
    store.begin_commit([extent])
    store.end_commit(3)
    other = store.other_side(extent)
    write_other(store, other, 8)
    assert read(store, extent) == [6] * 3 + [7] + [6] * (BLOCKS - 4)
    store.turn(other)
    assert read(store, extent) == [8] * BLOCKS


def test_a_write_to_the_other_side_waits_for_the_commit_that_frees_it():
    store = TwinStore(Disk(delay_s=0))
    extent = store.allocate(BLOCKS * BLOCK, "x.hi")
    write(store, extent, 0, 1, BLOCKS)
    store.begin_commit([extent])
    store.end_commit(1)
    write(store, extent, 0, 2, BLOCKS)
    store.begin_commit([extent])
    other = store.other_side(extent)
    thread = threading.Thread(target=write_other, args=(store, other, 3))
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()
    store.end_commit(2)
    thread.join(60)
    assert read(store, extent) == [2] * BLOCKS
    store.turn(other)
    assert read(store, extent) == [3] * BLOCKS


def test_a_failed_commit_lets_nobody_wait_for_it():
    store = TwinStore(Disk(delay_s=0))
    extent = store.allocate(BLOCK, "x.hi")
    for value in (1, 2):
        write(store, extent, 0, value)
        store.begin_commit([extent])
        if value == 1:
            store.end_commit(1)
    store.fail(OSError("flush"))
    with pytest.raises(EngineFailedError, match="which has failed"):
        write(store, extent, 0, 3)


def test_a_place_that_was_given_back_serves_again_without_touching_what_is_named():
    disk = Disk(delay_s=0)
    store = TwinStore(disk)
    extent = store.allocate(BLOCK, "x.hi")
    write(store, extent, 0, 7)
    store.begin_commit([extent])
    place, runs = store.describe(extent)
    store.end_commit(1)
    nbytes = len(disk.data)
    store.free(extent)
    again = store.allocate(BLOCK, "y.hi")
    write(store, again, 0, 8)
    assert (len(disk.data), committed(disk, place, runs), read(store, again, 1)) == (nbytes, [7], [8])


def test_what_an_earlier_process_has_committed_stays_until_a_later_commit():
    disk = Disk(delay_s=0)
    nbytes = 4 * BLOCK
    sides = [disk.allocate(nbytes, "x.hi") for _ in range(2)]
    disk.data[:] = bytes([1]) * nbytes + bytes([2]) * nbytes
    store, runs = TwinStore(disk), ((BLOCK, 1), (nbytes, 0))
    place = [disk.describe(side) for side in sides]
    extent = store.take_over(nbytes, sides, runs)
    assert read(store, extent, 4) == [2, 1, 1, 1]
    for value in (3, 4):
        write(store, extent, 0, value, 2)
        assert committed(disk, place, runs) == [2, 1, 1, 1]
    assert read(store, extent, 4) == [4, 4, 1, 1]


def test_what_will_be_replaced_takes_one_side_only_and_gives_it_back():
    disk = Disk(delay_s=0)
    store = TwinStore(disk, lazy=True)
    written, unwritten = store.allocate(BLOCK, "x.hi"), store.allocate(BLOCK, "x.m")
    assert len(disk.data) == 0
    write(store, written, 0, 1)
    assert len(disk.data) == BLOCK
    store.free(written)
    assert [extent.nbytes for extent in disk.freed] == [BLOCK]
    store.complete("resuming")
    assert len(disk.data) == 3 * BLOCK
    assert None not in store.describe(unwritten)[0]


def test_an_error_names_the_file_and_how_old_the_bytes_are():
    store = TwinStore(Disk(delay_s=0))
    extent = store.allocate(BLOCK, "x.hi")
    write(store, extent, 0, 1)
    assert store.where(extent, 0) == "fake disk at byte 0, written since step 0"
    store.begin_commit([extent])
    store.end_commit(5)
    assert store.where(extent, 0) == "fake disk at byte 0, committed with step 5"
    write(store, extent, 0, 2)
    assert store.where(extent, 0) == f"fake disk at byte {BLOCK}, written since step 5"

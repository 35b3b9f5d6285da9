"""The budget and its shares. Nothing is faked."""

import ctypes
import gc
import mmap
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from children import ended
from infinity.errors import ConfigError, HostMemoryError
from infinity.planning.budget import divide, least_budget, least_total
from infinity.sizes import BLOCK
from infinity.storage import memory
from infinity.storage.memory import HUGE, Arena, Ledger, Pool, framed_nbytes, reuse_large_blocks, view


@given(st.integers(least_budget(), 1 << 42), st.integers(0, 1 << 34))
@example(least_budget() + 4096, 0)  # beside the slots there is less than the shares ask for
def test_the_shares_never_exceed_the_budget(total, largest):
    budget = divide(total, largest)
    assert min(budget.ahead_nbytes, budget.outgoing_nbytes, budget.kept_nbytes) >= 0
    slots = budget.slots * budget.slot_nbytes
    assert slots + budget.ahead_nbytes + budget.outgoing_nbytes + budget.kept_nbytes == total
    assert budget.slots >= 4
    assert budget.slot_nbytes % BLOCK == 0


@given(st.integers(4 << 20, 1 << 42))
def test_tiles_are_the_largest_of_which_the_slots_keep_a_disk_busy(total):
    budget = divide(total)
    assert 8 <= budget.slots <= 12 or budget.slots * budget.slot_nbytes == 96 << 20
    assert 8 * budget.slot_nbytes <= total // 4
    assert budget.slots * budget.slot_nbytes <= total // 4
    assert budget.tile_numel == 1 << 20 or 16 * budget.slot_nbytes > total // 4


@given(st.sampled_from([4096, 1 << 16, 1 << 20]), st.integers(1, 1 << 42))
def test_tiles_that_records_have_keep_their_size_in_any_budget_that_moves_them(numel, total):
    least = 8 * numel * 16
    if total < least:
        with pytest.raises(HostMemoryError):
            divide(total, tile_numel=numel)
        return
    budget = divide(total, tile_numel=numel)
    assert budget.tile_numel == numel
    assert 4 <= budget.slots <= 12
    assert budget.slots * budget.slot_nbytes <= max(total // 4, 4 * budget.slot_nbytes)


@given(st.integers(least_budget(), 1 << 42), st.integers(0, 1 << 34))
def test_a_frozen_model_keeps_what_slots_for_updates_would_take(total, largest):
    frozen, budget = divide(total, largest, frozen=True), divide(total, largest)
    assert frozen.tile_numel == budget.tile_numel
    assert 4 <= frozen.slots <= budget.slots
    under_way = frozen.slots * frozen.slot_nbytes // 2  # as in FetchPass.tiles
    assert frozen.slots == budget.slots or under_way >= 8 << 20
    assert frozen.kept_nbytes >= budget.kept_nbytes
    assert divide(total, largest, frozen=True, on_device=True) == divide(total, largest, on_device=True)


def test_a_budget_that_cannot_work_is_refused_with_the_least_that_does():
    with pytest.raises(HostMemoryError, match=r"100\.0 KiB.*128\.0 KiB"):
        divide(100 << 10)
    divide(128 << 10)


@given(st.integers(1, 1 << 36), st.integers(0, 1 << 30))
def test_the_least_total_is_the_least(kept, largest):
    total = least_total(kept, largest)
    assert divide(total, largest).kept_nbytes >= kept
    if total > 1 << 20:
        assert divide(total - (1 << 20), largest).kept_nbytes < kept


def test_a_ledger_says_no_and_keeps_what_is_promised():
    ledger = Ledger(100)
    ledger.set_aside(30)
    assert ledger.try_reserve(70)
    assert not ledger.try_reserve(1)
    ledger.set_aside(-30)
    assert ledger.try_reserve(30)
    ledger.release(60)
    assert (ledger.held_nbytes, ledger.peak_nbytes, ledger.free_nbytes) == (40, 100, 60)


def test_slots_are_aligned_and_apart():
    pool = Pool(2 * BLOCK, 5)
    slots = [pool.lease() for _ in range(5)]
    assert pool.free == 0
    for number, slot in enumerate(slots):
        assert slot.address % BLOCK == 0
        view(slot.address, slot.nbytes)[:] = bytes([number]) * slot.nbytes
    found = [set(bytes(view(slot.address, slot.nbytes))) for slot in slots]
    assert found == [{number} for number in range(5)]
    for slot in slots:
        pool.give_back(slot)
    assert pool.free == 5


@pytest.mark.parametrize(("word", "told"), [("", (32 << 20, 64 << 20)), ("lean", (128 << 10, 0))])
def test_malloc_keeps_freed_blocks_unless_it_is_asked_to_be_lean(monkeypatch, word, told):
    calls = []
    monkeypatch.setattr(memory, "_tell_malloc", lambda *given: calls.append(given))
    monkeypatch.setenv("INFINITY_MALLOC", word)
    reuse_large_blocks(1 << 20)
    assert calls == [told]


@pytest.mark.parametrize(("word", "least"), [("", 32 << 20), ("lean", 128 << 10)])
def test_blocks_that_malloc_maps_by_themselves_are_told(monkeypatch, word, least):
    monkeypatch.setenv("INFINITY_MALLOC", word)
    assert [memory.is_mapped_apart(nbytes) for nbytes in (least - 1, least)] == [False, True]
    monkeypatch.setattr(memory, "_MALLOPT", None)
    assert not memory.is_mapped_apart(least), "another libc"


def test_an_unknown_word_for_malloc_is_refused(monkeypatch):
    monkeypatch.setenv("INFINITY_MALLOC", "leen")
    with pytest.raises(ConfigError, match='INFINITY_MALLOC=\'leen\': expected "keep" or "lean"'):
        reuse_large_blocks(1 << 20)


def test_an_arena_begins_as_zeros():
    arena = Arena(4 << 20)
    assert not any(view(arena.address, 4 << 20).tobytes())


def test_a_fork_that_drops_its_parents_arena_keeps_what_it_has_mapped_in_its_place():
    """A fork does not have an arena's memory, so its own may lie there."""
    kept = [Arena(1 << 20)]
    address = kept[0].address
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def work(say):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
        say(mapped=libc.mmap(address, 1 << 20, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address)
        kept.clear()
        gc.collect()
        ctypes.memset(address, 1, 1 << 20)
        say(alive=True)

    assert ended(work) == {"mapped": True, "alive": True}


def test_an_arena_on_huge_pages_begins_on_one_and_takes_no_more_memory_than_it_was_asked_for():
    nbytes = 2 * HUGE + 3 * mmap.PAGESIZE
    arena = Arena(nbytes, on_huge_pages=True)
    assert arena.address % HUGE == 0
    before = resident_nbytes()
    view(arena.address, nbytes)[:] = b"x" * nbytes
    assert resident_nbytes() - before <= nbytes + HUGE // 2
    assert Arena(mmap.PAGESIZE, on_huge_pages=True).nbytes == mmap.PAGESIZE


def resident_nbytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize(
    ("nbytes", "taken"),
    [
        (HUGE, HUGE + BLOCK),
        (11 * HUGE // 4, 3 * HUGE),
        (8 * HUGE, 8 * HUGE + BLOCK),
        (HUGE - 2 * BLOCK, HUGE),
        (3 * HUGE // 2, 0),
        (HUGE // 2, 0),
        (BLOCK, 0),
    ],
)
def test_a_frame_takes_a_page_or_fills_a_huge_one_and_is_not_made_where_that_is_much(nbytes, taken):
    assert framed_nbytes(nbytes) == taken

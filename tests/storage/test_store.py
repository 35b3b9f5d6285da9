"""Extents in host memory. Nothing is faked."""

import pytest

from infinity import HostMemoryError
from infinity.storage.memory import Ledger, view
from infinity.storage.store import HostStore


def test_extents_are_whole_blocks_of_memory_of_their_own():
    store = HostStore(Ledger(1 << 24))
    extents = [store.allocate(5000, f"unit {n}") for n in range(6)]
    assert [extent.nbytes for extent in extents] == [8192] * 6
    for number, extent in enumerate(extents):
        view(extent.offset, 8192)[:] = bytes([number]) * 8192
    assert [store.memory(extent)[:] for extent in extents] == [bytes([number]) * 8192 for number in range(6)]
    assert store.held_nbytes == store.ledger.held_nbytes == 6 * 8192
    store.free(extents[2])
    assert store.held_nbytes == store.ledger.held_nbytes == 5 * 8192
    assert store.allocate(8000, "another").nbytes == 8192


def test_memory_that_others_hold_is_left_to_them_with_what_it_had():
    store = HostStore(Ledger(1 << 24))
    old = store.allocate(4096, "unit")
    held = store.memory(old)
    held[:3] = b"old"
    new = store.replace(old)
    held[:3] = b"edi"
    assert (store.memory(new)[:3], store.held_nbytes) == (b"old", 4096)
    store.free(new)
    assert (held[:3], store.held_nbytes) == (b"edi", 0)


def test_bytes_set_aside_are_allocated_even_if_the_ledger_is_full():
    store = HostStore(Ledger(8192))
    store.ledger.set_aside(4096)
    store.allocate(4096, "unit")
    with pytest.raises(HostMemoryError, match="more"):
        store.allocate(4096, "more")
    assert store.allocate_promised(4096).nbytes == 4096
    assert store.ledger.held_nbytes == 8192


def test_host_memory_beyond_the_ledger_is_refused_with_the_numbers():
    store = HostStore(Ledger(1 << 20))
    extent = store.allocate(1 << 19, "layers.0.hi")
    with pytest.raises(HostMemoryError, match=r"layers\.1\.hi: 1\.0 MiB.*512\.0 KiB of 1\.0 MiB"):
        store.allocate(1 << 20, "layers.1.hi")
    store.free(extent)
    store.allocate(1 << 20, "layers.1.hi")

"""Extents in host memory. Nothing is faked."""

import pytest

from infinity import HostMemoryError
from infinity.memory import Arena, Ledger, view
from infinity.store import HostStore


def test_extents_hold_what_was_written_to_each():
    store, memory = HostStore(Ledger(1 << 24)), Arena(8192)
    extents = [store.allocate(5000, f"unit {n}") for n in range(6)]
    assert [extent.nbytes for extent in extents] == [8192] * 6
    for number, extent in enumerate(extents):
        view(memory.address, 8192)[:] = bytes([number]) * 8192
        store.write(extent, 0, memory.address, 8192, "unit", memory).wait()
    for number, extent in reversed(list(enumerate(extents))):
        store.read(extent, 4096, memory.address, 4096, "unit", memory).wait()
        assert bytes(view(memory.address, 4096)) == bytes([number]) * 4096
    store.free(extents[2])
    assert store.allocate(8000, "another").nbytes == 8192


def test_host_memory_beyond_the_ledger_is_refused_with_the_numbers():
    store = HostStore(Ledger(1 << 20))
    extent = store.allocate(1 << 19, "layers.0.hi")
    with pytest.raises(HostMemoryError, match=r"layers\.1\.hi: 1\.0 MiB.*512\.0 KiB of 1\.0 MiB"):
        store.allocate(1 << 20, "layers.1.hi")
    store.free(extent)
    store.allocate(1 << 20, "layers.1.hi")

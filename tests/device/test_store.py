"""Extents in a device's memory, beside copies that are late. Faked: a device's streams, by LateStreams."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.device.device import AcceleratorDevice
from infinity.storage.store import Request
from streams import LateStreams

NBYTES = 4096


@pytest.fixture
def store():
    return AcceleratorDevice(torch.device("cpu"), LateStreams()).open_store()


def begin(store, extent, host, copy):
    """Begin a copy between an extent and host memory; return it, and what refers to the extent's memory."""
    memory = StorageWeakRef(store.tensor(extent).untyped_storage())
    return copy(Request(extent, 0, host.data_ptr(), NBYTES, "hi", host)), memory


@pytest.mark.parametrize("way", ["replace", "free"])
def test_a_copy_from_the_device_keeps_memory_that_a_use_replaces_or_frees_meanwhile(store, way):
    """As a commit copies weights that the forward beside it leaves to their views."""
    extent, host = store.allocate(NBYTES, "hi"), torch.zeros(NBYTES, dtype=torch.uint8)
    store.tensor(extent).fill_(7)
    copy, memory = begin(store, extent, host, store.read)
    getattr(store, way)(extent)
    assert not memory.expired()
    copy.wait()
    assert host.eq(7).all()


def test_an_extent_whose_memory_is_replaced_stays_the_same_with_its_bytes_and_its_count(store):
    extent, host = store.allocate(NBYTES, "hi"), torch.zeros(NBYTES, dtype=torch.uint8)
    old = store.tensor(extent)
    old.fill_(7)
    assert store.replace(extent) == extent
    assert store.held_nbytes == extent.nbytes
    old.zero_()
    begin(store, extent, host, store.read)[0].wait()
    assert host.eq(7).all()


def test_a_copy_to_the_device_keeps_memory_that_is_freed_meanwhile(store):
    extent, host = store.allocate(NBYTES, "hi"), torch.full((NBYTES,), 7, dtype=torch.uint8)
    copy, memory = begin(store, extent, host, store.write)
    store.free(extent)
    assert not memory.expired()
    copy.wait()

"""Extents in a device's memory, beside copies that are late. Faked: a device's streams, by LateStreams."""

import pytest
import torch

from infinity.device.device import AcceleratorDevice
from infinity.storage.store import Request
from streams import LateStreams

NBYTES = 4096


@pytest.fixture
def store():
    return AcceleratorDevice(torch.device("cpu"), LateStreams()).open_store()


def begin(store, extent, host, copy):
    """Begin a copy between an extent and host memory."""
    return copy(Request(extent, 0, host.data_ptr(), NBYTES, "hi", host))


@pytest.mark.parametrize("way", ["replace", "free"])
def test_memory_that_a_use_replaces_or_frees_is_nobody_elses_before_a_copy_from_it_is_over(store, way):
    """As a commit copies weights that the forward beside it leaves to their views."""
    extent, host = store.allocate(NBYTES, "hi"), torch.zeros(NBYTES, dtype=torch.uint8)
    store.tensor(extent).fill_(7)
    copy = begin(store, extent, host, store.read)
    assert not host.any()
    getattr(store, way)(extent)
    assert host.eq(7).all(), "the thread that computes goes on behind the copy"
    copy.wait()


def test_memory_that_is_freed_is_nobody_elses_before_a_copy_to_it_is_over(store):
    extent, host = store.allocate(NBYTES, "hi"), torch.full((NBYTES,), 7, dtype=torch.uint8)
    memory = store.tensor(extent)
    copy = begin(store, extent, host, store.write)
    store.free(extent)
    assert memory.eq(7).all()
    copy.wait()


def test_an_extent_whose_memory_is_replaced_stays_the_same_with_its_bytes_and_its_count(store):
    extent, host = store.allocate(NBYTES, "hi"), torch.zeros(NBYTES, dtype=torch.uint8)
    old = store.tensor(extent)
    old.fill_(7)
    assert store.replace(extent) == extent
    assert store.held_nbytes == extent.nbytes
    old.zero_()
    begin(store, extent, host, store.read).wait()
    assert host.eq(7).all()

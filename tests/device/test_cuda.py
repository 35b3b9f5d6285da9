"""Pinned memory and the buffers of downloads. Trusted: torch's word on who shares a storage; torch.cuda is
faked.
"""

import contextlib
import gc
import logging
import threading
import time

import pytest
import torch

from infinity.device.cuda import CudaStreams
from infinity.device.device import AcceleratorDevice
from infinity.storage.memory import Ledger
from streams import RecordedStreams


@pytest.fixture
def streams():
    return RecordedStreams()


@pytest.fixture
def device(streams):
    opened = AcceleratorDevice(torch.device("cpu"), streams)
    opened.room_for_downloads(Ledger(1 << 20))
    return opened


def test_in_the_steady_state_no_buffer_is_allocated(device, streams):
    sizes = (3, 5, 3, 700)
    for _ in range(4):
        found = [device.to_host(torch.full((size,), float(size))) for size in sizes]
        assert [one[0].item() for one in found] == [3, 5, 3, 700]
        del found
    assert device.memory.made == len(sizes)
    assert sorted(streams.locked.values()) == [12, 12, 20, 2800]


def test_a_buffer_is_lent_while_anything_shares_its_memory(device):
    kept = device.to_host(torch.ones(4))[2:].view(1, 2)
    other = device.to_host(torch.zeros(4))
    assert device.memory.made == 2
    assert kept.tolist() == [[1, 1]]
    del kept, other
    gc.collect()
    assert device.memory.free_nbytes == 32
    again = device.to_host(torch.ones(4))
    assert device.memory.free_nbytes == 16
    del again


def test_free_buffers_stay_within_their_limit_and_the_longest_idle_goes_first(device, streams):
    device.room_for_downloads(Ledger(40))
    first, second = device.to_host(torch.ones(4)), device.to_host(torch.ones(6))
    del first
    assert device.memory.free_nbytes == 16
    del second
    assert device.memory.free_nbytes == 40
    third = device.to_host(torch.ones(1))
    del third
    assert device.memory.free_nbytes == 28
    assert sorted(streams.locked.values()) == [4, 24]


def test_a_buffer_is_not_unlocked_under_a_download(device, streams):
    device.room_for_downloads(Ledger(0))
    download = device.download(torch.ones(3))
    del download  # nobody waited; unlocking is an access that RecordedStreams orders
    assert list(streams.locked.values()) == [12]
    device.memory.synchronize()
    device.memory.look_at_late()
    assert streams.locked == {}


def test_a_buffer_is_not_unlocked_under_an_upload(device, streams):
    device.room_for_downloads(Ledger(0))
    flat = torch.zeros(3)
    device.allocated(flat)
    lent = device.to_host(torch.ones(3))  # an activation, offloaded
    device.upload(flat, 0, lent.data_ptr(), 3)
    del lent  # the graph that held it is gone
    assert list(streams.locked.values()) == [12]
    assert flat.tolist() == [1, 1, 1]
    device.memory.synchronize()
    device.pin(4096, 64)
    assert streams.locked == {4096: 64}, "and goes before other memory is locked"


def test_free_buffers_go_where_the_budget_gives_their_bytes_to_pinned_memory(device, streams):
    share = Ledger(64)
    device.room_for_downloads(share)
    lent = device.to_host(torch.ones(16))
    del lent
    assert list(streams.locked.values()) == [64]
    share.reserve_anyway(64)
    device.pin(4096, 64)
    assert streams.locked == {4096: 64}


def test_nothing_is_locked_in_the_place_of_buffers_that_are_not_unlocked_yet(device, streams, monkeypatch):
    lent = device.to_host(torch.ones(16))
    begun, end, pinned = threading.Event(), threading.Event(), threading.Event()
    unlock = streams.unlock

    def slowly(address):
        begun.set()
        assert end.wait(60)
        unlock(address)

    def pin():
        device.pin(4096, 64)
        pinned.set()

    device.memory.synchronize()
    monkeypatch.setattr(streams, "unlock", slowly)
    device.room_for_downloads(Ledger(0))
    lent = [lent]
    dropping = threading.Thread(target=lent.clear)
    pinning = threading.Thread(target=pin)
    dropping.start()
    assert begun.wait(60)
    pinning.start()
    assert not pinned.wait(0.1)
    end.set()
    dropping.join()
    pinning.join()
    assert streams.locked == {4096: 64}


def test_what_is_lent_beside_downloads_is_page_locked(device, streams):
    lent = device.take_host_buffer(5, torch.bfloat16)
    assert (lent.shape, lent.dtype, streams.locked) == ((5,), torch.bfloat16, {lent.data_ptr(): 10})


# Pinning


def test_memory_is_pinned_to_the_byte_and_unpinned_at_the_end(device, streams):
    device.pin(4096, 12345)
    device.pin(1 << 20, 100)
    assert streams.locked == {4096: 12345, 1 << 20: 100}
    device.unpin(1 << 20)
    device.unpin(77)
    held = device.to_host(torch.ones(3))
    assert device.pageable_reason == ""
    device.close()
    assert streams.locked == {}
    assert held.tolist() == [1, 1, 1]
    del held
    assert device.memory.free_nbytes == 0


def test_what_cannot_be_pinned_is_said_once_and_copied_all_the_same(caplog):
    device = AcceleratorDevice(torch.device("cpu"), RecordedStreams("out of memory (2)"))
    with caplog.at_level(logging.WARNING, "infinity"):
        device.pin(4096, 1 << 20)
        assert device.to_host(torch.ones(3)).tolist() == [1, 1, 1]
    assert len(caplog.records) == 1
    assert "1.0 MiB of host memory cannot be page-locked: out of memory (2)" in caplog.text
    assert "ulimit -l unlimited" in caplog.text
    assert device.pageable_reason == "out of memory (2)"
    device.close()


class Runtime:
    """Stands in for torch.cuda.cudart(): takes its time, and says in which thread."""

    def __init__(self, code):
        self.code, self.calls = code, []

    def _call(self, *what):
        time.sleep(0.01)
        self.calls.append((threading.current_thread().name, *what))
        return self.code

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        return self._call(address, nbytes)

    def cudaHostUnregister(self, address):  # noqa: N802
        return self._call(address)

    def cudaError(self, code):  # noqa: N802
        return code

    def cudaGetErrorString(self, code):  # noqa: N802
        return f"error {code}"


def test_memory_is_pinned_and_unpinned_on_the_ranks_own_device(monkeypatch):
    runtime, on = Runtime(0), []

    @contextlib.contextmanager
    def device(chosen):
        on.append(chosen.index)
        yield
        on.append(len(runtime.calls))

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", device)
    streams = CudaStreams(torch.device("cuda:3"))
    streams.lock(4096, 100)
    streams.unlock(4096)
    assert on == [3, 1, 3, 2]  # a new thread would be on device 0


@pytest.mark.parametrize(("code", "failure"), [(0, ""), (2, "error 2 (2)")])
def test_what_cuda_remembers_of_a_refusal_stays_in_a_thread_of_its_own(monkeypatch, code, failure):
    runtime = Runtime(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    streams = CudaStreams(torch.device("cuda:0"))
    assert streams.lock(4096, 100) == failure
    streams.unlock(4096)
    assert runtime.calls == [("infinity-pin", 4096, 100), ("infinity-unpin", 4096)]

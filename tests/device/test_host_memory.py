"""Page-locked buffers, and the copies that use them. Faked: the accelerator, whose copies are as late as they
may be.
"""

import pytest
import torch

from infinity.device.device import AcceleratorDevice
from infinity.storage.memory import Ledger
from streams import LateStreams

NUMEL = 512


@pytest.fixture
def device():
    device = AcceleratorDevice(torch.device("cpu"), LateStreams())
    device.room_for_downloads(Ledger(1 << 20))
    yield device
    device.close()


def buffer(device, value):
    return device.take_host_buffer(NUMEL, torch.bfloat16).fill_(value)


def downloaded(device):
    """Begin a download, and drop it; return its transfer, where it goes, and what it reads."""
    values = torch.full((NUMEL,), 5.0, dtype=torch.bfloat16)
    begun = device.download(values)
    return begun.transfer, begun.tensor.data_ptr(), values


def uploaded(device):
    """Begin an upload, and drop what it reads; return its transfer, where that was, and where it goes."""
    flat, host = torch.zeros(NUMEL, dtype=torch.bfloat16), buffer(device, 5)
    device.allocated(flat)
    return device.upload(flat, 0, host.data_ptr(), NUMEL), host.data_ptr(), flat


@pytest.mark.parametrize("begin", [downloaded, uploaded])
def test_a_buffer_that_a_copy_still_uses_is_lent_to_nobody(device, begin):
    transfer, address, values = begin(device)
    other = buffer(device, 7)
    assert other.data_ptr() != address
    transfer.wait()
    assert other.eq(7).all()
    assert values.eq(5).all()
    assert buffer(device, 9).data_ptr() == address, "it is over, and the buffer is there again"
    assert device.memory.made == 2


@pytest.mark.parametrize("begin", [downloaded, uploaded])
def test_a_buffer_whose_copy_is_over_is_lent_again_at_once(device, begin):
    transfer, address, _ = begin(device)
    transfer.wait()
    assert buffer(device, 7).data_ptr() == address
    assert device.memory.made == 1


def test_a_buffer_that_a_copy_still_uses_is_free_for_a_download_when_that_is_over(device):
    transfer, _, _ = downloaded(device)
    assert not device.prepare(2 * NUMEL, 1)
    transfer.wait()
    assert device.prepare(2 * NUMEL, 1)
    assert device.memory.made == 1


def test_memory_of_a_copy_that_is_still_under_way_is_unlocked_at_the_end_alone(monkeypatch):
    unlocked = []
    monkeypatch.setattr(LateStreams, "unlock", lambda streams, address: unlocked.append(address))
    device = AcceleratorDevice(torch.device("cpu"), LateStreams())
    _, address, _ = downloaded(device)
    device.memory.trim(0)
    assert unlocked == []
    device.close()
    assert unlocked == [address]

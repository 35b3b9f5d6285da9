"""The devices. Trusted: the copies themselves, and CUDA's contract of streams and events as written in
RecordedStreams, which stands in for torch.cuda and knows of every access what it is certain to come after.
"""

import contextlib

import pytest
import torch

from infinity.device.device import AcceleratorDevice, CpuDevice, open_device
from infinity.errors import ConfigError
from streams import RaceError, RecordedStreams


@pytest.fixture
def streams():
    return RecordedStreams()


@pytest.fixture
def device(streams):
    return AcceleratorDevice(torch.device("cpu"), streams)


def slot(values):
    """A slot of the lane, and its address."""
    memory = torch.tensor(values, dtype=torch.bfloat16)
    return memory, memory.data_ptr()


def storage(numel=8):
    return torch.zeros(numel, dtype=torch.bfloat16)


def uploaded(device, flat, values=(1, 2, 3, 4, 5, 6, 7, 8), tile=4):
    """Upload tile by tile, as the lane does; the slots and their transfers."""
    device.allocated(flat)
    slots = [slot(values[start : start + tile]) for start in range(0, len(values), tile)]
    return [
        (memory, device.upload(flat, number * tile, address, tile))
        for number, (memory, address) in enumerate(slots)
    ]


# What RecordedStreams sees


def test_an_event_orders_and_nothing_else_does(streams):
    tensor, other = storage(), streams.open()
    streams.kernel(writes=[tensor])
    with streams.refuses("a copy reads, on stream 2, not ordered behind: a kernel writes"):
        streams.copy(other, storage(), tensor)
    streams.wait(other, streams.record(streams.main))
    streams.copy(other, storage(), tensor)
    with streams.refuses("a kernel writes"):
        streams.kernel(writes=[tensor])


def test_an_event_orders_what_came_before_it_alone(streams):
    tensor, other = storage(), streams.open()
    early = streams.record(streams.main)
    streams.kernel(writes=[tensor])
    streams.wait(other, early)
    with streams.refuses():
        streams.copy(other, storage(), tensor)


def test_a_race_that_nobody_expects_fails_the_test_even_where_errors_are_swallowed(streams):
    tensor = storage()
    streams.kernel(writes=[tensor])
    with contextlib.suppress(RaceError):
        streams.host_reads(tensor)
    with streams.refuses():
        streams.host_writes(tensor)
    with pytest.raises(RaceError, match="the host reads"):
        streams.raise_unseen()
    streams.raise_unseen()


# Uploads


def test_uploaded_tiles_are_what_the_slots_held(device):
    flat = storage()
    uploaded(device, flat)
    assert flat.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_an_upload_comes_behind_kernels_that_still_use_the_memory(device, streams):
    flat = storage()
    streams.kernel(reads=[flat], writes=[flat])  # of the tensor that had this memory before
    uploaded(device, flat)


def test_every_time_memory_is_allocated_its_uploads_wait_anew(device, streams):
    flat = storage()
    for _ in range(3):
        for _, transfer in uploaded(device, flat):
            transfer.wait()
        device.arrived(flat)
        streams.kernel(reads=[flat])
        device.leaving(flat)
        streams.kernel(writes=[flat])


def test_an_upload_to_memory_nobody_announced_is_refused(device):
    with pytest.raises(AssertionError, match="allocated"):
        device.upload(storage(), 0, slot([1.0])[1], 1)


def test_a_unit_is_read_behind_its_last_tile(device, streams):
    flat = storage()
    uploaded(device, flat)
    with streams.refuses("a kernel reads"):
        streams.kernel(reads=[flat[4:]])
    device.arrived(flat)
    streams.kernel(reads=[flat])


def test_arrival_makes_no_host_wait(device, streams):
    flat = storage()
    (memory, transfer), _ = uploaded(device, flat)
    device.arrived(flat)
    assert not transfer.done
    with streams.refuses("the host writes"):
        streams.host_writes(memory)


def test_a_unit_does_not_wait_for_the_uploads_of_the_next(device, streams):
    first, second = storage(), storage()
    uploaded(device, first)
    uploaded(device, second)
    device.arrived(first)
    streams.kernel(reads=[first])
    with streams.refuses():
        streams.kernel(reads=[second])
    device.arrived()
    streams.kernel(reads=[second])


def test_a_slot_is_free_when_its_transfer_is_over(device, streams):
    tiles = uploaded(device, storage())
    for memory, transfer in tiles:
        with streams.refuses("the host writes, on host, not ordered behind: a copy reads"):
            streams.host_writes(memory)
        transfer.wait()
        assert transfer.done
        streams.host_writes(memory)


def test_waiting_for_a_tile_waits_for_no_later_tile(device, streams):
    (first, transfer), (second, later) = uploaded(device, storage())
    transfer.wait()
    streams.host_writes(first)
    assert not later.done
    with streams.refuses():
        streams.host_writes(second)


def test_a_wait_with_a_limit_gives_up(device):
    (_, transfer), _ = uploaded(device, storage())
    with pytest.raises(TimeoutError, match=r"0\.001 s"):
        transfer.wait(0.001)
    assert transfer.ended_s is None
    transfer.wait()
    transfer.wait(0.001)
    assert transfer.began_s < transfer.ended_s


def test_memory_of_a_unit_that_nobody_used_is_given_back_behind_its_uploads(device, streams):
    flat = storage()
    uploaded(device, flat)
    device.leaving(flat)
    streams.recycle(flat)
    streams.kernel(writes=[flat])


def test_memory_used_on_a_further_stream_is_given_back_behind_that_use(device, streams):
    flat = storage()
    uploaded(device, flat)
    streams.on = streams.open()
    device.arrived(flat)
    streams.kernel(reads=[flat])
    streams.on = streams.main
    device.leaving(flat)
    streams.recycle(flat)
    streams.kernel(writes=[flat])


def test_another_stream_fills_what_nothing_was_uploaded_to_behind_its_former_owner(device, streams):
    flat = storage()
    streams.kernel(reads=[flat])  # of the tensor that had this memory before
    device.allocated(flat)
    streams.on = streams.open()
    device.arrived(flat)  # of a rank whose share is padding
    streams.kernel(writes=[flat])
    device.assembled(flat)
    streams.on = streams.main
    device.arrived(flat)
    streams.kernel(reads=[flat])


def test_memory_that_another_stream_alone_has_filled_is_given_back_behind_that(device, streams):
    flat = storage()
    device.allocated(flat)
    streams.on = streams.open()
    device.arrived(flat)
    streams.kernel(writes=[flat])  # and interrupted, so that nobody says it is assembled
    streams.on = streams.main
    device.leaving(flat)
    streams.recycle(flat)
    streams.kernel(writes=[flat])


def test_a_unit_without_elements_needs_nothing(device):
    flat = storage(0)
    device.allocated(flat)
    device.arrived(flat)
    device.leaving(flat)


# Downloads


def gradient(streams, values=(1.0, 2.0, 3.0)):
    tensor = torch.tensor(values, dtype=torch.bfloat16)
    streams.kernel(writes=[tensor])
    return tensor


def test_a_gradient_is_read_when_its_download_is_over(device, streams):
    source = gradient(streams)
    download = device.download(source)
    assert not download.done
    with streams.refuses("the host reads, on host, not ordered behind: a copy writes"):
        streams.host_reads(download.tensor)
    download.wait()
    streams.host_reads(download.tensor)
    assert download.done
    assert torch.equal(download.tensor, source)
    assert download.tensor.data_ptr() != source.data_ptr()


def test_the_backward_goes_on_beside_a_download(device, streams):
    source, later = gradient(streams), storage()
    download = device.download(source)
    streams.kernel(reads=[source], writes=[later])
    download.wait()
    with streams.refuses():
        streams.host_reads(later)  # the host waited for the copy, not for that kernel


def test_a_gradients_memory_is_held_until_its_download_is_over_and_given_out_again_behind_it(device, streams):
    source = gradient(streams)
    download, address = device.download(source), source.data_ptr()
    held = [one.data_ptr() for _, _, parts in device.room._leaving for one in parts]
    assert held == [address]
    with streams.refuses():
        streams.kernel(writes=[source])
    download.wait()
    device.room.collect()
    assert not device.room._leaving
    streams.recycle(source)
    streams.kernel(writes=[source])


def test_a_transposed_gradient_comes_contiguous(device):
    source = torch.arange(6.0).view(2, 3).t()
    found = device.to_host(source)
    assert found.is_contiguous()
    assert torch.equal(found, source)
    assert found.dtype == torch.float32


def test_to_host_has_waited(device, streams):
    streams.host_reads(device.to_host(gradient(streams)))


def test_an_empty_gradient_is_over_at_once(device):
    download = device.download(torch.empty(0, 3))
    assert download.done
    assert download.tensor.shape == (0, 3)


def test_close_waits_for_what_is_under_way(device, streams):
    (memory, transfer), _ = uploaded(device, storage())
    download = device.download(gradient(streams))
    device.close()
    streams.host_writes(memory)
    streams.host_reads(download.tensor)
    assert transfer.done
    assert download.done


# The CPU


def test_on_the_cpu_everything_is_over_at_once():
    device = CpuDevice()
    flat, (_, address) = storage(4), slot([1, 2])
    device.pin(address, 4)
    device.allocated(flat)
    assert device.upload(flat, 1, address, 2).done
    device.arrived(flat)
    device.arrived()
    device.leaving(flat)
    assert flat.tolist() == [0, 1, 2, 0]
    tensor = torch.ones(3)
    download = device.download(tensor)
    assert download.done
    assert download.tensor is tensor
    assert device.to_host(tensor) is tensor
    assert device.to_host(torch.ones(2, 3).t()).is_contiguous()
    device.synchronize()
    device.close()


def test_a_cuda_device_that_is_not_there_is_named():
    assert isinstance(open_device("cpu"), CpuDevice)
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"sees {count} CUDA devices"):
        open_device(f"cuda:{count}")

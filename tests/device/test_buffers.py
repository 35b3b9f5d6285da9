"""Host memory that is lent as tensors. Nothing is faked; a subclass notes what is made and dropped."""

import gc
import mmap
import threading

import pytest
import torch

from infinity.device.buffers import Buffers
from infinity.storage.memory import Ledger


class Noted(Buffers):
    """Notes the addresses of buffers, as a device that page-locks them does."""

    def __init__(self, spare_nbytes=1 << 30):
        super().__init__(Ledger(spare_nbytes))
        self.live, self.dropped = [], []

    def was_made(self, arena):
        self.live.append(arena.address)

    def are_dropped(self, arenas):
        for arena in arenas:
            self.live.remove(arena.address)
            self.dropped.append(arena.address)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_lent_tensor_is_what_was_asked_for_on_whole_pages(dtype):
    tensor = Noted().take(5000, dtype)
    assert (tensor.shape, tensor.dtype) == ((5000,), dtype)
    assert tensor.data_ptr() % mmap.PAGESIZE == 0
    assert tensor.fill_(3).unique().tolist() == [3]


def test_a_buffer_is_lent_again_when_the_last_tensor_that_shares_it_is_gone():
    buffers = Noted()
    tensor = buffers.take(3000, torch.bfloat16)
    address, view = tensor.data_ptr(), tensor[7:].view(-1, 1)
    del tensor
    assert buffers.free_nbytes == 0
    other = buffers.take(3000, torch.bfloat16).fill_(1)
    view.fill_(2)
    assert other.data_ptr() != address
    assert other.unique().tolist() == [1]
    del view
    assert buffers.free_nbytes == 6000
    assert buffers.take(1500, torch.float32).data_ptr() == address
    assert buffers.made == 2


def test_a_buffer_in_a_cycle_comes_back_when_the_cycle_is_collected():
    buffers = Noted()
    cycle = [buffers.take(100, torch.float32)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert buffers.free_nbytes == 400


def test_a_buffer_serves_its_own_size_alone_the_last_one_used_first():
    buffers = Noted()
    lent = [buffers.take(1000, torch.float32) for _ in range(3)]
    addresses = [tensor.data_ptr() for tensor in lent]
    for number in (1, 2, 0):
        lent[number] = None
    assert buffers.take(999, torch.float32).data_ptr() not in addresses
    assert buffers.made == 4
    again = [buffers.take(1000, torch.float32) for _ in range(3)]
    assert [tensor.data_ptr() for tensor in again] == [addresses[number] for number in (0, 2, 1)]
    assert buffers.made == 4


def test_beyond_what_may_be_spare_the_longest_idle_buffer_goes_back_to_the_system():
    buffers = Noted(spare_nbytes=8000)
    lent = [buffers.take(1000, torch.float32) for _ in range(3)]
    addresses = [tensor.data_ptr() for tensor in lent]
    for number in (1, 2, 0):
        lent[number] = None
    assert buffers.dropped == [addresses[1]]
    assert buffers.live == [addresses[0], addresses[2]]
    assert buffers.free_nbytes == 8000


def test_room_that_shrinks_is_left_at_the_latest_when_a_buffer_is_made():
    share = Ledger(1 << 20)
    buffers = Buffers(share)
    buffers.take(1000, torch.float32)
    share.reserve_anyway((1 << 20) + 1)
    assert buffers.free_nbytes == 4000
    kept = buffers.take(1001, torch.float32)
    assert buffers.free_nbytes == 0
    del kept
    assert buffers.free_nbytes == 0


def test_trimming_leaves_what_is_lent_alone():
    buffers = Noted()
    lent = buffers.take(1000, torch.float32).fill_(5)
    buffers.take(1000, torch.float32)
    buffers.trim(0)
    assert (buffers.free_nbytes, buffers.live) == (0, [lent.data_ptr()])
    assert lent.unique().tolist() == [5]


def test_nothing_takes_no_buffer():
    buffers = Noted()
    assert buffers.take(0, torch.bfloat16).shape == (0,)
    assert buffers.made == 0


def test_a_tensor_lent_in_inference_mode_may_be_changed_outside_of_it():
    with torch.inference_mode():
        tensor = Noted().take(10, torch.float32)
    assert not tensor.is_inference()
    assert not tensor.requires_grad


def test_a_forked_child_takes_nothing_back():
    buffers = Noted()
    tensor = buffers.take(1000, torch.float32)
    buffers._pid += 1  # the process that lent it was another
    del tensor
    assert buffers.free_nbytes == 0


def test_threads_never_share_a_buffer_and_all_come_back(seed):
    buffers = Noted()
    wrong = []

    def borrow(number):
        for turn in range(200):
            held = [buffers.take(64 << (turn + one) % 3, torch.float32) for one in range(3)]
            for one, tensor in enumerate(held):
                tensor.fill_(10 * number + one)
            wrong.extend(
                turn for one, tensor in enumerate(held) if tensor.unique().tolist() != [10 * number + one]
            )

    threads = [threading.Thread(target=borrow, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(buffers.live) == buffers.made <= 4 * 3 * 3
    assert buffers.free_nbytes == sum(arena.nbytes for arena in buffers._free)
    assert sorted(arena.address for arena in buffers._free) == sorted(buffers.live)


def test_a_framed_tensor_begins_in_the_middle_of_a_page_that_is_its_own_as_is_the_one_in_which_it_ends():
    buffers, numel, nbytes = Noted(), 1 << 20, (1 << 21) + mmap.PAGESIZE
    tensor = buffers.take_framed(numel, torch.bfloat16, 1000)
    (arena,) = buffers.live
    assert arena % (1 << 21) == 0
    assert tensor.data_ptr() == arena + 1000
    assert tensor.storage_offset() == 0
    assert (buffers.lent_nbytes, tensor.untyped_storage().nbytes()) == (nbytes, 2 * numel)
    assert tensor.fill_(3).unique().tolist() == [3]
    del tensor
    assert (buffers.lent_nbytes, buffers.free_nbytes) == (0, nbytes)
    assert buffers.take_framed(numel, torch.bfloat16, 24).data_ptr() == arena + 24
    assert buffers.take_framed(0, torch.bfloat16, 24).numel() == 0

"""Bytes of device memory, and how room is made. Faked: the work that bytes leave with, and what gives way."""

import weakref

import pytest
import torch

from infinity.device.blocks import DeviceBlocks
from infinity.device.device import AcceleratorDevice
from infinity.device.room import DeviceRoom
from infinity.errors import DeviceMemoryError
from infinity.sizes import DEVICE_BLOCK
from streams import LateStreams

B = DEVICE_BLOCK


class Work:
    """Is over when it is waited for."""

    def __init__(self, log, name):
        self.done, self._log, self._name = False, log, name

    def wait(self):
        self.done = True
        self._log.append(f"wait for {self._name}")


class Units:
    """Units of one block each that wait on the device, and give way."""

    def __init__(self, room, log, count):
        self._room, self._log, self.count = room, log, count
        for _ in range(count):
            room.take(1, "a unit")

    def give_way(self):
        if not self.count:
            return False
        self.count -= 1
        self._room.give_back(B)
        self._log.append("one gives way")
        return True


@pytest.fixture
def log():
    return []


def opened(log, blocks, units=0):
    room = DeviceRoom()
    holders = Units(room, log, units)
    room.open(blocks * B, holders.give_way)
    return room


def test_a_tensor_takes_whole_blocks_until_it_is_given_back(log):
    room = opened(log, 4)
    assert (room.take(1, "one"), room.take(B + 1, "two"), room.take(0, "none")) == (B, 2 * B, 0)
    assert (room.fits(B), room.fits(B + 1)) == (True, False)
    room.give_back(2 * B)
    assert room.fits(3 * B)


def test_what_leaves_is_waited_for_the_oldest_first_and_only_as_far_as_room_is_lacking(log):
    room = opened(log, 3)
    over = []
    room.over.append(lambda work, nbytes: over.append(nbytes))
    for name in ("first", "second", "third"):
        room.leaves(room.take(B, name), Work(log, name))
    room.take(B, "a unit")
    assert (log, over) == (["wait for first"], [B])


def test_before_anything_gives_way_all_that_leaves_is_waited_for(log):
    room = opened(log, 4, units=2)
    room.leaves(room.take(2 * B, "a gradient"), Work(log, "a gradient"))
    room.take(3 * B, "a unit")
    assert log == ["wait for a gradient", "one gives way"]
    assert room.lacked_nbytes == B


def test_a_unit_ahead_of_its_use_takes_no_others_place(log):
    room = opened(log, 2, units=2)
    assert not room.fits(B)
    assert log == []


def test_where_nothing_is_left_to_give_way_the_numbers_and_the_cure_are_named(log):
    room = opened(log, 3, units=1)
    room.take(2 * B, "a block in use")
    with pytest.raises(
        DeviceMemoryError, match=r"layer 7: 1\.0 KiB do not fit device_memory=1\.5 KiB.*2048 bytes"
    ):
        room.take(2 * B, "layer 7")
    assert log == ["one gives way"]


def test_several_tensors_are_taken_together_or_not_at_all(log):
    room = opened(log, 3)
    with pytest.raises(DeviceMemoryError, match="a reduction"):
        room.take_all([B, 1, 2 * B], "a reduction")
    assert room.ledger.held_nbytes == 0
    assert room.take_all([B, 1, 0], "a reduction") == room.ledger.held_nbytes == 2 * B


def test_a_unit_that_torch_has_no_memory_for_is_counted_no_more(monkeypatch):
    device = AcceleratorDevice(torch.device("cpu"), LateStreams())
    monkeypatch.setattr(torch, "empty", _out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        DeviceBlocks(device).take(1024, torch.bfloat16)
    assert device.room.ledger.held_nbytes == 0


def test_a_download_that_does_not_begin_is_counted_no_more(monkeypatch):
    device = AcceleratorDevice(torch.device("cpu"), LateStreams())
    monkeypatch.setattr(device.memory, "take", _out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        device.download(torch.ones(1024))
    assert device.room.ledger.held_nbytes == 0


def _out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("planted")


def test_what_somebody_else_counts_goes_with_its_copy_whatever_is_copied_before_it(log):
    room = opened(log, 1)
    slow, fast = Work(log, "slow"), Work(log, "fast")
    of_slow, of_fast = torch.zeros(1), torch.zeros(1)
    seen = weakref.ref(of_slow), weakref.ref(of_fast)
    room.leaves(0, slow, of_slow)
    room.leaves(0, fast, of_fast)
    del of_slow, of_fast
    fast.done = True
    room.let_go()
    assert [one() is None for one in seen] == [False, True]
    room.empty()  # the device has no memory left
    assert (seen[0](), log) == (None, ["wait for slow"])
    assert room.ledger.held_nbytes == 0

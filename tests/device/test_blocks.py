"""Memory of units in use and of those that wait, where the CPU computes. Nothing is faked."""

from collections import deque

import torch

from infinity.device.blocks import HostBlocks
from infinity.storage.memory import Ledger

LAYER = [1000, 500, 500, 1000, 2750, 2750, 2750]
"""Elements of a layer's units: four of attention, of two sizes, and three behind it."""
HEAD = 8000


def walk(blocks, share, layers, waiting=8):
    """Use units one after the other, of which the next `waiting` wait, as far as the share has room."""
    sizes, ahead = deque([*LAYER * layers, HEAD]), deque()
    while sizes or ahead:
        while sizes and len(ahead) < waiting and (not ahead or share.try_reserve(4 * sizes[0])):
            ahead.append((blocks.take(sizes.popleft(), torch.float32), len(ahead) > 0))
        used, reserved = ahead.popleft()
        if reserved:
            share.release(used.nbytes)
        del used


def test_units_of_several_sizes_get_the_memory_of_those_before_them_where_three_of_the_largest_may_wait():
    share = Ledger(4 * 24000)
    blocks = HostBlocks(share)
    for _ in range(3):
        walk(blocks, share, layers=5)
        blocks.period_ended()
    made = blocks.buffers.made
    for _ in range(4):
        walk(blocks, share, layers=5)
        blocks.period_ended()
    assert blocks.buffers.made == made


def test_what_is_lent_and_free_of_a_full_window_is_never_more_than_was_lent_at_once():
    share = Ledger(4 * 6000)
    share.reserve_anyway(share.limit_nbytes)  # by units that wait
    blocks = HostBlocks(share)
    lent = [blocks.take(numel, torch.float32) for numel in LAYER]
    most = blocks.buffers.lent_nbytes
    for turn in range(20):
        lent[turn % 5] = None
        assert blocks.buffers.free_nbytes + blocks.buffers.lent_nbytes <= most
        lent[turn % 5] = blocks.take(900 + 100 * turn, torch.float32)
        most = max(most, blocks.buffers.lent_nbytes)


def test_of_a_whole_model_that_was_in_use_no_more_stays_than_the_shares_have_nor_longer_than_two_periods():
    share = Ledger(4 * 2000)
    blocks = HostBlocks(share)
    lent = [blocks.take(numel, torch.float32) for numel in LAYER * 10]
    del lent
    assert blocks.buffers.free_nbytes <= share.limit_nbytes
    share.reserve_anyway(share.limit_nbytes)  # others wait
    for _ in range(2):
        blocks.period_ended()
    blocks.take(10, torch.float32)
    assert blocks.buffers.free_nbytes == 40


def test_blocks_that_came_back_are_counted_as_lent_no_more():
    blocks = HostBlocks(Ledger(1 << 20))
    first, second = blocks.take(1000, torch.float32), blocks.take(500, torch.bfloat16)
    assert blocks.buffers.lent_nbytes == 5000
    view = first[5:]
    del first, second
    assert blocks.buffers.lent_nbytes == 4000
    del view
    assert blocks.buffers.lent_nbytes == 0

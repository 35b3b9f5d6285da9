"""Units in memory that ranks share: who sees what, and when its memory goes back. Trusted: the memory itself
(ranks/shared_memory.py). Faked: ranks are threads of this process, the fetches are writes of the test's.
"""

import ctypes
import gc
import os

import pytest
import torch
from torch import nn

from children import ended
from infinity.device.blocks import HostBlocks
from infinity.planning.layout import Holders, lay_out
from infinity.ranks.shared_memory import has_nameless_memory
from infinity.records.record import Record, Traffic
from infinity.storage.memory import Ledger
from infinity.units.machine_units import open_machine_units
from infinity.units.unit import Unit
from machine_ranks import MachineRank, TwoMachines, descriptors, mappings
from thread_ranks import on_ranks

pytestmark = pytest.mark.skipif(not has_nameless_memory(), reason="this system has none")

CPU = torch.device("cpu")
SHAPES = [("p0", (64, 100)), ("p1", (3000,))]


class Rank:
    """A rank with two units, one of which has no elements, and room for `spare` bytes of free memory."""

    def __init__(self, group, spare):
        self.rank, holders = group.rank, Holders(group.size)
        self.blocks, self.seen = HostBlocks(Ledger(spare)), []
        self.units = []
        for name, shapes in (("layer", SHAPES), ("empty", [])):
            whole = lay_out(shapes, 4096, group.size)
            shard = holders.shard_of(whole, group.rank)
            record = Record(shard, 4096, Traffic(), unit_layout=whole, name=name, holders=holders)
            parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for _, shape in shapes]
            unit = Unit(len(self.units), parameters, record, group.rank * shard.numel)
            unit.open(self.blocks, CPU, {}, in_place=False)
            self.units.append(unit)
        self.unit, self.empty = self.units
        self.machine = open_machine_units(group, self.units, self.blocks, 20.0)

    def fetch(self, value):
        """Bring this rank's share, all of which is `value`; return what holds it while it is written."""
        self.unit.allocate()
        share = self.machine.share_of(self.unit)
        share.flat.fill_(value)
        return share

    def use(self):
        self.unit.attach()
        return self.unit.parameters[0].float()

    def let_go(self):
        self.unit.detach()
        self.unit.deallocate()


@pytest.fixture
def ranks():
    found = []

    def make(size=2, spare=1 << 24, kind=MachineRank):
        found.extend(on_ranks(size, lambda group: Rank(group, spare), kind=kind))
        return found

    yield make
    found.clear()
    gc.collect()
    assert not mappings()
    assert not descriptors()


def values(rank):
    """The distinct values of the unit, in their order."""
    return torch.unique_consecutive(rank.unit.flat).tolist()


def used_nbytes():
    return os.stat(descriptors()[0]).st_blocks * 512


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_sees_what_all_have_brought(ranks, size):
    several = ranks(size)
    for step in range(4):
        shares = [one.fetch(10 * step + one.rank + 1) for one in several]
        expected = [10.0 * step + number + 1 for number in range(size)]
        assert [values(one) for one in several] == [expected] * size
        assert [one.generation for one in shares] == [step + 1] * size
        del shares
        for one in several:
            one.use()
            one.let_go()
        assert several[0].machine.share_of(several[0].empty) is None


def test_each_machine_has_a_place_to_which_a_rank_brings_the_shares_of_its_number_on_all(ranks):
    four = ranks(4, spare=0, kind=TwoMachines)
    before, values_of = used_nbytes(), [3.0, 5.0, 7.0, 9.0]
    for _ in range(4):
        shares = [one.fetch(value) for one, value in zip(four, values_of, strict=True)]
        assert values(four[0])[:2] == [3.0, 5.0]
        assert values(four[2])[-2:] == [7.0, 9.0]
        for one, share in zip(four, shares, strict=True):
            for machine, place in enumerate(share.brought):
                its = shares[2 * machine + one.rank % 2].flat
                ctypes.memmove(place, its.data_ptr(), its.nbytes)
        assert [values(one) for one in four] == [values_of] * 4
        del shares
        for one in four:
            one.use()
            one.let_go()
    for one in four:
        one.fetch(1)
        one.let_go()
    assert used_nbytes() < before + 2 * four[0].unit.resident_nbytes


def test_a_rank_that_is_ahead_fetches_while_another_still_uses_what_was_there(ranks):
    fast, slow = ranks()
    for one in (fast, slow):
        one.fetch(one.rank + 1)
    slow.use()
    fast.let_go()
    fast.fetch(7)
    assert values(slow) == [1.0, 2.0], "the rank that is behind computes with its own fetch"
    slow.let_go()
    slow.fetch(8)
    assert values(slow) == values(fast) == [7.0, 8.0]


def test_what_a_rank_changes_no_other_sees_nor_the_next_fetch(ranks):
    one, other = ranks()
    for rank in (one, other):
        rank.fetch(rank.rank + 1)
    with torch.no_grad():
        one.unit.flat.fill_(99)
    assert values(other) == [1.0, 2.0]
    for step in (1, 2):
        for rank in (one, other):
            rank.unit.deallocate()
            rank.fetch(10 * step + rank.rank)
        assert values(one) == values(other) == [10.0 * step, 10.0 * step + 1]


def test_a_view_that_outlives_its_use_keeps_its_values_at_any_number_of_fetches(ranks):
    several, views = ranks(spare=0), []
    for step in range(5):
        for one in several:
            one.fetch(step + 1)
        view = several[0].unit
        view.attach()
        views.append(view.parameters[0].detach()[2:5])
        several[0].let_go()
        several[1].unit.deallocate()
    assert [one.unique().tolist() for one in views] == [[step + 1.0] for step in range(5)]


def test_memory_goes_back_when_all_have_let_go_of_it_and_no_sooner(ranks):
    one, other = ranks(spare=0)
    before = used_nbytes()
    nbytes = one.unit.resident_nbytes
    shares = [rank.fetch(1) for rank in (one, other)]
    assert used_nbytes() >= before + nbytes
    one.unit.deallocate()
    other.unit.deallocate()
    assert used_nbytes() >= before + nbytes, "a pass may still write from it to the disk"
    del shares
    for rank in (one, other):  # what was left then goes back with the next fetch
        rank.fetch(2)
        rank.unit.deallocate()
    for rank in (one, other):
        rank.fetch(3)
    assert used_nbytes() <= before + 2 * nbytes
    assert values(one) == [3.0]


def test_memory_is_kept_for_the_next_fetch_as_far_as_there_is_room(ranks):
    one, other = ranks()
    for step in range(3):
        for rank in (one, other):
            rank.fetch(step)
            rank.unit.deallocate()
    most = used_nbytes()
    for step in range(6):
        for rank in (one, other):
            rank.fetch(step)
            rank.unit.deallocate()
    assert used_nbytes() == most


def test_a_rank_that_has_a_unit_gives_its_share_once_more_to_those_that_fetch_it(ranks):
    one, other = ranks(spare=0)
    for rank in (one, other):
        rank.fetch(rank.rank + 1)
    one.use()
    other.unit.deallocate()
    for _ in range(3):
        again = one.machine.share_again(one.unit)
        other.fetch(2)
        assert values(other) == [1.0, 2.0]
        assert again.generation == other.machine.share_of(other.unit).generation
        del again
        other.unit.deallocate()
        assert values(one) == [1.0, 2.0], "it goes on with what it has"
    one.let_go()
    for rank in (one, other):
        rank.fetch(rank.rank + 5)
    assert values(one) == values(other) == [5.0, 6.0]


def test_a_copy_for_an_update_is_the_ranks_own(ranks):
    one, other = ranks()
    for rank in (one, other):
        rank.fetch(rank.rank + 1)
    one.unit.attach()
    view = one.unit.parameters[0].detach()
    one.unit.detach()
    one.unit.stop_sharing()
    one.unit.flat.fill_(50)
    assert view.unique().tolist() == [1.0]
    assert values(other) == [1.0, 2.0]
    one.unit.deallocate()
    other.unit.deallocate()
    for rank in (one, other):
        rank.fetch(rank.rank + 3)
    assert values(one) == values(other) == [3.0, 4.0]


@pytest.mark.parametrize("end", ["a unit that is used", "a view", "a share"])
def test_a_forked_child_that_lets_go_of_what_it_has_not_inherited_lives(ranks, end):
    one, other = ranks()
    share, _ = one.fetch(1), other.fetch(1)
    one.use()
    kept = one.unit.parameters[0].detach() if end == "a view" else None
    if end == "a share":
        one.let_go()
    else:
        share = None

    def work(say):
        nonlocal share
        if end != "a share":
            one.let_go()
        share = None
        say(lives=True)

    assert ended(work)["lives"]
    if end != "a share":
        one.let_go()
    assert kept is None or kept.unique().tolist() == [1.0]

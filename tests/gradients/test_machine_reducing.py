"""Gradients that ranks sum in memory that they have in common. Trusted: the memory, and how ranks meet there.
Faked: ranks are threads of this process, of which none ends; and of those that send, the network.
"""

import types

import pytest
import torch

from infinity.device.device import CpuDevice
from infinity.errors import RanksError
from infinity.gradients.collectives import Reducing
from infinity.gradients.machine_reducing import GradientPlaces, MachineReducing, place_nbytes
from infinity.ranks import machine_meetings
from infinity.ranks.machine_meetings import MachineMeetings
from infinity.ranks.shared_memory import PAGE, has_nameless_memory, open_shared
from machine_ranks import MachineRank
from thread_ranks import on_ranks

pytestmark = pytest.mark.skipif(not has_nameless_memory(), reason="this system has none")

CPU = CpuDevice()
SHARES = (700, 3001)
"""Elements of a rank's share of each of two units."""


@pytest.fixture(autouse=True)
def _none_ends(monkeypatch):
    monkeypatch.setattr(machine_meetings, "_stays", lambda *_: True)  # what a thread holds, its process holds


def take(numel, dtype):
    return torch.empty(numel, dtype=dtype)


def given_by(rank, size, dtype, step=0):
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size * sum(SHARES), generator=random).mul(10.0).to(dtype)


def means_of(dtype):
    return [torch.zeros(numel, dtype=dtype) for numel in SHARES]


def ended(job, channel, lease):
    job.run(channel)
    assert lease.ended
    assert job._sent is None
    assert job._means == ()


class Lease:
    ended = False

    def end(self):
        self.ended = True


def sent(size, dtype, steps):
    """Return the means on each rank, of ranks that send what they have."""
    found = [[] for _ in range(size)]
    for step in range(steps):
        rows = [given_by(rank, size, dtype, step).view(size, -1) for rank in range(size)]
        for rank in range(size):

            def exchange(came, _sent, _what, rank=rank, rows=rows):
                came.copy_(torch.stack([one[rank] for one in rows]).view(-1))

            means, lease = means_of(dtype), Lease()
            ranks = types.SimpleNamespace(size=size)
            job = Reducing("a", rows[rank].reshape(-1), means, take, lease, None, CPU, size)
            ended(job, types.SimpleNamespace(ranks=ranks, hops=None, exchange=exchange), lease)
            found[rank].append(means)
    return found


def channel_of(group):
    return types.SimpleNamespace(ranks=group, wait_for=lambda begin, _what: begin(group=None).wait())


def places_of(group, nbytes):
    memory = open_shared(group, PAGE + 2 * group.size * nbytes, 20.0)
    meetings = MachineMeetings(memory, 0, group.rank, range(group.size), 20.0)
    return GradientPlaces(meetings, PAGE, nbytes, group.rank, group.size)


def summed(size, dtype, steps, nbytes):
    """Likewise, of ranks that have places of `nbytes` in common."""

    def work(group):
        places, found = places_of(group, nbytes), []
        for step in range(steps):
            means, lease = means_of(dtype), Lease()
            own = given_by(group.rank, size, dtype, step)
            job = MachineReducing("a", own, means, take, lease, None, CPU, size, places)
            assert job.nbytes == 0
            ended(job, channel_of(group), lease)
            assert job._places is None, "a gradient that outlives the engine keeps nothing of its memory"
            found.append(means)
        return found

    return on_ranks(size, work, kind=MachineRank)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("size", "pages"), [(2, 1), (3, 3), (4, 1), (2, 100)])
def test_the_means_have_the_bits_of_those_that_are_sent_in_one_piece_and_in_many(dtype, size, pages):
    expected, ours = sent(size, dtype, 3), summed(size, dtype, 3, pages * PAGE)
    for rank in range(size):
        for step in range(3):
            for one, other in zip(expected[rank][step], ours[rank][step], strict=True):
                assert torch.equal(one, other)


def test_a_rank_that_brings_another_number_of_gradients_gets_an_error():
    def work(group):
        own = torch.ones(2 * (100 + group.rank))
        places, means = places_of(group, PAGE), [torch.zeros(100 + group.rank)]
        job = MachineReducing("layer", own, means, take, Lease(), None, CPU, 2, places)
        with pytest.raises(
            RanksError, match=r"layer: .*different sizes.*rank 0 800 bytes, at 0; rank 1 808 bytes, at 0"
        ):
            job.run(channel_of(group))

    on_ranks(2, work, kind=MachineRank)


def test_nothing_is_brought_of_units_without_elements():
    def work(group):
        means, lease = [torch.zeros(0)], Lease()
        own = torch.empty(0)
        MachineReducing("a", own, means, take, lease, None, CPU, 2, places_of(group, PAGE)).run(
            channel_of(group)
        )
        return lease.ended

    assert on_ranks(2, work, kind=MachineRank) == [True, True]


@pytest.mark.parametrize(
    ("share", "nbytes"), [(0, PAGE), (1 << 20, 1 << 16), (1 << 20 | 4095, 1 << 16), (1 << 30, 4 << 20)]
)
def test_two_places_are_whole_pages_and_take_an_eighth_of_what_is_on_its_way(share, nbytes):
    assert place_nbytes(share) == nbytes

"""The lane of collectives, and what a reduction keeps. Faked: the channel, which waits for the other ranks as
long as the test says.
"""

import threading
import types
import weakref

import pytest
import torch

from infinity.device.device import CpuDevice
from infinity.gradients import collectives as plain
from infinity.gradients.coded import CodedReducing
from infinity.gradients.coding import Coding
from infinity.gradients.collectives import Collective, CollectiveLane, Reducing
from infinity.lane.lane import StreamLane
from infinity.storage.memory import Pool
from infinity.timeline import Timeline

DEVICE = types.SimpleNamespace(enter_thread=lambda: None)


class Channel:
    """Lets a collective begin when the others come to it."""

    def __init__(self):
        self.others_come, self.done, self.told = threading.Event(), [], []
        self.ranks = types.SimpleNamespace(post_failure=self.told.append)

    def agree(self, what):
        assert self.others_come.wait(60), what


class Exchange(Collective):
    def ready(self):
        self._lane.check_open()  # as those do that wait for what this rank has to fetch

    def run(self, channel):
        channel.done.append(self.what)


@pytest.fixture
def lane():
    lane = StreamLane(Pool(4096, 4))
    yield lane
    lane.close()


@pytest.fixture
def channel():
    channel = Channel()
    yield channel
    channel.others_come.set()


def take(numel, dtype):
    return torch.empty(numel, dtype=dtype)


def closing(collectives, channel, lane, names):
    for name in names:
        collectives.submit(Exchange(name, lane))
    thread = threading.Thread(target=collectives.close)
    thread.start()
    return thread


def test_a_rank_that_closes_first_still_takes_part_in_what_the_others_wait_for(channel, lane):
    collectives = CollectiveLane("reduce", channel, lane, DEVICE, Timeline())
    thread = closing(collectives, channel, lane, ["first", "second", "third"])
    thread.join(0.2)
    assert thread.is_alive()
    channel.others_come.set()
    thread.join(60)
    assert not thread.is_alive()
    assert channel.done == ["first", "second", "third"]
    assert channel.told == []


def test_after_a_failure_nothing_more_is_exchanged_and_the_others_are_told_why(channel, lane):
    collectives = CollectiveLane("reduce", channel, lane, DEVICE, Timeline())
    lane.fail(OSError("planted"))
    channel.others_come.set()
    thread = closing(collectives, channel, lane, ["first"])
    thread.join(60)
    assert not thread.is_alive()
    assert channel.done == []
    assert channel.told == ["OSError: planted"]


@pytest.mark.parametrize("coding", [None, Coding(8)])
def test_what_was_sent_takes_no_memory_any_more_while_the_means_are_made(coding, monkeypatch):
    owner, name = (plain, "_mean_of_ranks") if coding is None else (Coding, "mean")
    makes, there = getattr(owner, name), []

    def mean_of(*given):
        there.append(held() is not None)
        makes(*given)

    monkeypatch.setattr(owner, name, mean_of)
    sent, mean = torch.ones(4096, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.bfloat16)
    held, lease = weakref.ref(sent), types.SimpleNamespace(end=lambda: None)
    given = (
        "a",
        sent,
        [mean],
        lambda numel, dtype: torch.empty(numel, dtype=dtype),
        lease,
        None,
        CpuDevice(),
        2,
    )
    job = Reducing(*given) if coding is None else CodedReducing(*given, coding)
    del sent, given
    ranks = types.SimpleNamespace(size=2)
    job.run(types.SimpleNamespace(ranks=ranks, hops=None, exchange=lambda came, sent, _: came.copy_(sent)))
    assert there == [False]
    assert (mean == 1).all()

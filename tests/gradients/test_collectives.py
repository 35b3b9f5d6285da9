"""The lane of collectives. Faked: the channel, which waits for the other ranks as long as the test says."""

import threading
import types

import pytest

from infinity.gradients.collectives import Collective, CollectiveLane
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
        assert self.others_come.wait(10), what


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
    thread.join(10)
    assert not thread.is_alive()
    assert channel.done == ["first", "second", "third"]
    assert channel.told == []


def test_after_a_failure_nothing_more_is_exchanged_and_the_others_are_told_why(channel, lane):
    collectives = CollectiveLane("reduce", channel, lane, DEVICE, Timeline())
    lane.fail(OSError("planted"))
    channel.others_come.set()
    thread = closing(collectives, channel, lane, ["first"])
    thread.join(10)
    assert not thread.is_alive()
    assert channel.done == []
    assert channel.told == ["OSError: planted"]

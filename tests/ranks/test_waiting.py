"""What a rank that waits tells of late ones. Faked: the store of the processes, and what is waited for."""

import logging
from datetime import timedelta

import pytest

from infinity.ranks import waiting
from infinity.ranks.places import Names
from infinity.ranks.waiting import Waiting


class Store(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


class Work:
    """Is done after so many looks."""

    def __init__(self, looks):
        self.looks = looks

    def wait(self, timeout=None):
        assert timeout is None or isinstance(timeout, timedelta)
        self.looks -= 1
        if self.looks > 0:
            waited = 0.9 * timeout.total_seconds()
            waiting.time.sleep(waited)
            raise RuntimeError("not yet")

    def is_completed(self):
        return self.looks <= 0


@pytest.fixture
def ranks(monkeypatch):
    """Three ranks of one store, which tell and look at once, and again soon."""
    kept = Store()
    monkeypatch.setattr(waiting, "store", lambda: kept)
    monkeypatch.setattr(waiting, "TELLS_S", 0.01)
    monkeypatch.setattr(waiting, "LOOKS_S", 0.02)
    monkeypatch.setattr(waiting, "_APART_S", 0.05)
    return [Waiting("engine", rank, 3, 60.0, Names([0, 1, 2], rank)) for rank in range(3)]


def test_a_rank_with_fewer_forwards_is_named_with_them_and_the_likely_cause(ranks):
    for rank, count in enumerate([3, 2, 3]):
        for _ in range(count):
            ranks[rank].forward_begins()
    said = ranks[0].forwards_of([1, 2])
    assert said.startswith("; rank 1 has begun 2 forwards, this rank 3: it may have had fewer batches")
    assert ranks[1].forwards_of([0, 2]) == "", "those that wait are ahead"


def test_a_rank_that_has_begun_none_has_begun_0(ranks):
    ranks[0].forward_begins()
    assert "rank 2 has begun 0 forwards" in ranks[0].forwards_of([2])


def test_a_store_that_has_died_says_nothing(ranks, monkeypatch):
    ranks[0].forward_begins()
    monkeypatch.setattr(waiting, "store", dict)
    ranks[0].forward_begins()
    assert ranks[0].forwards_of([1]) == ""


def test_a_slow_wait_warns_of_the_late_rank_and_how_far_it_is(ranks, caplog):
    caplog.set_level(logging.WARNING, "infinity")
    ranks[0].forward_begins()
    with ranks[2].alone("saving"):
        ranks[0].until(Work(4), "compare plans")
    (message,) = [one.getMessage() for one in caplog.records]
    assert "waited 0 s at compare plans: rank 1 has not come. Likely cause: " in message
    assert "up to the timeout of 60 s; rank 1 has begun 0 forwards, this rank 1: it may" in message


def test_a_slow_wait_tells_what_a_late_rank_has_said_of_why_it_does_not_come(ranks, caplog):
    caplog.set_level(logging.WARNING, "infinity")
    waiting.store().set("engine/1", "UnsupportedError: a second backward")
    with ranks[2].alone("saving"):
        ranks[0].until(Work(4), "compare plans")
    (message,) = [one.getMessage() for one in caplog.records]
    assert ": rank 1 has not come, and says: UnsupportedError: a second backward. Likely cause" in message

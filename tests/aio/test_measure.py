"""Streams of requests: which read, and how many are waited for. Faked: the engine, which notes both."""

from types import SimpleNamespace

import pytest

from infinity.aio.measure import MIXED, READ, WRITE, RequestStream, move


class FakeEngine:
    """Requests end when they are waited for."""

    def __init__(self):
        self.begun, self.waited, self.in_flight, self.most = [], 0, 0, 0
        self.after_waiting = set()

    def _begin(self, verb, offset):
        self.begun.append((verb, offset))
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        number, ended = len(self.begun), SimpleNamespace(began_s=0.0, ended_s=1.0)

        def wait():
            gone = max(0, number - self.waited)
            self.waited, self.in_flight = self.waited + gone, self.in_flight - gone
            self.after_waiting.add(self.in_flight)

        ended.wait = wait
        return ended

    def read(self, file, offset, address, nbytes, *, owner):
        return self._begin(READ, offset)

    def write(self, file, offset, address, nbytes, *, owner):
        return self._begin(WRITE, offset)


def moved(stream, requests):
    engine = FakeEngine()
    size = stream.request_nbytes
    memory = type("Memory", (), {"address": 0, "__len__": lambda _: 4 * size})()
    found = move(engine, None, memory, stream, 16 * size, seconds=60, at_most=requests * size)
    assert found.nbytes == requests * size
    assert len(found.latencies_s) == requests
    return engine


@pytest.mark.parametrize("percent", [1, 25, 50, 54, 99])
def test_reads_are_so_many_percent_and_spread_evenly(percent):
    verbs = [RequestStream(MIXED, 4096, 1, read_percent=percent).verb_of(count) for count in range(1000)]
    for count in range(1000):
        assert abs(verbs[:count].count(READ) - count * percent / 100) < 1
    assert {RequestStream(WRITE, 4096, 1).verb_of(count) for count in range(9)} == {WRITE}


def test_reads_and_writes_go_through_a_half_of_the_file_each():
    begun = moved(RequestStream(MIXED, 10, 2, read_percent=75), 12).begun
    assert [offset for verb, offset in begun if verb == READ] == [0, 10, 20, 30, 40, 50, 60, 70, 0]
    assert [offset for verb, offset in begun if verb == WRITE] == [80, 90, 100]


def test_several_requests_are_waited_for_at_once_and_the_others_stay_in_flight():
    for together in (1, 4):
        engine = moved(RequestStream(READ, 10, 6, together), 40)
        assert engine.after_waiting == {6 - together, 0}  # 0: at the end
        assert engine.most == 6

"""What rounds have beside steps. Faked: the device of the share, and whether threads were asked to sleep."""

import pytest

from infinity.lane.outgoing import OutgoingShare
from infinity.storage.memory import Ledger
from infinity.timeline import Timeline
from infinity.units.round_room import RoundRoom
from plan_texts import parse_plan


class Device:
    is_host = True


class Threads:
    asked = False

    def set(self, *, asked):
        self.asked = asked


@pytest.fixture
def threads(monkeypatch):
    one = Threads()
    monkeypatch.setattr("infinity.units.round_room.kernels.SleepingThreads", lambda: one)
    return one


@pytest.fixture
def outgoing():
    share = OutgoingShare(Device(), Timeline())
    share.open(40)
    return share


def test_in_rounds_units_that_wait_have_the_share_of_gradients_which_steps_have_again(threads, outgoing):
    window = Ledger(100)
    room = RoundRoom(window, outgoing, on_host=True)
    for _ in range(2):
        room.begin()
        assert (window.limit_nbytes, outgoing.try_lease(1)) == (140, None)
    room.end()
    assert (window.limit_nbytes, outgoing.ledger.limit_nbytes) == (100, 40)
    room.end()
    assert window.limit_nbytes == 100


def test_a_share_that_is_in_use_is_lent_in_a_later_round(threads, outgoing):
    window, lease = Ledger(100), outgoing.lease(1)
    room = RoundRoom(window, outgoing, on_host=True)
    room.begin()
    assert (window.limit_nbytes, outgoing.ledger.limit_nbytes) == (100, 40)
    lease.end()
    room.begin()
    assert window.limit_nbytes == 140


def test_a_share_that_rounds_use_themselves_is_given_back_and_lent_no_more(threads, outgoing):
    window = Ledger(100)
    room = RoundRoom(window, outgoing, on_host=True)
    room.begin()
    outgoing.use_in_rounds()
    for _ in range(2):
        room.begin()
        assert (window.limit_nbytes, outgoing.ledger.limit_nbytes) == (100, 40)


def test_several_ranks_and_accelerators_lend_nothing(threads):
    window = Ledger(100)
    room = RoundRoom(window, None, on_host=True)
    room.begin()
    room.end()
    assert window.limit_nbytes == 100


@pytest.mark.parametrize("on_host", [False, True])
def test_threads_are_asked_to_sleep_while_rounds_read_where_the_cpu_computes(threads, on_host):
    room = RoundRoom(Ledger(100), None, on_host=on_host)
    asked = []
    for text in ("open fetch 0\nF0\nF1", "open fetch 0\nF0 fetch 1\nF1 keep"):
        room.follow(parse_plan(text))
        asked.append(threads.asked)
    room.end()
    assert (asked, threads.asked) == ([False, on_host], False)

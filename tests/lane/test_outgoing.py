"""Leases of the outgoing share. Faked: passes, which note that they are waited for, and the device."""

import gc

import pytest

from infinity.lane.outgoing import OutgoingShare, end_all, leases_of
from infinity.planning import queue
from infinity.storage.memory import Ledger
from infinity.timeline import Timeline


class Job:
    """A pass that ends a lease when somebody waits for it."""

    def __init__(self, lease=None):
        self.lease, self.done, self.waited = lease, False, False

    def wait(self):
        self.waited = True
        self.end()

    def end(self):
        self.done = True
        if self.lease is not None:
            self.lease.end()


def waited_for(*jobs):
    return [job.waited for job in jobs]


class Device:
    """Has memory for a download after so many refusals."""

    is_host = True

    def __init__(self):
        self.refusals = 0

    def prepare(self, nbytes, count):
        self.refusals -= 1
        return self.refusals < 0


@pytest.fixture
def share():
    outgoing = OutgoingShare(Device(), Timeline())
    outgoing.open(100)
    return outgoing


def test_a_lease_gives_its_bytes_back_once_however_often_it_is_ended(share):
    lease, other = share.lease(60), share.lease(30)
    for _ in range(3):
        lease.end()
    assert share.ledger.held_nbytes == 30
    other.end()
    assert share.ledger.held_nbytes == 0


def test_a_lease_that_nobody_has_any_more_has_ended(share):
    def fail():
        held = [share.lease(60)]
        raise RuntimeError(f"between the lease and its use: {len(held)}")

    with pytest.raises(RuntimeError, match="between"):
        fail()
    gc.collect()
    assert share.ledger.held_nbytes == 0


def test_what_the_share_has_no_room_for_is_not_leased_by_trying(share):
    first = share.try_lease(100)
    assert first is not None
    assert share.try_lease(1) is None
    end_all([None, first, None])
    assert share.try_lease(1) is not None


def test_who_needs_room_waits_for_the_oldest_pass_under_way_and_no_more_than_it_takes(share):
    jobs = [Job(share.lease(40)), Job(share.lease(40)), Job(share.lease(20))]
    for job in jobs:
        share.sent(job)
    lease = share.lease(60)
    assert waited_for(*jobs) == [True, True, False]
    assert share.ledger.held_nbytes == 80
    assert share.stall_s > 0
    lease.end()


def test_a_pass_that_is_over_is_not_waited_for(share):
    over, under_way = Job(), Job(share.lease(90))
    share.sent(over)
    share.sent(under_way)
    over.end()
    share.lease(50).end()
    assert waited_for(over, under_way) == [False, True]


def test_an_update_that_begins_after_the_last_use_of_its_unit_is_not_waited_for_before(share):
    lease, under_way = share.lease(20), Job(share.lease(70))
    share.sent(queue.Job())  # which no lane has yet
    share.sent(under_way)
    share.lease(50).end()
    assert waited_for(under_way) == [True]
    beyond = share.lease(90)
    assert share.ledger.held_nbytes == 110, "nothing that could make room is under way"
    end_all([lease, beyond])


def test_what_is_larger_than_the_share_goes_out_alone(share):
    lease = share.lease(1000)
    assert share.ledger.held_nbytes == 1000
    assert share.held_nbytes == 100, "the rest counts as the unit in use"
    share._device.is_host = False
    assert share.held_nbytes == 1000, "an accelerator's unit is not in host memory"
    lease.end()


def test_deferred_uses_make_room_before_any_pass_is_waited_for_the_last_one_first(share):
    lease, used, under_way = share.lease(90), [], Job()
    share.sent(under_way)
    share.defer(lambda: used.append("first"))
    share.defer(lambda: (used.append("second"), lease.end()))
    share.lease(50).end()
    assert used == ["second", "first"]
    assert waited_for(under_way) == [False]
    assert not share.use_deferred()


def test_a_deferred_use_that_fails_is_not_lost(share):
    calls = []

    def use():
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt

    share.defer(use)
    with pytest.raises(KeyboardInterrupt):
        share.use_deferred()
    assert share.use_deferred()
    assert len(calls) == 2


def test_a_download_waits_for_memory_as_long_as_something_can_free_it(share):
    share._device.refusals = 2
    jobs = [Job(), Job(), Job()]
    for job in jobs:
        share.sent(job)
    share.await_buffer(10, 1)
    assert waited_for(*jobs) == [True, True, False]
    share._device.refusals = 5
    share.await_buffer(10, 1)  # the third, and then nothing is under way
    assert waited_for(*jobs) == [True, True, True]


def test_bytes_that_leases_have_in_common_go_back_with_the_last_of_them():
    ledger = Ledger(100)
    ledger.reserve_anyway(60)
    first, second, third = leases_of(ledger, 60, 3)
    first.end()
    first.end()
    del second
    gc.collect()
    assert ledger.held_nbytes == 60
    third.end()
    assert ledger.held_nbytes == 0

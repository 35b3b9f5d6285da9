"""Streams and memory of a simulated accelerator. Rates are whole numbers, so that times can be told."""

import pytest

from infinity.planning.moments import NOW, Moment, all_of
from infinity.planning.simulated_device import SimulatedDevice
from infinity.planning.simulator import Clock, Disk, Rates

DISK = Disk(read=10.0, write=10.0, mixed=10.0)


def device(limit_nbytes=None):
    clock = Clock(Rates(DISK, up=10.0, down=5.0))
    return clock, SimulatedDevice(clock, limit_nbytes)


def test_the_last_of_several_moments_ends_them_all():
    first, second, calls = Moment(), Moment(), []
    all_of((first, NOW, second)).call(lambda: calls.append("both"))
    second.end()
    assert calls == []
    first.end()
    assert calls == ["both"]
    assert all_of(()) is NOW


def test_streams_run_side_by_side_each_in_its_order():
    clock, there = device()
    there.up.put(20.0)
    uploaded, computed = there.up.put(10.0), there.computing.put(4.0)
    there.wait(uploaded)
    assert (clock.now, computed.over) == (3.0, False)
    there.wait(computed)
    assert clock.now == 4.0


def test_an_operation_waits_for_other_streams_and_holds_up_what_is_behind_it():
    clock, there = device()
    computed = there.computing.put(4.0)
    there.down.put(5.0, computed)
    there.wait(there.down.put(5.0))
    assert clock.now == 4.0 + 1.0 + 1.0


def test_the_host_waits_for_what_leaves_only_where_memory_lacks():
    clock, there = device(limit_nbytes=20)
    there.take(10, lambda: False)
    there.leaves(10, there.down.put(10.0))
    assert there.fits(10)
    assert clock.now == 0.0
    assert there.fits(20)
    assert clock.now == 2.0


def test_what_waits_gives_way_where_nothing_leaves():
    _, there = device(limit_nbytes=20)
    there.take(20, lambda: False)
    given = []

    def give_way():
        given.append(1)
        there.give_back(5)
        return True

    there.take(10, give_way)
    assert len(given) == 2


def test_a_wait_for_what_never_comes_is_an_error_of_the_simulation():
    _, there = device()
    with pytest.raises(AssertionError, match="a clock at rest"):
        there.wait(Moment())

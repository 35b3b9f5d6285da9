"""A machine that only keeps time. Rates are small whole numbers, so that times can be told in one's head."""

from dataclasses import replace
from functools import partial

import pytest

from infinity.planning.moments import NOW, Moment
from infinity.planning.simulator import Clock, Disk, Rates, SimulatedLane, SimulatedPass

DISK = Disk(read=10.0, write=5.0, mixed=8.0)


def ended(clock, **demands):
    """Serve one demand per server; return when each ended."""
    times = {}
    for name, amount in demands.items():
        clock.serve(name, amount, lambda name=name: times.setdefault(name, round(clock.now, 9)))
    while clock.advance():
        pass
    return times


def run(clock):
    while clock.advance():
        pass
    return clock.now


@pytest.mark.parametrize(
    ("server", "seconds"), [("read", 2.0), ("write", 4.0), ("work", 20.0), ("link", 0.2)]
)
def test_what_is_alone_goes_at_its_own_rate(server, seconds):
    assert ended(Clock(Rates(DISK, link=100.0)), **{server: 20.0}) == {server: seconds}


def test_reads_and_writes_at_once_share_the_mix_and_the_rest_goes_alone():
    # 4 a second each: at 5 s the reads are over, and 30 left to write go at 5.
    assert ended(Clock(Rates(DISK)), read=20.0, write=50.0) == {"read": 5.0, "write": 11.0}


def test_computing_and_updating_share_the_cores_where_they_are_the_same():
    assert ended(Clock(Rates(DISK)), compute=3.0, work=1.0) == {"work": 2.0, "compute": 4.0}
    assert ended(Clock(Rates(DISK, shared=False)), compute=3.0, work=1.0) == {"work": 1.0, "compute": 3.0}
    spinning = Rates(DISK, computing=0.25, working=0.5)
    assert ended(Clock(spinning), compute=3.0, work=1.0) == {"work": 2.0, "compute": 4.5}


def test_what_the_lane_asks_the_disk_for_disturbs_computing_in_its_own_way():
    asked = Rates(DISK, computing=0.5, working=0.5, asking=0.25, computing_asked=0.125)
    assert ended(Clock(asked), compute=3.0, asking=1.0) == {"asking": 4.0, "compute": 6.5}
    assert ended(Clock(Rates(DISK, shared=False)), compute=3.0, asking=1.0) == {"asking": 1.0, "compute": 3.0}


def test_a_disk_is_slower_while_the_cores_that_ask_it_compute():
    assert ended(Clock(Rates(DISK, moving=0.5)), read=20.0, compute=2.0) == {"compute": 2.0, "read": 3.0}
    assert ended(Clock(Rates(DISK, moving=0.5)), read=20.0, write=20.0, compute=1.0)["read"] == 5.5
    assert ended(Clock(Rates(DISK, moving=0.5)), read=20.0) == {"read": 2.0}
    assert ended(Clock(Rates(DISK, moving=0.5, shared=False)), read=20.0, compute=2.0)["read"] == 2.0


def test_computing_waits_for_what_the_disk_takes_of_its_cores_for_every_byte():
    taking = Rates(DISK, moved_s=0.05)
    assert ended(Clock(taking), read=20.0, compute=3.0) == {"read": 2.0, "compute": 4.0}
    assert ended(Clock(taking), read=20.0, write=20.0, compute=6.0) == {
        "read": 5.0,
        "write": 5.0,
        "compute": 8.0,
    }
    assert ended(Clock(replace(taking, shared=False)), read=20.0, compute=3.0)["compute"] == 3.0
    whole = replace(taking, moved_s=1.0)  # more than there is of a core
    assert ended(Clock(whole), read=20.0, compute=3.0) == {"read": 2.0, "compute": pytest.approx(4.8)}


def test_a_tile_is_asked_for_before_it_is_worked_on():
    clock = Clock(Rates(DISK))
    SimulatedLane(clock, 1).submit(SimulatedPass(0, 2, 0.0, 1.0, 0.0, asked_s=3.0))
    assert run(clock) == 2 * (3.0 + 1.0)


def test_one_server_does_one_thing_after_the_other_and_what_is_urgent_next():
    clock, order = Clock(Rates(DISK)), []
    for name, urgent in (("a", False), ("b", False), ("c", True)):
        clock.serve("read", 10.0, lambda name=name: order.append((name, clock.now)), urgent=urgent)
    run(clock)
    assert order == [("a", 1.0), ("c", 2.0), ("b", 3.0)]


def test_a_server_is_busy_while_it_serves():
    clock = Clock(Rates(DISK))
    ended(clock, read=20.0, write=50.0)
    assert (clock.busy_s["read"], clock.busy_s["write"], clock.busy_s["link"]) == (5.0, 11.0, 0.0)


# The lane


def test_a_tile_is_read_worked_on_and_written():
    clock = Clock(Rates(DISK))
    SimulatedLane(clock, slots=1).submit(
        SimulatedPass(0, 1, read_nbytes=10.0, work_s=2.0, written_nbytes=10.0)
    )
    assert run(clock) == 1.0 + 2.0 + 2.0


def test_slots_let_tiles_overlap():
    def seconds(slots):
        clock = Clock(Rates(Disk(10.0, 10.0, 20.0)))
        SimulatedLane(clock, slots).submit(
            SimulatedPass(0, 4, read_nbytes=10.0, work_s=1.0, written_nbytes=10.0)
        )
        return run(clock)

    assert seconds(1) == 12.0
    assert seconds(3) == 6.0


def test_what_is_processed_is_told_before_it_is_written():
    clock, times = Clock(Rates(DISK)), []
    job = SimulatedPass(0, 1, 10.0, 0.0, 10.0)
    job.call_when_done(lambda: times.append(clock.now))
    SimulatedLane(clock, 1).submit(job)
    assert (run(clock), times) == (3.0, [1.0])


def test_passes_over_one_record_do_not_overlap_those_over_others_do():
    def seconds(units):
        clock = Clock(Rates(Disk(10.0, 10.0, 20.0)))
        lane = SimulatedLane(clock, 4)
        for unit in units:
            lane.submit(SimulatedPass(unit, 1, 10.0, 0.0, 10.0))
        return run(clock)

    assert (seconds([0, 0]), seconds([0, 1])) == (4.0, 3.0)


def test_an_urgent_pass_goes_before_those_that_wait():
    clock, order = Clock(Rates(DISK)), []
    lane = SimulatedLane(clock, 1)
    for unit in range(4):
        job = SimulatedPass(unit, 1, 10.0, 0.0, 0.0)
        job.call_when_done(lambda unit=unit: order.append(unit))
        lane.submit(job, urgent=unit == 3)
    run(clock)
    assert order == [0, 3, 1, 2]


def test_a_record_is_busy_until_it_is_written_and_settled_when_it_was_worked_on():
    clock = Clock(Rates(DISK))
    lane = SimulatedLane(clock, 1)
    lane.submit(SimulatedPass(0, 1, 10.0, 1.0, 10.0))
    seen = []
    while clock.advance():
        seen.append((lane.busy(0), lane.settled(0)))
    assert seen == [(True, False), (True, True), (False, True)]


def test_a_pass_whose_gradients_are_late_lets_others_by():
    clock, arriving = Clock(Rates(DISK)), Moment()
    lane = SimulatedLane(clock, 4)
    late, other = SimulatedPass(0, 1, 0.0, 1.0, 0.0, arriving=arriving), SimulatedPass(1, 1, 0.0, 2.0, 0.0)
    for job in (late, other):
        lane.submit(job)
    lane.wait(other)
    assert (clock.now, late.done) == (2.0, False)
    arriving.end()
    lane.wait(late)
    assert clock.now == 3.0


def test_a_slot_is_free_when_its_upload_is_over_though_an_older_one_is_not():
    clock, uploads = Clock(Rates(DISK)), [Moment(), Moment()]
    lane = SimulatedLane(clock, 2)
    jobs = [SimulatedPass(n, 1, 10.0, 0.0, 0.0, upload=partial(uploads.__getitem__, n)) for n in (0, 1)]
    third = SimulatedPass(2, 1, 10.0, 0.0, 0.0)
    for job in (*jobs, third):
        lane.submit(job)
    uploads[1].end()
    lane.wait(third)
    assert not jobs[0].finished


# Beside an accelerator


def computing(unit, work_s, **more):
    return SimulatedPass(
        unit, 1, more.pop("read", 0.0), work_s, more.pop("written", 0.0), computes=True, **more
    )


def fetching(unit):
    return SimulatedPass(unit, 1, 10.0, 1.0, 0.0, upload=lambda: NOW)


def ends(jobs, slots=4, **lane):
    """Submit passes to a lane; return when each was worked on."""
    clock, times = Clock(Rates(Disk(10.0, 10.0, 20.0), shared=False)), {}
    line = SimulatedLane(clock, slots, **lane)
    for job in jobs:
        job.call_when_done(lambda job=job: times.setdefault(job.record, clock.now))
        line.submit(job)
    run(clock)
    return [times[job.record] for job in jobs]


def test_a_fetch_is_worked_on_while_a_thread_of_its_own_computes_an_update():
    assert ends([computing(0, 9.0), fetching(1)], apart=True) == [9.0, 2.0]
    assert ends([computing(0, 9.0), fetching(1)]) == [9.0, 11.0], "one thread begins no read while it works"


def test_updates_are_computed_one_after_the_other_and_fetches_handled_likewise():
    jobs = [computing(0, 4.0), computing(1, 4.0), fetching(2), fetching(3)]
    assert ends(jobs, apart=True) == [4.0, 8.0, 2.0, 3.0]


def test_what_computes_leaves_slots_to_what_does_not():
    jobs = [*(computing(number, 3.0, written=10.0) for number in range(4)), fetching(4)]
    assert ends(jobs, apart=True)[-1] == 2.0
    assert ends([*(computing(number, 3.0, written=10.0) for number in range(4)), fetching(4)])[-1] > 12.0


def test_the_lanes_thread_asks_for_what_computes_and_goes_on_when_that_is_done():
    asking = computing(0, 9.0, asked_s=3.0)
    assert ends([asking, fetching(1)], apart=True) == [12.0, 3.0 + 2.0]


def test_a_fetch_behind_one_that_is_busy_does_not_hold_up_others():
    jobs = [computing(0, 9.0), SimulatedPass(0, 1, 10.0, 0.0, 0.0), fetching(1)]
    clock, seen = Clock(Rates(DISK, shared=False)), []
    lane = SimulatedLane(clock, 4, apart=True)
    for job in jobs:
        job.call_when_done(lambda job=job: seen.append((job.record, clock.now)))
        lane.submit(job)
    run(clock)
    assert seen == [(1, 2.0), (0, 9.0), (0, 10.0)]


def test_of_updates_in_the_backward_the_newest_comes_first_and_what_is_waited_for_before_it():
    def order(**kind):
        clock, seen = Clock(Rates(DISK, shared=False)), []
        lane = SimulatedLane(clock, 4, apart=True)
        jobs = [computing(number, 1.0, **kind) for number in range(6)]
        for job in jobs:
            job.call_when_done(lambda job=job: seen.append(job.record))
            lane.submit(job)
        lane.wait(jobs[3])
        run(clock)
        return seen

    assert order() == [0, 1, 3, 2, 4, 5]
    assert order(deferrable=True) == [0, 1, 3, 5, 4, 2]

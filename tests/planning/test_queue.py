"""The queue in which passes wait. Passes that do nothing stand for real ones, names for records."""

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.planning.queue import NO_FETCH, Queue, QueuedPass


class Walk(QueuedPass):
    def tiles(self):
        return iter(())


def queued(*jobs, urgent=()):
    queue = Queue()
    for job in jobs:
        queue.add(job, urgent=job in urgent)
    return queue


def begin(queue):
    """Take the pass that may begin, as the lane does; None if none may."""
    job = queue.admissible()
    if job is not None:
        queue.next_tile(job)  # of which it has none
    return job


def test_an_empty_queue_has_nothing_to_begin():
    assert Queue().admissible() is None


def test_passes_over_different_records_begin_in_the_order_they_came():
    jobs = [Walk(record) for record in "abc"]
    queue = queued(*jobs)
    assert [begin(queue) for _ in range(4)] == [*jobs, None]


def test_a_pass_begins_when_the_older_one_over_its_record_is_finished():
    first, second = Walk("a"), Walk("a")
    queue = queued(first, second)
    assert begin(queue) is first
    assert begin(queue) is None
    queue.retire(first)
    assert begin(queue) is second


class Pausing(Walk):
    paused = True


def test_others_go_before_a_pass_that_is_paused_and_those_that_wait_for_it():
    pausing, behind, other = Pausing("a"), Walk("a"), Walk("b")
    queue = queued(pausing, behind, other)
    assert queue.admissible() is other
    assert queue.next_tile(other) is None
    assert list(queue.waiting) == [pausing, behind]
    assert queue.admissible() is None
    pausing.paused = False
    assert queue.admissible() is pausing
    assert queue.next_tile(pausing) is None
    assert queue.admissible() is None, "the pass behind it waits until it is finished"


class Aside(Walk):
    stands_aside = True


def test_others_go_before_a_pass_that_stands_aside_while_its_record_is_busy():
    first, aside, behind, other = Walk("a"), Aside("a"), Walk("a"), Walk("b")
    queue = queued(first, aside, other, behind)
    assert [begin(queue) for _ in range(3)] == [first, other, None]
    queue.retire(first)
    assert [begin(queue) for _ in range(2)] == [aside, None]


class Nothing(Walk):
    moves_nothing = True


def test_a_pass_that_moves_nothing_begins_when_all_older_ones_over_its_record_are_worked_on():
    first, second, last = Walk("a"), Walk("a"), Nothing("a")
    queue = queued(first, second, last)
    assert [begin(queue) for _ in range(2)] == [first, None]
    first.done = True
    assert begin(queue) is None
    queue.retire(first)
    assert [begin(queue) for _ in range(2)] == [second, None]
    second.done = True
    assert begin(queue) is last
    queue.retire(last)
    assert list(queue.of_record["a"]) == [second]


class Computing(Walk):
    computes = True


def test_where_fetches_do_not_wait_for_updates_those_of_busy_records_and_updates_are_passed_over():
    update, fetch, other, last = Computing("a"), Walk("a"), Computing("b"), Walk("c")
    queue = queued(update, fetch, other, last)
    assert queue.admissible(passing=True) is begin(queue) is update
    assert queue.admissible() is None
    assert queue.admissible(passing=True) is other
    assert queue.admissible(passing=True, computing=False) is last


class Late(Walk):
    goes_last = True


def test_a_pass_that_goes_last_begins_where_no_other_can():
    first, busy, late, other = Walk("a"), Walk("a"), Late("b"), Walk("c")
    queue = queued(late, first, other)
    assert [begin(queue) for _ in range(4)] == [first, other, late, None]
    queue = queued(first, busy, late)
    assert [begin(queue) for _ in range(3)] == [first, late, None]


def test_it_lets_none_by_any_more_when_one_over_its_record_waits_behind_it_or_is_called_for():
    late, later, behind, last = Late("a"), Late("b"), Walk("b"), Walk("c")
    queue = queued(late, later, behind, last)
    assert [list(queue.waiting), list(queue.later)] == [[later, behind, last], [late]]
    queue.promote("a")
    assert [list(queue.waiting), list(queue.later)] == [[late, later, behind, last], []]
    assert late.urgent
    urgent = Walk("a")
    queue = queued(Late("b"), last, Late("a"), urgent, urgent=[urgent])
    assert [job.record for job in queue.waiting] == ["a", "a", "c"]


def test_a_pass_that_goes_last_is_forgotten_as_others_are_and_begins_once_after_a_ctrl_c():
    late = Late("a")
    queue = queued(late)
    queue.forget(late)
    assert queue == Queue()
    queue.add(late)
    queue.waiting.append(late)  # a Ctrl-C came while it was moved
    assert [begin(queue) for _ in range(2)] == [late, None]
    queue.retire(late)
    assert queue == Queue()


def test_an_urgent_pass_takes_the_older_ones_over_its_record_along():
    other, older, urgent = Walk("b"), Walk("a"), Walk("a")
    queue = queued(other, older, urgent, urgent=[urgent])
    assert list(queue.waiting) == [older, urgent, other]
    assert [job.urgent for job in queue.waiting] == [True, True, False]


def test_promoting_leaves_a_pass_that_has_begun_where_it_is():
    begun, waits, other = Walk("a"), Walk("a"), Walk("b")
    queue = queued(begun, other, waits)
    assert begin(queue) is begun
    queue.promote("a")
    queue.promote("nobody's")
    assert list(queue.waiting) == [waits, other]
    assert queue.admissible() is None


def test_a_record_without_passes_is_forgotten():
    job = Walk("a")
    queue = queued(job)
    begin(queue)
    queue.retire(job)
    assert queue == Queue()


requests = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.booleans(), st.sampled_from([Walk, Late])),
        st.tuples(st.just("promote"), st.sampled_from("abc")),
        st.tuples(st.just("begin")),
        st.tuples(st.just("retire"), st.integers(0, 2)),
    ),
    max_size=40,
)


class Busy:
    """A lane that begins passes, and finishes them in any order."""

    def __init__(self):
        self.queue, self.added, self.running, self.begun = Queue(), [], [], []

    def add(self, record, urgent, kind):
        self.added.append(kind(record))
        self.queue.add(self.added[-1], urgent=urgent)

    def promote(self, record):
        self.queue.promote(record)
        waiting = [job.record for job in self.queue.waiting]
        assert waiting == sorted(waiting, key=lambda one: one != record), "in front"

    def begin(self):
        job = begin(self.queue)
        if job is not None:
            assert job.record not in {one.record for one in self.running}, "two passes over one record"
            self.running.append(job)
            self.begun.append(job)
        return job

    def retire(self, number):
        if self.running:
            self.queue.retire(self.running.pop(number % len(self.running)))

    def drain(self):
        while self.queue.waiting or self.queue.later or self.running:
            if self.begin() is None:
                assert self.running, "passes wait for nobody"
                self.retire(0)


@given(requests)
def test_passes_over_one_record_never_overlap_and_none_is_lost_whatever_is_promoted(requests):
    lane = Busy()
    for what, *which in requests:
        getattr(lane, what)(*which)
    lane.drain()
    assert len(lane.begun) == len(lane.added)
    for record in "abc":
        came = [job for job in lane.added if job.record == record]
        assert [job for job in lane.begun if job.record == record] == came
    assert lane.queue == Queue()


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=12))
def test_what_nobody_waits_for_keeps_its_order_behind_what_somebody_does(jobs):
    added = [Walk(record) for record, _ in jobs]
    asked = [job for job, (_, urgent) in zip(added, jobs, strict=True) if urgent]
    waiting = list(queued(*added, urgent=asked).waiting)
    urgent = [job for job in waiting if job.urgent]
    assert waiting[: len(urgent)] == urgent
    patient = [job for job in added if not job.urgent]
    assert waiting[len(urgent) :] == patient


# The end of a pass


def test_who_waits_for_the_end_is_called_once_and_let_go():
    job, calls = Walk("a"), []

    class Waiter:
        def call(self):
            calls.append(job.finished)

    waiter = Waiter()
    job.on_finished.append(waiter.call)
    gone = weakref.ref(waiter)
    del waiter
    job.finish()
    job.finish()
    gc.collect()
    assert calls == [True]
    assert gone() is None


def test_a_fetch_that_nothing_is_needed_for_is_over():
    assert NO_FETCH.done
    assert NO_FETCH.finished
    assert NO_FETCH.slot_wait_s == 0


def test_a_job_that_was_never_submitted_cannot_be_waited_for():
    with pytest.raises(AssertionError, match="submitted before it is waited for"):
        Walk("a").wait()


def test_only_passes_that_do_not_compute_begin_where_the_others_have_all_their_slots():
    computing, walk, dropped = Computing("a"), Walk("b"), Walk("c")
    queue = queued(computing)
    assert queue.admissible(computing=False) is None
    for job in (walk, dropped):
        queue.add(job)
    queue.forget(dropped)
    assert queue.admissible(computing=False) is walk
    assert queue.next_tile(walk) is None
    assert queue.admissible(computing=False) is None
    assert queue.fetches == 0
    assert queue.admissible() is computing

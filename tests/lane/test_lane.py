"""The lane that moves records. The disk is faked: transfers complete in random order, and may fail."""

import threading
import time

import pytest
import torch

from fakes import FakeDisk
from gated_passes import TILE, Gated, Logged, Moving
from infinity.errors import CorruptionError, EngineFailedError
from infinity.lane import lane as lanes
from infinity.lane.lane import Pass, StreamLane
from infinity.lane.passes import LeavePass, ReadPass, WritePass
from infinity.planning.layout import lay_out, tiles
from infinity.records.record import Record, Traffic
from infinity.storage.memory import Ledger, Pool
from infinity.storage.store import HostStore
from leftovers import held, left_since


def record_on(disk, numels):
    record = Record(
        lay_out([(f"p{index}", (numel,)) for index, numel in enumerate(numels)]),
        TILE,
        Traffic(),
        name="layers.3",
    )
    for field in ("hi", "lo", "m", "v"):
        record.add(field, disk)
    return record


@pytest.fixture(params=[(1, False), (2, False), (7, False), (1, True), (5, True)], ids=str)
def lane(request):
    """A lane with some slots, and with a worker or without."""
    slots, apart = request.param
    lane = StreamLane(Pool(TILE * 16, slots), apart=apart)
    yield lane
    lane.close()


class Noting(FakeDisk):
    """Keeps the transfers that it has begun."""

    def __init__(self, seed, fail_at):
        super().__init__(seed, fail_at=fail_at)
        self.begun = []

    def _begin(self, copy, what, owner):
        self.begun.append(super()._begin(copy, what, owner))
        return self.begun[-1]


class Update(WritePass):
    """A pass that a worker computes."""

    computes = True


def test_what_was_written_is_read_with_any_number_of_slots(lane, seed):
    record = record_on(FakeDisk(seed), [5000, 3, 9000])
    values = {
        index: {"master": torch.randn(numel), "m": torch.randn(numel)}
        for index, numel in enumerate([5000, 3, 9000])
    }
    lane.submit(WritePass(record, TILE, values))
    for index, fields in values.items():
        into = {name: torch.empty_like(tensor) for name, tensor in fields.items()}
        job = ReadPass(record, index, TILE, into)
        lane.submit(job)
        lane.wait(job)
        assert all(torch.equal(into[name], fields[name]) for name in fields)


def test_passes_over_one_record_keep_their_order_even_when_promoted(lane, seed):
    record, other = (record_on(FakeDisk(seed + n), [6000]) for n in range(2))
    results = []
    for number in range(8):
        for one in (record, other):
            kind = WritePass if number % 2 else Update
            lane.submit(kind(one, TILE, {0: {"master": torch.full((6000,), float(number))}}))
            into = {"master": torch.empty(6000)}
            job = ReadPass(one, 0, TILE, into)
            lane.submit(job, urgent=number % 3 == 0)
            results.append((job, into["master"], number))
        lane.promote(other)
    for job, found, number in results:
        lane.wait(job)
        assert found.unique().tolist() == [number]


def test_a_promoted_pass_overtakes_those_that_wait(seed):
    lane = StreamLane(Pool(TILE * 16, 1))
    records = [record_on(FakeDisk(seed), [10]) for _ in range(4)]
    log, gate = [], threading.Event()
    first = Logged(records[0], "first", log, gate)
    lane.submit(first)
    assert first.begun.wait(60)
    jobs = [Logged(records[n], n, log) for n in range(1, 4)]
    for job in jobs:
        lane.submit(job)
    lane.promote(records[3])
    gate.set()
    lane.drain()
    lane.close()
    assert log == ["first", 3, 1, 2]


class _Awaiting(Logged):
    """A pass whose gradients come when `arrived` is set: its work waits for that, if it has to."""

    def __init__(self, record, name, log):
        super().__init__(record, name, log)
        self.arrived = threading.Event()

    @property
    def ready(self):
        return self.arrived.is_set()

    def process(self, start, stop, at):
        self.begun.set()
        self.arrived.wait(60)
        self.log.append(self.name)


def test_a_pass_whose_gradients_are_on_their_way_lets_others_by(seed, monkeypatch):
    monkeypatch.setattr(lanes, "_PATIENCE_S", 60.0)
    lane = StreamLane(Pool(TILE * 16, 2))
    log = []
    late = _Awaiting(record_on(FakeDisk(seed), [10]), "late", log)
    behind = Logged(late.record, "behind it, of its record", log)
    other = Logged(record_on(FakeDisk(seed), [10]), "other", log)
    for job in (late, other, behind):
        lane.submit(job)
    lane.wait(other)
    assert log == ["other"]
    late.arrived.set()
    lane.drain()
    lane.close()
    assert log == ["other", "late", "behind it, of its record"]


def test_where_all_gradients_are_late_the_oldest_is_waited_for(seed):
    lane = StreamLane(Pool(TILE * 16, 2))
    jobs = [_Awaiting(record_on(FakeDisk(seed + n), [10]), n, []) for n in range(2)]
    for job in jobs:
        lane.submit(job)
    assert jobs[0].begun.wait(60)
    assert not jobs[1].begun.is_set()
    for job in jobs:
        job.arrived.set()
    lane.drain()
    lane.close()


def test_a_tile_is_over_though_an_older_one_still_moves(seed):
    lane = StreamLane(Pool(TILE * 16, 2))
    uploads = [Gated(), Gated(), Gated()]
    jobs = [Moving(record_on(FakeDisk(seed + n), [10]), upload) for n, upload in enumerate(uploads)]
    uploads[1].gate.set()
    for job in jobs[:2]:
        lane.submit(job)
    lane.wait(jobs[1], finished=True)
    assert not jobs[0].finished
    for upload in uploads:
        upload.gate.set()
    lane.submit(jobs[2])
    lane.drain()
    lane.close()
    assert all(job.finished for job in jobs)


class Slow(FakeDisk):
    """Says that what it has moved is over when the gate is open."""

    def __init__(self, seed):
        super().__init__(seed)
        self.moving = Gated()

    def _begin(self, copy, what, owner):
        copy()
        return self.moving


@pytest.mark.parametrize("slots", [1, 4])
def test_what_waits_for_a_slot_knows_how_long_and_what_waits_for_its_read_does_not(slots, seed):
    lane, disk = StreamLane(Pool(TILE * 16, slots)), Slow(seed)
    writing, reading = record_on(disk, [TILE]), record_on(FakeDisk(seed + 1, delay_s=0.2), [TILE])
    lane.submit(WritePass(reading, TILE, {0: {"master": torch.zeros(TILE)}}))
    lane.drain()
    before = WritePass(writing, TILE, {0: {"master": torch.zeros(TILE)}})
    lane.submit(before)
    lane.wait(before)  # what it writes is still in a slot
    job = ReadPass(reading, 0, TILE, {"master": torch.empty(TILE)})
    lane.submit(job, urgent=True)
    disk.moving.gate.set()
    lane.wait(job)
    lane.close()
    assert (job.slot_wait_s > 0) == (slots == 1)


def test_a_pass_that_takes_all_slots_itself_does_not_lack_any(seed):
    lane = StreamLane(Pool(TILE * 16, 2))
    record = record_on(FakeDisk(seed, delay_s=0.05), [6 * TILE])
    lane.submit(WritePass(record, TILE, {0: {"master": torch.zeros(6 * TILE)}}))
    lane.drain()
    job = ReadPass(record, 0, TILE, {"master": torch.empty(6 * TILE)})
    lane.submit(job, urgent=True)
    lane.wait(job)
    lane.close()
    assert job.slot_wait_s == 0


@pytest.mark.parametrize("fail_at", range(1, 25))
def test_an_error_of_any_transfer_reaches_who_waits_and_nothing_hangs(fail_at, seed):
    lane = StreamLane(Pool(TILE * 16, 3))
    disk = Noting(seed, fail_at=fail_at)
    record = record_on(disk, [3 * TILE])
    values = torch.randn(3 * TILE)
    with pytest.raises(OSError, match=r"layers\.3\.(hi|lo): injected"):
        for _ in range(3):
            lane.submit(WritePass(record, TILE, {0: {"master": values}}))
            into = {"master": torch.empty(3 * TILE)}
            job = ReadPass(record, 0, TILE, into)
            lane.submit(job)
            lane.wait(job, finished=True)
            assert torch.equal(into["master"], values)
        lane.drain()
    with pytest.raises(EngineFailedError, match="injected"):
        lane.submit(ReadPass(record, 0, TILE, {"master": torch.empty(3 * TILE)}))
    lane.close()
    assert len(disk.begun) >= fail_at
    assert [one for one in disk.begun if not one.waited_for] == [], "their memory is given back now"


def test_bytes_that_changed_on_the_disk_are_never_handed_out(seed):
    disk = FakeDisk(seed)
    lane = StreamLane(Pool(TILE * 16, 3))
    record = record_on(disk, [2 * TILE])
    lane.submit(WritePass(record, TILE, {0: {"master": torch.randn(2 * TILE)}}))
    lane.drain()
    disk.data[2 * TILE + 77] ^= 4  # in the second tile of hi
    into = {"hi": torch.empty(2 * TILE, dtype=torch.bfloat16)}
    job = ReadPass(record, 0, TILE, into)
    lane.submit(job)
    with pytest.raises(CorruptionError, match=r"layers\.3\.hi: .*fake disk at byte 4096.*checksum"):
        lane.wait(job)
    lane.close()


def test_a_read_that_comes_back_wrong_once_is_refused(seed):
    lane = StreamLane(Pool(TILE * 16, 2))
    record = record_on(FakeDisk(seed, flip_at=3), [10])
    lane.submit(WritePass(record, TILE, {0: {"master": torch.randn(10)}}))
    lane.drain()
    job = ReadPass(record, 0, TILE, {"master": torch.empty(10)})
    lane.submit(job)
    with pytest.raises(CorruptionError):
        lane.wait(job)
    lane.close()


def test_a_closed_lane_refuses_work_and_its_thread_is_gone(seed):
    before = held()
    lane = StreamLane(Pool(TILE * 16, 2))
    lane.close()
    assert left_since(before) == []
    with pytest.raises(EngineFailedError, match="closed"):
        lane.submit(
            ReadPass(record_on(FakeDisk(seed), [10]), 0, TILE, {"hi": torch.empty(10, dtype=torch.bfloat16)})
        )


def test_who_waits_for_a_pass_that_closing_has_dropped_is_told_so(seed):
    lane = StreamLane(Pool(TILE * 16, 2))
    into = {"hi": torch.empty(10, dtype=torch.bfloat16)}
    job = ReadPass(record_on(FakeDisk(seed), [10]), 0, TILE, into)
    with lane.lock:  # closed before the lane's thread gets to it
        lane.submit(job)
        lane._stopping = True
    lane.close()
    with pytest.raises(EngineFailedError, match="closed"):
        lane.wait(job)
    with pytest.raises(EngineFailedError, match="closed"):
        lane.drain()


# Passes without transfers


def _until(happens):
    for _ in range(12_000):
        if happens():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen within a minute")


@pytest.fixture
def inline():
    lane = StreamLane(Pool(TILE * 16, 2), inline=True)
    yield lane
    lane.close()


def in_host(numels=(6000,)):
    return record_on(HostStore(Ledger(1 << 24)), numels)


class _Where(Logged):
    """Notes the thread it runs on."""

    def process(self, start, stop, at):
        super().process(start, stop, at)
        self.log[-1] = (self.name, threading.get_ident())


def test_a_pass_over_host_memory_is_run_by_who_submits_it_and_is_over_then(inline):
    log, called = [], []
    job = _Where(in_host(), "here", log)
    job.on_finished.append(lambda: called.append(job.done))
    inline.submit(job)
    assert log == [("here", threading.get_ident())]
    assert (job.done, job.finished, called) == (True, True, [True])
    assert inline.settled(job.record)
    assert inline.passes["_Where"] == 1


@pytest.mark.parametrize("numels", [(6000,), (5000, 3, 9000)], ids=str)
def test_what_was_written_where_it_lies_is_read_there(inline, numels, seed):
    record = in_host(numels)
    values = {index: {"master": torch.randn(numel)} for index, numel in enumerate(numels)}
    inline.submit(WritePass(record, TILE, values))
    assert all(record.written("hi", start) for start, _ in tiles(record.shard.numel, TILE))
    assert not record.written("m", 0)
    for index, fields in values.items():
        into = {"master": torch.empty(numels[index]), "m": torch.ones(numels[index])}
        inline.submit(ReadPass(record, index, TILE, into))
        assert torch.equal(into["master"], fields["master"])
        assert into["m"].count_nonzero() == 0


def test_a_pass_of_ones_own_does_not_wake_the_lanes_thread(inline, monkeypatch):
    turns, turn = [], inline._turn
    monkeypatch.setattr(inline, "_turn", lambda: turns.append(0) or turn())
    _until(lambda: inline._rests)
    turns.clear()
    for number in range(50):
        inline.submit(_Where(in_host(), number, []))
    assert len(turns) <= 10  # it looks up once a second by itself, however long they take here


def test_a_thread_that_waits_for_what_a_pass_of_anothers_brings_is_woken(inline):
    job, woken = _Where(in_host(), "awaited", []), []

    def wait():
        with inline.lock:
            while not job.finished:
                woken.append(inline.changed.wait(60))

    waits = threading.Thread(target=wait)
    waits.start()
    _until(lambda: inline.changed.waiting == 2)
    inline.submit(job)
    waits.join(60)
    assert (waits.is_alive(), woken[-1:], inline.changed.waiting <= 1) == (False, [True], True)


@pytest.mark.parametrize("kind", ["a field on the disk", "a lane that is not inline"])
def test_a_pass_that_may_have_to_wait_is_run_by_the_lanes_thread(kind, seed):
    lane = StreamLane(Pool(TILE * 16, 2), inline=kind == "a field on the disk")
    record, log = in_host(), []
    if kind == "a field on the disk":
        record.drop("v")
        record.add("v", FakeDisk(seed))
    lane.submit(_Where(record, "there", log))
    lane.drain()
    assert [name for name, thread in log if thread != threading.get_ident()] == ["there"]
    lane.close()


class _Broken(Logged):
    def process(self, start, stop, at):
        raise ArithmeticError("no such number")


def test_what_goes_wrong_in_a_pass_of_ones_own_is_raised_there_and_stops_the_lane(inline):
    job, log = _Broken(in_host(), "broken", []), []
    with pytest.raises(ArithmeticError, match="no such number"):
        inline.submit(job)
    assert not job.done
    assert not job.finished
    with pytest.raises(EngineFailedError, match="earlier error: no such number"):
        inline.submit(_Where(in_host(), "next", log))
    with pytest.raises(EngineFailedError, match="no such number"):
        inline.drain()
    assert log == []
    assert inline.failure is not None


def test_a_field_that_leaves_host_memory_is_on_the_disk_when_its_pass_is_over(inline, seed):
    record, values = in_host(), torch.randn(6000)
    inline.submit(WritePass(record, TILE, {0: {"master": values}}))
    disk = FakeDisk(seed, delay_s=0.05)
    inline.submit(LeavePass(record, "hi", disk.allocate(record.field_nbytes("hi"), "hi"), TILE))
    assert record.tier("hi") == "nvme"
    job = ReadPass(record, 0, TILE, into := {"master": torch.empty(6000)})
    inline.submit(job)
    inline.wait(job)
    assert torch.equal(into["master"], values)


def test_a_write_that_fails_under_a_pass_of_ones_own_is_raised_and_the_field_stays(inline, seed):
    record, disk = in_host(), FakeDisk(seed, fail_at=2)
    inline.submit(WritePass(record, TILE, {0: {"master": torch.randn(6000)}}))
    with pytest.raises(OSError, match=r"layers\.3\.hi: injected"):
        inline.submit(LeavePass(record, "hi", disk.allocate(record.field_nbytes("hi"), "hi"), TILE))
    assert record.in_host("hi")
    assert inline.failure is not None


class _Hi(_Where):
    def touched(self):
        return ["hi", "grad16"]


def test_a_pass_is_run_by_its_submitter_if_all_that_it_touches_is_in_memory(inline, seed):
    record, log = in_host(), []
    record.drop("m")
    record.add("m", FakeDisk(seed))
    inline.submit(_Hi(record, "hi", log))
    assert log == [("hi", threading.get_ident())]
    record.add("grad16", FakeDisk(seed))
    inline.submit(_Hi(record, "spilled", log))
    inline.drain()
    assert log[1] == ("spilled", inline._thread.ident)


def test_a_pass_is_not_run_before_an_older_one_over_its_record(inline, seed):
    record, log, gate = record_on(FakeDisk(seed), [10]), [], threading.Event()
    older = _Where(record, "older", log, gate)
    inline.submit(older)
    assert older.begun.wait(60)
    for name in ("hi", "lo", "m", "v"):
        record.drop(name)
        record.add(name, HostStore(Ledger(1 << 24)))
    younger = _Where(record, "younger", log)
    inline.submit(younger)
    assert not younger.done
    inline.submit(_Where(in_host(), "other", log))
    assert [name for name, _ in log] == ["other"], "another record is nobody's to wait for"
    gate.set()
    inline.wait(younger, finished=True)
    assert [name for name, _ in log] == ["other", "older", "younger"]
    assert {thread for name, thread in log if name != "other"} == {inline._thread.ident}
    inline.submit(_Where(record, "last", log))
    assert log[-1] == ("last", threading.get_ident())


def test_a_closed_or_failed_lane_runs_no_pass_of_ones_own_either(inline, seed):
    record, log = record_on(FakeDisk(seed, fail_at=1), [10]), []
    job = ReadPass(record, 0, TILE, {"hi": torch.empty(10, dtype=torch.bfloat16)})
    record.note_written("hi", 0, TILE)
    inline.submit(job)
    with pytest.raises(OSError, match="injected"):
        inline.wait(job)
    with pytest.raises(EngineFailedError, match="injected"):
        inline.submit(_Where(in_host(), "late", log))
    closed = StreamLane(Pool(TILE * 16, 2), inline=True)
    closed.close()
    with pytest.raises(EngineFailedError, match="closed"):
        closed.submit(_Where(in_host(), "late", log))
    assert log == []


class _Uploads(Pass):
    """Copies from host memory, begun by who submits it; `begin` is called in the middle of that."""

    def __init__(self, record, begin=lambda: None):
        super().__init__(record)
        self.begin, self.begun, self.ended = begin, [], False

    @property
    def only_uploads(self):
        return self.record.in_host("hi")

    def let_copies_end(self):
        self.ended = True

    def tiles(self):
        return tiles(TILE, TILE)

    def reads_and_writes(self, start, stop):
        return ("hi",), ()

    def process(self, start, stop, at):
        self.begun.append(threading.current_thread())
        self.begin()


def pinned_record():
    record = Record(lay_out([("p", (TILE,))]), TILE, Traffic(), name="layers.3")
    record.add("hi", HostStore(Ledger(1 << 24)))
    record.note_written("hi", 0, TILE)
    return record


def test_uploads_from_host_memory_are_begun_by_who_submits_them(lane):
    job = _Uploads(pinned_record())
    lane.submit(job)
    assert (job.done, job.begun) == (True, [threading.current_thread()])
    lane.wait(job, finished=True)
    lane.drain()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_who_waits_for_uploads_that_are_given_up_goes_on_once_their_copies_are_over(lane, error):
    def fail():
        with lane.lock:
            found.extend(lane.unfinished(record))
        raise error

    found, record = [], pinned_record()
    job = _Uploads(record, fail)
    with pytest.raises(error):
        lane.submit(job)
    assert (found, job.ended, job.done) == ([job], True, False)
    lane.wait(job, finished=True)
    lane.drain()
    again = _Uploads(record)
    lane.submit(again)
    lane.wait(again, finished=True)


def test_a_field_that_leaves_host_memory_meanwhile_is_not_uploaded_from_there(seed):
    lane = StreamLane(Pool(TILE * 16, 1))
    record, disk = pinned_record(), FakeDisk(seed)

    class Left(_Uploads):
        asked = 0

        @property
        def only_uploads(self):
            there = super().only_uploads
            if not self.asked:  # asked without the lock: what is so now need not be so later
                self.asked = 1
                leave = LeavePass(record, "hi", disk.allocate(record.field_nbytes("hi"), "hi"), TILE)
                lane.submit(leave)
                lane.wait(leave, finished=True)
            return there

    try:
        job = Left(record)
        lane.submit(job)
        lane.wait(job, finished=True)
        assert threading.current_thread() not in job.begun
    finally:
        lane.close()

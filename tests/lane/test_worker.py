"""The thread beside the lane's, which computes. The disk is faked, as for the lane; gates stand for updates
that take long.
"""

import contextlib
import gc
import threading
import weakref

import pytest
import torch

from fakes import FakeDisk
from gated_passes import TILE, Gated, Logged, Moving
from infinity.errors import EngineFailedError
from infinity.lane import lane as lanes
from infinity.lane.lane import StreamLane
from infinity.lane.passes import ReadPass, WritePass
from infinity.planning.layout import lay_out
from infinity.records.record import Record, Traffic
from infinity.storage.memory import Ledger, Pool
from infinity.storage.store import HostStore
from leftovers import held, left_since


def record_on(disk, numel):
    record = Record(lay_out([("p", (numel,))]), TILE, Traffic(), name="layers.3")
    for field in ("hi", "lo", "m", "v"):
        record.add(field, disk)
    return record


@pytest.fixture
def two():
    """A lane with a worker, and four slots."""
    lane = StreamLane(Pool(TILE * 16, 4), apart=True)
    yield lane
    lane.close()


class Computing(Logged):
    """An update that lasts until its gate is opened; with a tile in a slot."""

    computes = True

    def __init__(self, seed, gate=None, log=None):
        super().__init__(record_on(FakeDisk(seed), 10), "update", [] if log is None else log, gate)

    def reads_and_writes(self, start, stop):
        return (), ("hi",)


@pytest.fixture
def gate():
    """Opened at the end, whatever a test finds, so that nothing waits for it for long."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_fetch_and_its_upload_end_while_an_update_is_still_computing(two, gate, seed):
    record, upload = record_on(FakeDisk(seed), TILE), Gated()
    two.submit(WritePass(record, TILE, {0: {"master": torch.ones(TILE)}}))
    update = Computing(seed, gate)
    two.submit(update)
    assert update.begun.wait(60)
    read = ReadPass(record, 0, TILE, into := {"master": torch.empty(TILE)})
    moving = Moving(record_on(FakeDisk(seed), 10), upload)
    upload.gate.set()
    for job in (read, moving):
        two.submit(job, urgent=True)
        two.wait(job, finished=True)
    assert into["master"].tolist() == [1.0] * TILE
    assert not update.done
    gate.set()
    two.wait(update, finished=True)


def test_updates_leave_a_slot_to_fetches_however_many_there_are(two, gate, seed):
    updates = [Computing(seed + n, gate) for n in range(6)]
    for job in updates:
        two.submit(job)
    assert updates[0].begun.wait(60)
    record = record_on(FakeDisk(seed), TILE)
    for job in (
        WritePass(record, TILE, {0: {"master": torch.ones(TILE)}}),
        ReadPass(record, 0, TILE, {"master": torch.empty(TILE)}),
    ):
        two.submit(job)
        two.wait(job)
    assert not any(job.done for job in updates)
    gate.set()
    two.drain()


def test_nobody_waits_behind_a_fetch_whose_record_is_being_updated(two, gate, seed):
    update = Computing(seed, gate)
    behind, other = (
        Logged(update.record, "behind", update.log),
        Logged(record_on(HostStore(Ledger(1 << 24)), 10), "other", update.log),
    )
    for job in (update, behind, other):
        two.submit(job)
    two.wait(other)
    assert update.log == ["other"]
    gate.set()
    two.drain()
    assert update.log == ["other", "update", "behind"]


def test_what_was_read_first_is_worked_on_first(two, seed, monkeypatch):
    monkeypatch.setattr(lanes, "_PATIENCE_S", 60.0)
    slow, fast = (record_on(disk, TILE) for disk in (FakeDisk(seed), FakeDisk(seed + 1)))
    for record in (slow, fast):
        two.submit(WritePass(record, TILE, {0: {"master": torch.ones(TILE)}}))
    two.drain()
    opened, began = Gated(), threading.Event()
    slow.read, read = lambda *_, **__: (began.set(), opened)[1], slow.read
    late, soon = (ReadPass(record, 0, TILE, {"master": torch.empty(TILE)}) for record in (slow, fast))
    late.work = lambda *_: None  # what its transfer stands for was not read
    two.submit(late)
    assert began.wait(60)
    two.submit(soon)
    two.wait(soon, finished=True)
    assert not late.done
    slow.read = read
    opened.gate.set()
    two.drain()


class Ordered(Logged):
    """An update, or a fetch with one, of a record in host memory: it has no slot."""

    computes = True

    def __init__(self, name, log, gate=None, *, deferrable=True):
        super().__init__(record_on(HostStore(Ledger(1 << 24)), 10), name, log, gate)
        self.admitted, self._deferrable = threading.Event(), deferrable

    @property
    def deferrable(self):
        return self._deferrable

    def reads_and_writes(self, start, stop):
        self.admitted.set()
        return (), ()


@pytest.fixture
def orders(two, gate, monkeypatch):
    """Submits passes while the worker is busy, calls for one, and returns their order."""
    monkeypatch.setattr(lanes, "_GIVEN_TILES", 1)
    monkeypatch.setattr(lanes, "_GIVEN_NUMEL", 1)

    def order(*names, waits_for=None):
        log, waiting = [], None
        busy = Ordered("busy", log, gate)
        two.submit(busy)
        assert busy.begun.wait(60)
        jobs = {name: Ordered(name, log, deferrable=name.startswith("update")) for name in names}
        for job in jobs.values():
            two.submit(job)
            assert job.admitted.wait(60)
        if waits_for is not None:
            waiting = threading.Thread(target=two.wait, args=[jobs[waits_for]])
            waiting.start()
            while not jobs[waits_for].urgent:
                waiting.join(0.001)
        gate.set()
        two.drain()
        if waiting is not None:
            waiting.join()
        assert log.pop(0) == "busy"
        return log

    return order


def test_of_the_updates_in_a_backward_the_newest_comes_first(orders):
    assert orders("update 3", "update 2", "update 1") == ["update 1", "update 2", "update 3"]


def test_what_is_needed_in_its_order_comes_before_updates_and_in_that_order(orders):
    assert orders("update 2", "fetch 5", "update 1", "fetch 6") == [
        "fetch 5",
        "fetch 6",
        "update 1",
        "update 2",
    ]


def test_an_update_that_a_thread_waits_for_comes_first(orders):
    assert orders("update 3", "fetch 5", "update 2", waits_for="update 3") == [
        "update 3",
        "fetch 5",
        "update 2",
    ]


class Broken(Computing):
    def process(self, start, stop, at):
        raise ArithmeticError("no such number")


def test_an_error_in_an_update_reaches_who_waits_for_anything(two, seed):
    broken = Broken(seed)
    two.submit(broken)
    with pytest.raises(ArithmeticError, match="no such number"):
        two.wait(broken)
    with pytest.raises(EngineFailedError, match="no such number"):
        two.submit(Computing(seed + 1))


def test_an_error_in_an_update_keeps_nothing_of_who_was_told(two, seed):
    seen = []

    def train():
        loss = torch.ones(1)
        seen.append(weakref.ref(loss))
        two.submit(broken := Broken(seed))
        two.wait(broken)

    with contextlib.suppress(ArithmeticError):
        train()
    two.close()
    gc.collect()
    assert [one() for one in seen] == [None]


class Refused(Computing):
    """An update whose second write cannot begin."""

    def __init__(self, seed, begun):
        super().__init__(seed)
        self.first = begun

    def reads_and_writes(self, start, stop):
        return (), ("hi", "lo")

    def write(self, name, *_, **__):
        if name == "lo":
            raise OSError("no more requests")
        return self.first


class Waited(Gated):
    """Is over when it was waited for."""

    def wait(self, timeout_s=None):
        self.gate.set()


class RefusedRead(Refused):
    """An update whose second read cannot begin."""

    def reads_and_writes(self, start, stop):
        return ("hi", "lo"), ()

    read = Refused.write


@pytest.mark.parametrize("kind", [Refused, RefusedRead])
def test_a_transfer_that_has_begun_is_waited_for_where_the_next_cannot_begin(two, seed, kind):
    refused = kind(seed, Waited())
    two.submit(refused)
    with pytest.raises(OSError, match="no more requests"):
        two.wait(refused)
    two.close()
    assert refused.first.done


def test_closing_waits_for_the_update_under_way_and_drops_the_others(seed, gate):
    before = held()
    lane = StreamLane(Pool(TILE * 16, 4), apart=True)
    log = []
    first, second = Computing(seed, gate, log), Computing(seed + 1, gate, log)
    lane.submit(first)
    assert first.begun.wait(60)
    lane.submit(second)
    opens = threading.Timer(0.05, gate.set)
    opens.start()
    lane.close()
    opens.join()
    assert log == ["update"]
    del first, second, lane
    assert left_since(before) == []


class ClosingHere(Logged):
    """As where the garbage collector ends an engine in the lane's own thread."""

    def process(self, start, stop, at):
        self.begun.set()
        self.lane.close()
        super().process(start, stop, at)


def test_a_lane_that_its_own_thread_closes_waits_for_the_update_under_way(two, gate, seed):
    update = Computing(seed, gate)
    two.submit(update)
    assert update.begun.wait(60)
    closing = ClosingHere(record_on(FakeDisk(seed), 10), "closed", update.log)
    closing.lane = two
    two.submit(closing)
    assert closing.begun.wait(60)
    threading.Timer(0.05, gate.set).start()
    two._thread.join(60)
    assert update.log == ["update", "closed"]


class Closing(Computing):
    """As where the garbage collector ends an engine in the middle of an update."""

    def process(self, start, stop, at):
        self.lane.close()
        super().process(start, stop, at)


def test_an_update_in_which_its_engine_ends_does_not_wait_for_itself(seed):
    before = held()
    lane = StreamLane(Pool(TILE * 16, 4), apart=True)
    job = Closing(seed)
    job.lane = lane
    lane.submit(job)
    with pytest.raises(EngineFailedError, match="closed"):
        lane.wait(job)
    lane.close()
    lane._worker._thread.join(60)
    del job, lane
    assert left_since(before) == []

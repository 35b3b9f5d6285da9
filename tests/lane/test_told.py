"""Gradients that are not written since moments tell them, on a real lane. Faked: the disk. Trusted: ReadPass,
which reads what a SpillPass would have written.
"""

import gc
import threading
from collections import Counter

import pytest
import torch

from infinity.device.device import CpuDevice
from infinity.errors import CorruptionError
from infinity.kernels import EXCEPTION_NBYTES, ToldGradient
from infinity.lane.ahead import AheadPass
from infinity.lane.lane import StreamLane
from infinity.lane.passes import ReadPass, SpillPart
from infinity.lane.told import (
    UNTOLD,
    MomentHome,
    RecoverPass,
    SpillUntoldPass,
    ToldGradients,
    most_exceptions,
)
from infinity.storage.memory import Ledger, Pool
from two_generations import NUMELS, TILE, Setup


class Told(Setup):
    """Makes updates ahead whose gradients are not kept."""

    def __init__(self, lane, room=1 << 20):
        super().__init__(lane)
        self.ledger, self.counts = Ledger(room), Counter()
        self.record.add("grad16", self.disk)

    def make_ahead(self, of=(0, 1, 2)):
        ahead, spill, (fields, gradients) = self.queue_ahead(of)
        for job in (ahead, spill):
            self.lane.wait(job, finished=True)
        return fields, gradients

    def queue_ahead(self, of=(0, 1, 2)):
        fields, updates = self.begin(), self.updates()
        told = {
            index: ToldGradient(updates[index].scalars, most_exceptions(numel))
            for index, numel in enumerate(NUMELS)
            if index in of
        }
        moments = MomentHome(*self.record.home("m")), MomentHome(*fields.home("m"))
        gradients = ToldGradients(*moments, told, self.ledger, self.counts)
        parts = {index: SpillPart(self.gradients[index]) for index in of}
        ahead = AheadPass(self.unit, CpuDevice(), TILE, updates, fields, gradients)
        spill = SpillUntoldPass(self.record, TILE, parts, gradients)
        for job in (ahead, spill):
            self.lane.submit(job)
        return ahead, spill, (fields, gradients)

    def recover(self, gradients):
        self.run(RecoverPass(self.record, TILE, gradients))

    def stored(self, index):
        values = torch.empty(NUMELS[index], dtype=torch.bfloat16)
        self.run(ReadPass(self.record, index, TILE, {"grad16": values}))
        return values

    @property
    def written(self):
        return self.traffic.written["nvme", "grad16"]


@pytest.fixture
def lane():
    lane = StreamLane(Pool(TILE * 16, 3))
    yield lane
    lane.close()


@pytest.mark.parametrize("counts", [False, True], ids=["undecided", "counts"])
def test_gradients_that_moments_tell_are_not_written_and_come_back_with_their_bits(lane, counts):
    ours = Told(lane)
    for _ in range(3):
        fields, gradients = ours.make_ahead()
        assert gradients.hold
        assert ours.written == 0
        if counts:
            fields.replace()
            gradients.was_replaced()
        ours.recover(gradients)
        assert ours.written == ours.record.field_nbytes("grad16")
        for index, gradient in enumerate(ours.gradients):
            assert torch.equal(ours.stored(index).view(torch.int16), gradient.view(torch.int16))
        if not counts:
            fields.drop()
            ours.steps -= 1
            ours.update()
        ours.traffic.written.clear()
        ours.gradients = [one.roll(1) * 0.5 for one in ours.gradients]
    assert ours.counts == {}


class _Held:
    """A transfer that is not over before it may be."""

    def __init__(self, transfer, may_end):
        self._transfer, self._may_end = transfer, may_end

    @property
    def done(self):
        return self._may_end.is_set() and self._transfer.done

    def wait(self):
        assert self._may_end.wait(60)
        self._transfer.wait()


def test_while_the_update_is_written_gradients_are_given_back_and_others_read(monkeypatch):
    lane = StreamLane(Pool(TILE * 16, 8))
    ours, other = Told(lane), Setup(lane)
    may_end, write = threading.Event(), ours.disk.write
    monkeypatch.setattr(ours.disk, "write", lambda request: _Held(write(request), may_end))
    into = torch.empty(NUMELS[0], dtype=torch.bfloat16)
    read = ReadPass(other.record, 0, TILE, {"hi": into})
    with lane.lock:  # all are queued before any begins
        ahead, spill, _ = ours.queue_ahead()
        lane.submit(read)
    lane.wait(spill, finished=True)
    lane.wait(read)
    assert ahead.done
    assert not ahead.finished
    may_end.set()
    lane.wait(ahead, finished=True)
    lane.close()
    assert ours.written == 0


def test_exceptions_are_paid_for_as_long_as_they_are_kept(lane):
    ours = Told(lane)
    ours.gradients[0][:7] = -0.0
    _, gradients = ours.make_ahead()
    assert gradients.hold
    assert 7 * EXCEPTION_NBYTES <= ours.ledger.held_nbytes < 40 * EXCEPTION_NBYTES
    ours.recover(gradients)
    assert torch.equal(ours.stored(0).view(torch.int16), ours.gradients[0].view(torch.int16))
    del gradients
    gc.collect()
    assert ours.ledger.held_nbytes == 0


@pytest.mark.parametrize("room", [0, 1 << 20], ids=["no room", "too many"])
def test_where_exceptions_find_no_room_or_are_too_many_gradients_are_written_as_ever(lane, room):
    ours = Told(lane, room)
    ours.gradients[2][: 5 if room == 0 else 500] = -0.0
    _, gradients = ours.make_ahead()
    assert not gradients.hold
    assert ours.counts == {UNTOLD: 1}
    assert ours.written == ours.record.field_nbytes("grad16")
    ours.recover(gradients)
    assert ours.written == ours.record.field_nbytes("grad16"), "once"
    for index, gradient in enumerate(ours.gradients):
        assert torch.equal(ours.stored(index).view(torch.int16), gradient.view(torch.int16))


def test_of_some_parameters_alone_gradients_are_recovered(lane):
    ours = Told(lane)
    _, gradients = ours.make_ahead(of=(2,))
    ours.recover(gradients)
    assert torch.equal(ours.stored(2), ours.gradients[2])


@pytest.mark.parametrize("which", ["before", "behind"])
def test_moments_that_are_read_are_compared_with_what_was_written(lane, which):
    ours = Told(lane)
    ours.update()
    fields, gradients = ours.make_ahead()
    extent, _ = ours.record.home("m") if which == "before" else fields.home("m")
    ours.disk.data[extent.offset + 100] ^= 1
    with pytest.raises(CorruptionError, match=r"layers.3.m"):
        ours.recover(gradients)


def test_moments_that_have_moved_are_not_taken_for_others(lane):
    ours = Told(lane)
    ours.update()
    _, gradients = ours.make_ahead()
    ours.record.targets["m"] = ours.host.allocate(ours.record.field_nbytes("m"), "m")
    ours.update()
    with pytest.raises(AssertionError, match="not recovered before its moments moved"):
        ours.recover(gradients)

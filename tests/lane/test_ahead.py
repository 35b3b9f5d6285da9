"""The pass that makes an update before it is decided, on a real lane. Faked: the disk. Trusted: UpdatePass,
which makes the same update in place.
"""

import pytest
import torch
from torch import nn

from fakes import FakeDisk
from infinity.device.device import CpuDevice
from infinity.errors import CorruptionError
from infinity.kernels import AdamWScalars, state_key
from infinity.lane.ahead import AheadPass
from infinity.lane.fetch import UpdatePass
from infinity.lane.lane import StreamLane
from infinity.lane.passes import CheckPass, ReadPass, WritePass
from infinity.planning.layout import RecordSchema, lay_out
from infinity.records.next_fields import NextFields
from infinity.records.record import Record, Traffic
from infinity.records.updates import Update
from infinity.storage.memory import Ledger, Pool, view
from infinity.storage.store import HostStore
from infinity.units.unit import Unit

TILE = 4096
NUMELS = [5000, 3, 9000]
FIELDS = ("hi", "master", "m", "v")


class Setup:
    """A unit whose record lies on a faked disk, and a lane."""

    def __init__(self, lane, schema="fp32"):
        self.lane, self.disk, self.host = lane, FakeDisk(0), HostStore(Ledger(1 << 24))
        self.traffic = Traffic()
        shard = lay_out([(f"p{index}", (numel,)) for index, numel in enumerate(NUMELS)], TILE)
        self.record = Record(shard, TILE, self.traffic, schema=RecordSchema(schema), name="layers.3")
        for field in self.record.schema.fields:
            self.record.add(field, self.disk)
        generator = torch.Generator().manual_seed(0)
        start = [torch.randn(numel, generator=generator).bfloat16() for numel in NUMELS]
        self.gradients = [torch.randn(numel, generator=generator).bfloat16() for numel in NUMELS]
        self.run(WritePass(self.record, TILE, {n: {"master": one.float()} for n, one in enumerate(start)}))
        self.unit = Unit(0, [nn.Parameter(one) for one in start], self.record)
        self.steps = 0

    def run(self, job):
        self.lane.submit(job)
        self.lane.wait(job, finished=True)

    def updates(self):
        self.steps += 1
        scalars = AdamWScalars(0.01, 0.9, 0.99, 1e-8, 0.1, self.steps)
        return {
            index: Update(scalars, one, None, state_key(0, index, self.steps))
            for index, one in enumerate(self.gradients)
        }

    def update(self):
        self.unit.pending.update(self.updates())
        self.run(UpdatePass(self.unit, CpuDevice(), TILE))

    def begin(self):
        names = self.record.fields
        return NextFields(
            self.record, {name: self.disk.allocate(self.record.field_nbytes(name), name) for name in names}
        )

    def make(self, fields):
        self.run(AheadPass(self.unit, CpuDevice(), TILE, self.updates(), fields))

    def read(self):
        found = []
        for index, numel in enumerate(NUMELS):
            into = {name: torch.empty(numel) for name in FIELDS[1:]}
            into["hi"] = torch.empty(numel, dtype=torch.bfloat16)
            self.run(ReadPass(self.record, index, TILE, into))
            found += [into[name] for name in FIELDS]
        return found


def equal(found, expected):
    return all(map(torch.equal, found, expected))


@pytest.fixture
def lane():
    lane = StreamLane(Pool(TILE * 16, 3))
    yield lane
    lane.close()


@pytest.mark.parametrize("schema", ["fp32", "bf16", "int8"])
def test_what_replaces_a_record_is_what_an_update_makes_of_it(lane, schema):
    ours, plain = Setup(lane, schema), Setup(lane, schema)
    for _ in range(3):
        before = ours.read()
        fields = ours.begin()
        ours.make(fields)
        assert equal(ours.read(), before), "nobody sees it"
        assert fields.may_replace
        fields.replace()
        ours.run(CheckPass(ours.record, TILE))
        plain.update()
        assert equal(ours.read(), plain.read())


def test_what_is_dropped_leaves_the_record_as_it_is(lane):
    ours, plain = Setup(lane), Setup(lane)
    fields = ours.begin()
    ours.make(fields)
    assert set(fields.drop()) == set(ours.record.fields)
    ours.steps -= 1
    ours.update()
    plain.update()
    assert equal(ours.read(), plain.read())


def test_hi_in_host_memory_keeps_its_values_and_its_place(lane):
    ours, plain = Setup(lane), Setup(lane)
    ours.record.targets["hi"] = place = ours.host.allocate(ours.record.field_nbytes("hi"), "hi")
    for one in (ours, plain):
        one.update()
    assert ours.record.in_host("hi")
    before = bytes(view(place.offset, place.nbytes))
    fields = ours.begin()
    ours.make(fields)
    assert bytes(view(place.offset, place.nbytes)) == before
    assert set(fields.replace()) == {"lo", "m", "v"}
    assert ours.record.tier("hi") == "nvme"
    assert ours.record.targets == {"hi": place}
    plain.update()
    assert equal(ours.read(), plain.read())


def test_values_that_are_written_meanwhile_spoil_it_and_gradients_do_not(lane):
    ours = Setup(lane)
    ours.update()
    fields = ours.begin()
    ours.record.add("grad16", ours.disk)
    ours.make(fields)
    assert fields.may_replace
    ours.run(WritePass(ours.record, TILE, {1: {"m": torch.ones(3)}}))
    assert not fields.may_replace
    for change in (ours.update, lambda: ours.record.drop("v")):
        fields = ours.begin()
        change()
        assert fields.spoiled


def test_what_it_reads_is_compared_with_what_was_written(lane):
    ours = Setup(lane)
    ours.update()
    extent, _ = ours.record.home("m")
    ours.disk.data[extent.offset + 100] ^= 1
    with pytest.raises(CorruptionError, match=r"layers.3.m"):
        ours.make(ours.begin())

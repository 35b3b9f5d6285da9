"""A unit whose record lies on a faked disk, of which passes make a second generation."""

import torch
from torch import nn

from fakes import FakeDisk
from infinity.device.device import CpuDevice
from infinity.kernels import AdamWScalars, state_key
from infinity.lane.ahead import AheadPass
from infinity.lane.fetch import UpdatePass
from infinity.lane.passes import ReadPass, WritePass
from infinity.planning.layout import RecordSchema, lay_out
from infinity.records.next_fields import NextFields
from infinity.records.record import Record, Traffic
from infinity.records.updates import Update
from infinity.storage.memory import Ledger
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
        self.steps, self.lr = 0, 0.01

    def run(self, job):
        self.lane.submit(job)
        self.lane.wait(job, finished=True)

    def updates(self):
        self.steps += 1
        scalars = AdamWScalars(self.lr, 0.9, 0.99, 1e-8, 0.1, self.steps)
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

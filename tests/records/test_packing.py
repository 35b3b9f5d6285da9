"""Scales of 8-bit moments, of which many tiles share a block, on a real lane. The disk is faked."""

import pytest
import torch

from fakes import FakeDisk
from infinity.checkpoint.ranges import buffers
from infinity.errors import CorruptionError
from infinity.lane.lane import StreamLane
from infinity.lane.passes import CopyInPass, CopyOutPass, LeavePass, ReadPass, WritePass
from infinity.planning.layout import RecordSchema, lay_out
from infinity.records.packing import PackedSpans
from infinity.records.record import Record, Traffic
from infinity.sizes import BLOCK
from infinity.storage.memory import Ledger, Pool
from infinity.storage.store import HostStore

TILE = 4096
NUMELS = [40 * TILE, 1000, 30 * TILE - 1000]  # tiles 0 to 39; 40; 41 to 70, of spans of 32 tiles
ALL = range(len(NUMELS))
SPANS = 3


class Setup:
    """A record of 8-bit moments on a faked disk, and a lane."""

    def __init__(self, seed):
        self.lane, self.disk = StreamLane(Pool(TILE * 16, 3)), FakeDisk(seed)
        self.host, self.traffic = HostStore(Ledger(1 << 24)), Traffic()
        shard = lay_out([(f"p{index}", (numel,)) for index, numel in enumerate(NUMELS)], TILE)
        self.record = Record(shard, TILE, self.traffic, schema=RecordSchema("int8"), name="layers.3")
        for field in self.record.schema.fields:
            self.record.add(field, self.disk)

    def run(self, job):
        self.lane.submit(job)
        self.lane.wait(job, finished=True)

    def write(self, *indices):
        """Set the moments of some parameters to new values; return what they are then."""
        values = {
            index: {"m": torch.randn(NUMELS[index]), "v": torch.rand(NUMELS[index])} for index in indices
        }
        self.run(WritePass(self.record, TILE, values))
        return {index: self.read(index) for index in indices}

    def read(self, index):
        into = {name: torch.full((NUMELS[index],), 77.0) for name in ("m", "v")}
        self.run(ReadPass(self.record, index, TILE, into))
        return into

    def moved(self):
        """Return bytes of scales that were read, and written, since this was asked."""
        found = [counter["nvme", "scale"] for counter in (self.traffic.read, self.traffic.written)]
        self.traffic.read.clear()
        self.traffic.written.clear()
        return found

    def assert_holds(self, expected):
        for index in ALL:
            found = self.read(index)
            for name in ("m", "v"):
                assert torch.equal(found[name], expected[index][name]), f"p{index}.{name}"


@pytest.fixture
def setup(seed):
    made = Setup(seed)
    yield made
    made.lane.close()


def zeros(index):
    return {name: torch.zeros(NUMELS[index]) for name in ("m", "v")}


def test_a_pass_over_every_tile_reads_each_block_once_and_writes_it_once(setup):
    expected = setup.write(*ALL)
    setup.moved()
    setup.run(WritePass(setup.record, TILE, {index: expected[index] for index in ALL}, rewrite=True))
    assert setup.moved() == [SPANS * BLOCK, SPANS * BLOCK]
    setup.read(0)
    assert setup.moved() == [2 * BLOCK, 0], "of two spans"


def test_what_is_written_first_needs_no_read_and_the_rest_of_its_block_is_zero(setup):
    written = setup.write(1)
    assert setup.moved() == [BLOCK, BLOCK], "the read is the test's own"
    setup.assert_holds({0: zeros(0), **written, 2: zeros(2)})


@pytest.mark.parametrize("index", ALL)
def test_what_a_pass_leaves_out_of_a_block_stays_as_it_was(setup, index):
    before = setup.write(*ALL)
    setup.assert_holds({**before, **setup.write(index)})


def test_ranges_are_copied_out_as_they_were_copied_in(setup):
    expected, numel = setup.write(*ALL), setup.record.shard.numel
    fields = ("m", "v", "scale")
    whole = buffers(setup.record, fields, numel)
    setup.run(CopyOutPass(setup.record, TILE, 0, numel, whole))
    setup.write(*ALL)
    middle = 35 * TILE  # inside a span
    for start, stop in ((0, middle), (middle, numel)):
        first, last = (setup.record.schema.nbytes("scale", at) for at in (start, stop))
        values = {name: whole[name][start:stop] for name in ("m", "v")}
        values["scale"] = whole["scale"][first:last]
        setup.run(CopyInPass(setup.record, TILE, start, stop, values))
    setup.assert_holds(expected)


def test_a_block_that_came_back_wrong_is_refused_by_name(setup):
    setup.write(*ALL)
    extent, _ = setup.record.home("scale")
    setup.disk.data[extent.offset + BLOCK + 5] ^= 1
    with pytest.raises(CorruptionError, match=rf"layers\.3\.scale: the {BLOCK} bytes read from fake disk"):
        setup.read(0)


@pytest.mark.parametrize("failing", range(1, 4))
def test_a_block_that_cannot_be_written_fails_the_pass(setup, failing):
    setup.write(*ALL)
    write, scales = setup.disk.write, []

    def fails(request):
        if request.what.endswith("scale"):
            scales.append(request)
            setup.disk._fail_at = setup.disk.transfers + 1 if len(scales) == failing else None
        return write(request)

    setup.disk.write = fails
    with pytest.raises(OSError, match=r"layers\.3\.scale: injected"):
        setup.write(*ALL)


def test_a_field_leaves_host_memory_by_whole_blocks_and_comes_back(setup):
    expected = setup.write(*ALL)
    setup.record.targets["scale"] = setup.host.allocate(setup.record.field_nbytes("scale"), "scale")
    job = WritePass(setup.record, TILE, expected, rewrite=True)
    job.adopts = frozenset({"scale"})
    setup.moved()
    setup.run(job)
    assert (setup.record.tier("scale"), setup.moved()) == ("host", [SPANS * BLOCK, 0])
    setup.assert_holds(expected)
    expected |= setup.write(0)
    assert setup.moved() == [0, 0]
    extent = setup.disk.allocate(setup.record.field_nbytes("scale"), "scale")
    setup.run(LeavePass(setup.record, "scale", extent, TILE))
    assert (setup.record.tier("scale"), setup.moved()) == ("nvme", [0, SPANS * BLOCK])
    setup.assert_holds(expected)


def test_a_field_that_was_never_written_is_cleared_in_host_memory_tile_by_tile(setup):
    for name in ("m", "v", "scale"):
        setup.record.drop(name)
        setup.record.add(name, setup.host)
    written = setup.write(1)
    setup.assert_holds({0: zeros(0), **written, 2: zeros(2)})
    setup.assert_holds({**written, **setup.write(0, 2)})


def test_who_waits_for_a_tile_of_a_span_for_so_long_is_told_that_it_still_comes(setup):
    expected = setup.write(*ALL)
    asked, begin = [], setup.record.read

    def late(*args, **settings):
        transfer = begin(*args, **settings)
        wait = transfer.wait

        def first(timeout_s=None):
            asked.append(timeout_s)
            if timeout_s is not None:
                raise TimeoutError
            wait()

        transfer.wait = first
        return transfer

    setup.record.read = late
    memory = torch.zeros(TILE)
    piece = PackedSpans(setup.record).read("scale", 0, TILE, memory.data_ptr(), urgent=False)
    with pytest.raises(TimeoutError):
        piece.wait(0.001)
    assert asked == [0.001]
    assert not memory.any()
    setup.record.read = begin
    setup.assert_holds(expected)

"""The pass that makes an update before it is decided, on a real lane. Faked: the disk. Trusted: UpdatePass,
which makes the same update in place.
"""

import pytest
import torch

from infinity.errors import CorruptionError
from infinity.lane.lane import StreamLane
from infinity.lane.moving import MoveHiPass
from infinity.lane.passes import CheckPass, LeavePass, WritePass
from infinity.storage.memory import Pool, view
from two_generations import TILE, Setup


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


def with_hi_in_host(lane, *others):
    """Return a setup whose `hi` lies in host memory, and where, beside others, all updated once."""
    ours = Setup(lane)
    ours.record.targets["hi"] = place = ours.host.allocate(ours.record.field_nbytes("hi"), "hi")
    for one in (ours, *others):
        one.update()
    assert ours.record.in_host("hi")
    return ours, place


@pytest.mark.parametrize("lr", [1e-6, 100.0], ids=["a byte each", "as they are"])
def test_hi_in_host_memory_keeps_its_place_and_is_moved_when_the_update_counts(lane, lr):
    plain = Setup(lane)
    ours, place = with_hi_in_host(lane, plain)
    for _ in range(2):
        for one in (ours, plain):
            one.lr = lr
        before = bytes(view(place.offset, place.nbytes))
        ours.traffic.written.clear()
        fields = ours.begin()
        ours.make(fields)
        assert bytes(view(place.offset, place.nbytes)) == before
        whole = ours.record.field_nbytes("hi")
        assert (ours.traffic.written["nvme", "hi"] == whole) == (lr == 100.0)
        assert ours.traffic.written["nvme", "hi"] > whole // 2 - 1
        assert set(fields.replace()) == {"hi", "lo", "m", "v"}
        fields.moves.decide()
        ours.run(MoveHiPass(fields.moves, TILE))
        assert ours.record.in_host("hi")
        assert ours.record.home("hi")[0] == place
        plain.update()
        assert equal(ours.read(), plain.read())


def test_moves_that_do_not_count_move_nothing_and_others_than_were_written_are_an_error(lane):
    ours, place = with_hi_in_host(lane)
    before = bytes(view(place.offset, place.nbytes))
    fields = ours.begin()
    ours.make(fields)
    ours.run(MoveHiPass(fields.moves, TILE))
    assert bytes(view(place.offset, place.nbytes)) == before
    extent, _ = fields.home("hi")
    ours.disk.data[extent.offset + 100] ^= 1
    fields.moves.decide()
    with pytest.raises(CorruptionError, match=r"layers.3.hi"):
        ours.run(MoveHiPass(fields.moves, TILE))


def test_where_a_read_of_moves_is_refused_those_that_have_begun_are_over(lane, monkeypatch):
    ours, _ = with_hi_in_host(lane)
    fields, numel = ours.begin(), ours.record.shard.numel
    ours.make(fields)
    read, begun = ours.disk.read, []

    def refuses_the_third(request):
        if len(begun) == 2:
            raise OSError("refused")
        begun.append(read(request))
        return begun[-1]

    monkeypatch.setattr(ours.disk, "read", refuses_the_third)
    room = torch.empty(numel, dtype=torch.int16)
    with pytest.raises(OSError, match="refused"):
        fields.moves.read(0, numel, room.data_ptr(), room, urgent=False, more=False)
    assert [one.waited_for for one in begun] == [True, True]


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


def test_hi_that_leaves_host_memory_before_the_update_is_written_whole(lane):
    plain = Setup(lane)
    ours, _ = with_hi_in_host(lane, plain)
    fields = ours.begin()
    moves = fields.moves
    record = ours.record
    ours.run(LeavePass(record, "hi", ours.disk.allocate(record.field_nbytes("hi"), "hi"), TILE))
    ours.make(fields)
    moves.decide()
    ours.run(MoveHiPass(moves, TILE))
    assert set(fields.replace()) == {"hi", "lo", "m", "v"}
    plain.update()
    assert equal(ours.read(), plain.read())


def test_hi_that_leaves_host_memory_behind_the_update_is_moved_where_it_is(lane):
    plain = Setup(lane)
    ours, _ = with_hi_in_host(lane, plain)
    fields, record = ours.begin(), ours.record
    ours.make(fields)
    ours.run(LeavePass(record, "hi", ours.disk.allocate(record.field_nbytes("hi"), "hi"), TILE))
    fields.replace()
    fields.moves.decide()
    ours.run(MoveHiPass(fields.moves, TILE))
    ours.run(CheckPass(record, TILE))
    plain.update()
    assert equal(ours.read(), plain.read())

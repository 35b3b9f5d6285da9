"""The pass that makes an update before it is decided, on a real lane. Faked: the disk. Trusted: UpdatePass,
which makes the same update in place.
"""

import pytest
import torch

from infinity.errors import CorruptionError
from infinity.lane.lane import StreamLane
from infinity.lane.passes import CheckPass, WritePass
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

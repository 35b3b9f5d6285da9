"""The pass that keeps what coding leaves out. Trusted: Coding, and the record that it walks over."""

import pytest
import torch

from infinity.device.device import CpuDevice
from infinity.gradients.coding import Coding
from infinity.lane.feedback import FeedbackPass
from infinity.planning.layout import lay_out
from infinity.records.record import Record, Traffic
from infinity.reference import codes
from infinity.storage.memory import Ledger
from infinity.storage.store import HostStore

SHAPES = [("a", (3, 1000)), ("b", (700,))]


def made():
    shard = lay_out(SHAPES)
    record = Record(shard, 4096, Traffic(), name="layer")
    record.may_have(["r0"])
    record.add("r0", HostStore(Ledger(1 << 24), CpuDevice()))
    return record, shard


def walk(record, shard, gradients, indices, bits):
    given = gradients.clone()
    FeedbackPass(record, "r0", shard, given, indices, Coding(bits).as_sent).run_in_memory()
    return given


@pytest.mark.parametrize("bits", [8, 4])
def test_errors_are_added_to_the_next_gradients_and_replaced_by_what_is_left_out_of_them(bits):
    record, shard = made()
    random, errors = torch.Generator().manual_seed(1), {}
    for _ in range(3):
        gradients = torch.randn(shard.numel, generator=random)
        given = walk(record, shard, gradients, {0, 1}, bits)
        for one in shard.segments:
            wanted = gradients[one.start : one.stop] + errors.get(one.name, 0)
            assert torch.equal(given[one.start : one.stop], wanted)
            errors[one.name] = wanted - codes.as_sent(wanted, bits)


def test_parameters_without_gradients_keep_their_errors_and_values_that_are_not_finite_theirs():
    record, shard = made()
    first, second = shard.segments
    gradients = torch.randn(shard.numel, generator=torch.Generator().manual_seed(2))
    walk(record, shard, gradients, {0, 1}, 4)
    bad = torch.zeros(shard.numel)
    bad[second.start + 5] = torch.inf
    given = walk(record, shard, bad, {1}, 4)
    assert torch.equal(given[first.start : first.stop], bad[first.start : first.stop])
    again = walk(record, shard, torch.zeros(shard.numel), {0, 1}, 4)
    for one in shard.segments:
        values = gradients[one.start : one.stop]
        left = values - codes.as_sent(values, 4)
        whole = again[one.start : one.stop]
        kept = slice(0, 256) if one is second else slice(None)
        assert torch.equal(whole[kept], left[kept]), one.name

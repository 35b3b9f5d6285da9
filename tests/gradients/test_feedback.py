"""Errors of codes, by fields of a record. Trusted: records, and the pass that copies into them. Faked: the
lane, which runs passes at once.
"""

import types

import pytest
import torch

from infinity.device.device import CpuDevice
from infinity.gradients.feedback import error_fields, forget_errors
from infinity.lane.feedback import FeedbackPass
from infinity.planning.layout import Holders, lay_out
from infinity.ranks.machines import RankGrid
from infinity.records.record import Record, Traffic
from infinity.storage.memory import Ledger
from infinity.storage.store import HostStore

LANE = types.SimpleNamespace(submit=lambda job, urgent: job.run_in_memory(), wait=lambda job: None)


def record_of(ranks):
    whole = lay_out([("a", (3, 4000)), ("b", (700,))], 4096, ranks)
    holders = Holders(ranks)
    return Record(
        holders.shard_of(whole, 0), 4096, Traffic(), name="layer", unit_layout=whole, holders=holders
    )


@pytest.mark.parametrize(
    ("ranks", "grid", "names"),
    [
        (1, None, []),
        (3, None, ["r0", "r1", "r2"]),
        (4, RankGrid(2, 2), ["r0", "r1", "r2", "r3", "s0", "s1"]),
    ],
)
def test_a_rank_has_errors_of_each_ones_part_and_of_what_its_machine_sends_to_each(ranks, grid, names):
    assert list(error_fields(record_of(ranks), grid)) == names


def test_errors_that_are_forgotten_are_zeros_and_those_never_written_stay_so():
    record = record_of(2)
    names = error_fields(record, None)
    record.may_have(names)
    for name in names:
        record.add(name, HostStore(Ledger(1 << 24), CpuDevice()))

    def fed():
        given = torch.ones(record.shard.numel)
        FeedbackPass(record, "r0", record.shard, given, {0, 1}, torch.zeros_like).run_in_memory()
        return given

    fed()
    assert (fed() == 2).any()
    assert not record.written("r1", 0)
    forget_errors(record, (*names, "r7"), LANE)
    given = fed()
    assert (given == 1).all()
    assert not record.written("r1", 0)

"""Ranks on several machines, which INFINITY_LOCAL_SIZE makes of this one: real processes over gloo.

Bit for bit against plain data parallelism in memory whose gradients are summed within each machine first.
"""

import socket
from types import SimpleNamespace

import pytest
import torch

from answers import read_answers
from infinity.device.device import CpuDevice
from infinity.errors import ConfigError
from infinity.gradients.collectives import Reducing
from infinity.ranks.group import Channel
from infinity.ranks.machines import LOCAL_SIZE, RankGrid, grid_of, this_machine
from launches import forked
from places import SUPPORT


@pytest.mark.parametrize(
    ("machines", "grid"),
    [
        ([7, 7, 3, 3], RankGrid(2, 2)),
        ([7, 7, 3, 3, 5, 5], RankGrid(3, 2)),
        ([7, 7, 7, 3, 3, 3], RankGrid(2, 3)),
        ([7], None),
        ([7, 7, 7, 7], None),
        ([7, 3, 5, 1], None),
        ([7, 3, 7, 3], None),
        ([7, 7, 7, 3], None),
        ([7, 7, 3, 3, 5], None),
        ([7, 7, 3, 3, 7, 7], None),
    ],
)
def test_ranks_are_a_grid_where_each_machine_has_as_many_neighbours(machines, grid):
    assert grid_of(machines) == grid
    assert grid is None or grid.size == len(machines)


def test_a_machine_is_its_name_unless_its_ranks_are_divided(monkeypatch):
    monkeypatch.delenv(LOCAL_SIZE, raising=False)
    named = this_machine()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert this_machine() != named


@pytest.mark.parametrize("given", ["", "0", "-1", "two"])
def test_another_number_of_ranks_than_one_above_0_is_refused(monkeypatch, given):
    monkeypatch.setenv(LOCAL_SIZE, given)
    with pytest.raises(ConfigError, match=f"{LOCAL_SIZE}='{given}': expected a number of ranks above 0"):
        this_machine()


MIXED = ["mixtral", "max_norm", "no_sync", "stage 1", "stage 2 backward", "fp32"]
CASES = {
    4: [*MIXED, "experts", "nvme accumulated", "nvme muon backward", "hops"],
    6: ["llama", "nvme", "hops"],
}


def answers(folder, ranks, cases):
    forked(ranks, SUPPORT / "ranks_run.py", folder, *cases, "killed", RANKS_DISK=folder, **{LOCAL_SIZE: "2"})
    return read_answers(folder, ranks)


def assert_as_two_hops(given, ranks, cases):
    for case in cases:
        if case != "hops":
            assert [one[case].get("different", one[case]) for one in given] == [[]] * ranks, case
    for one in (one["hops"] for one in given):
        assert one["grid"] == [ranks // 2, 2]
        assert one["local_size"] == 2
        assert one["between"] == one["by formula"] > 0
    for one in given[:-1]:
        assert f"; rank {ranks - 1} did not answer" in one["killed"]["error"], (
            "the others did, on all machines"
        )


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.disk
@pytest.mark.parametrize("ranks", CASES)
def test_machines_of_two_ranks_train_bit_for_bit_as_sums_within_each_first(tmp_path, ranks):
    assert_as_two_hops(answers(tmp_path, ranks, CASES[ranks]), ranks, CASES[ranks])


class Grid2x2:
    """The collectives of rank 3 of four on two machines: rank R gives R + 1 times what rank 3 does."""

    crossed_nbytes = 0
    gather_beside_numel = Channel.gather_beside_numel
    gather, gather_between, _hop = Channel.gather, Channel.gather_between, Channel._hop
    _hops_on_host = True

    def __init__(self):
        self.hops = SimpleNamespace(grid=RankGrid(2, 2), within="within", between="between")

    def exchange_in_hop(self, received, sent, _what, *, between_machines):
        mine = sent.view(2, -1)[1]
        others = 0.5 * mine if not between_machines else 0.25 * mine
        received.view(2, -1).copy_(torch.stack([others, mine]))

    def _do(self, _what, group, collective):
        whole, part = collective.args
        rows = whole.view(2, -1)
        for row in range(2):
            rows[row].copy_(part + (10 if group == "between" else 1) * (row - 1))


def test_gradients_are_summed_within_a_machine_rounded_and_summed_between_machines():
    sent = torch.arange(1, 17, dtype=torch.float32).bfloat16()  # four for each rank, of which 3 gets 4 sums
    mean, ended = torch.empty(4, dtype=torch.bfloat16), []
    job = Reducing(
        "a",
        sent,
        [mean],
        lambda numel, dtype: torch.empty(numel, dtype=dtype),
        SimpleNamespace(end=lambda: ended.append(True)),
        None,
        CpuDevice(),
        4,
    )
    job.run(Grid2x2())
    of_machine = (1.5 * sent[12:].float()).bfloat16()
    assert torch.equal(
        mean, ((0.25 * of_machine.float()).bfloat16().float() + of_machine.float()).div(4).bfloat16()
    )
    assert ended == [True]


def test_weights_go_between_machines_first_and_then_within_each():
    whole, beside, channel = torch.empty(8), torch.empty(4), Grid2x2()
    assert channel.gather_beside_numel(2) == 4
    channel.gather(whole, torch.tensor([100.0, 200.0]), "a", beside)
    assert whole.tolist() == [89.0, 189.0, 90.0, 190.0, 99.0, 199.0, 100.0, 200.0]
    assert channel.crossed_nbytes == 8

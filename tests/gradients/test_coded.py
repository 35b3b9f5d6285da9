"""Collectives of what is sent in few bits. Trusted: the reference in plain torch. Faked: units, and a channel
on which the ranks are threads' turns of this one.
"""

import types

import pytest
import torch

from infinity import kernels
from infinity.device.device import CpuDevice
from infinity.gradients.coded import CodedGathering, CodedReducing, ShareAside
from infinity.gradients.coded_hops import CodedBetween, CodedSums
from infinity.gradients.coding import Coding
from infinity.gradients.collectives import Assembly
from infinity.gradients.gather_buckets import GatherBuckets
from infinity.lane.outgoing import OutgoingShare
from infinity.planning import coded
from infinity.planning.layout import Holders, lay_out
from infinity.planning.queue import Job
from infinity.ranks.machines import RankGrid
from infinity.reference import codes
from infinity.timeline import Timeline

FETCHED = Job(done=True)
LANE = types.SimpleNamespace()


class OfOthers:
    """Has rank `rank` exchange with ranks that do the same with other values: `others` gives their rows."""

    def __init__(self, ranks, rank, others, machines=1):
        self.ranks = types.SimpleNamespace(size=ranks)
        self.rank, self.others = rank, others
        grid = RankGrid(machines, ranks // machines)
        self.hops = None if machines == 1 else types.SimpleNamespace(grid=grid)
        self.hop = 0

    def exchange(self, received, sent, _what):
        received.copy_(torch.cat([row[self.rank] for row in self.others]))

    def exchange_in_hop(self, received, sent, _what, *, between_machines):
        received.copy_(self.others[self.hop])
        self.hop += 1

    def gather_beside_numel(self, _numel):
        return 0

    def gather(self, whole, part, _what, _beside=None):
        assert torch.equal(part, self.others[self.rank])
        whole.copy_(torch.cat(self.others))


def take(numel, dtype):
    return (
        torch.full((numel,), 77, dtype=torch.uint8)
        if dtype == torch.uint8
        else torch.empty(numel, dtype=dtype)
    )


def reducing(sent, numels, bits, dtype=torch.bfloat16, count=None):
    means, ended = [torch.empty(numel, dtype=dtype) for numel in numels], []
    lease = types.SimpleNamespace(end=lambda: ended.append(True))
    job = CodedReducing("a", sent, means, take, lease, LANE, CpuDevice(), count, Coding(bits))
    return job, means, ended


NUMELS = [1024, 70_000, 2048]
"""Of shares, one of which takes more than one piece, and ends within a block."""


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rank", [0, 2])
def test_three_ranks_get_the_mean_of_one_process_that_codes_each_share(bits, dtype, rank):
    grads = [torch.randn(3, sum(NUMELS)).mul(2.0**-rank_).to(dtype) for rank_ in range(3)]
    coding, rows = Coding(bits), []
    for grad in grads:
        job, _, _ = reducing(grad.flatten(), NUMELS, bits, dtype)
        rows.append(job._coded(grad.flatten()))
    job, means, ended = reducing(grads[rank].flatten(), NUMELS, bits, dtype, count=3)
    assert job.nbytes == 3 * coding.row_nbytes(NUMELS)
    job.run(OfOthers(3, rank, rows))
    for mean, *of_ranks in zip(means, *(grad[rank].split(NUMELS) for grad in grads), strict=True):
        assert torch.equal(mean, codes.mean_over_ranks(of_ranks, bits))
    assert ended == [True]


def test_sums_of_machines_are_coded_unrounded_for_the_second_hop():
    grads = [torch.randn(4, 3000).bfloat16() for _ in range(4)]
    rows = [reducing(grad.flatten(), [3000], 4)[0]._coded(grad.flatten()) for grad in grads]
    coding = Coding(4)
    near = [torch.cat([rows[machine][to], rows[machine + 1][to]]) for to in (1, 3) for machine in (0,)]
    sums = []
    for machine in (0, 2):
        total = codes.as_sent(grads[machine][1], 4) + codes.as_sent(grads[machine + 1][1], 4)
        of_sum = torch.zeros(coding.share_nbytes(3000), dtype=torch.uint8)
        coding.encode(total, 3000, 0, of_sum.data_ptr())
        sums.append(of_sum)
    job, (mean,), _ = reducing(grads[1].flatten(), [3000], 4, count=4)
    job.run(OfOthers(4, 1, [*near, torch.cat(sums)], machines=2))
    assert torch.equal(mean, codes.mean_over_ranks([grad[1] for grad in grads], 4, machines=2))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("bits", [8, 4])
def test_an_overflow_of_one_rank_is_one_of_the_mean(value, bits):
    grads = [torch.ones(2, 3000, dtype=torch.float16) for _ in range(2)]
    grads[1][0, 2900] = value
    rows = [reducing(one.flatten(), [3000], bits, torch.float16)[0]._coded(one.flatten()) for one in grads]
    job, (mean,), _ = reducing(grads[0].flatten(), [3000], bits, torch.float16, count=2)
    job.run(OfOthers(2, 0, rows))
    assert not mean[2816:].isfinite().any()
    assert (mean[:2816] == 1).all()


class Unit:
    """Two parameters, of 3000 and of 70 elements, on two ranks, of which this is `rank`; `padded`: between
    them.
    """

    def __init__(self, rank, padded=float("nan"), dtype=torch.bfloat16):
        self.name, self.index, self.layout = "a", 0, lay_out([("a.0", (3000,)), ("a.1", (70,))], ranks=2)
        shard = Holders(2).shard_of(self.layout, rank)
        self.record = types.SimpleNamespace(shard=shard, holders=Holders(2))
        self.flat = torch.full((self.layout.numel,), padded, dtype=dtype)
        for one in self.layout.segments:
            values = torch.randn(one.numel, generator=torch.Generator().manual_seed(one.numel))
            self.flat[one.start : one.stop] = values
        self.pending = {}
        base = rank * shard.numel
        self.part_of_rank = self.flat[base : base + shard.numel]

    def values(self):
        return [self.flat[one.start : one.stop].clone() for one in self.layout.segments]


def gathering(unit, share):
    aside = ShareAside(unit, share)
    aside.flat.copy_(unit.part_of_rank)
    one = Assembly(unit, FETCHED, LANE, lambda _: None, aside)
    return CodedGathering([one], LANE, CpuDevice(), share, Coding(8)), aside


def sent_by(unit, share, before=0):
    """Return the bytes that a rank sends of a unit, from memory that was full of `before`."""
    kept = []
    nbytes = Coding(8).share_nbytes(unit.record.shard.numel)
    share.buffers.take(nbytes, torch.uint8).fill_(before)
    channel = types.SimpleNamespace(
        ranks=types.SimpleNamespace(size=2),
        gather_beside_numel=lambda _: 0,
        gather=lambda whole, part, *_: (kept.append(part.clone()), whole.copy_(part.repeat(2))),
    )
    gathering(unit, share)[0].run(channel)
    return kept[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_have_what_comes_of_coded_weights_whatever_pads_them_and_the_share_stays_exact(rank):
    share = OutgoingShare(CpuDevice(), Timeline())
    share.open(1 << 20)
    sent = [sent_by(Unit(number), share) for number in range(2)]
    for number, one in enumerate(sent):
        assert torch.equal(one, sent_by(Unit(number, 1e30), share, before=77))
    unit = Unit(rank)
    exact, share_of_rank = unit.values(), unit.part_of_rank.clone()
    job, aside = gathering(unit, share)
    assert job.nbytes == 2 * len(sent[0]) < 0.53 * unit.flat.nbytes
    version = unit.flat._version
    job.run(OfOthers(2, rank, sent))
    job.end()
    for found, one in zip(unit.values(), exact, strict=True):
        assert torch.equal(found, codes.as_sent(one, 8).bfloat16())
    assert unit.flat._version == version, "a change would count as one of the weights"
    assert torch.equal(aside.flat.nan_to_num(7.0), share_of_rank.nan_to_num(7.0))
    assert share.ledger.held_nbytes == aside.flat.nbytes
    del aside, job
    assert share.ledger.held_nbytes == 0


def test_the_plan_counts_the_bytes_that_are_sent():
    assert coded.CODE_BLOCK == kernels.CODE_BLOCK == codes.CODE_BLOCK
    for kind, bits in coded.BITS.items():
        assert coded.sent_nbytes(70_001, kind, 2) == Coding(bits).share_nbytes(70_001)


def test_a_layer_in_fp32_is_sent_as_it_is():
    buckets = GatherBuckets(LANE, CpuDevice(), OutgoingShare(CpuDevice(), Timeline()), 1 << 20, Coding(8))
    assert buckets.codes(Unit(0))
    assert not buckets.codes(Unit(0, dtype=torch.float32))


def test_sums_of_a_machine_are_shown_before_they_are_coded_for_the_others():
    """Rank 0 of four, two of which are on each machine; between the hops something is added to its sums."""
    coding, numel, grid = Coding(4), 1024, RankGrid(2, 2)
    grads = torch.randn(4, 4, numel)  # of each rank, for each rank

    def coded_as(values):
        row = torch.empty(coding.share_nbytes(numel), dtype=torch.uint8)
        coding.encode(values, numel, 0, row.data_ptr())
        return row

    near = [torch.cat([coded_as(grads[rank][to]) for rank in (0, 1)]) for to in (0, 2)]
    job = CodedSums("a", grads[0].flatten(), [numel], take, coding, grid, LANE)
    job.run(OfOthers(4, 0, near, machines=2))
    own, for_other = (codes.as_sent(grads[0][to], 4) + codes.as_sent(grads[1][to], 4) for to in (0, 2))
    assert torch.equal(job.sums, torch.stack([own, for_other]))
    assert job.nbytes == 4 * coding.share_nbytes(numel)
    fed, came = job.sums + 0.25, codes.as_sent(grads[2][0], 4) + codes.as_sent(grads[3][0], 4)
    mean, ended = torch.empty(numel), []
    lease = types.SimpleNamespace(end=lambda: ended.append(True))
    between = CodedBetween("a", fed, [mean], take, lease, coding, 4, LANE)
    between.run(OfOthers(4, 0, [torch.cat([coded_as(fed[0]), coded_as(came)])], machines=2))
    assert torch.equal(mean, (codes.as_sent(fed[0], 4) + codes.as_sent(came, 4)) / 4)
    assert (between.nbytes, ended) == (0, [True]), "its bytes count with the sums"

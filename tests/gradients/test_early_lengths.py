"""update="auto" where steps have several lengths. Trusted: the recipe in memory. Faked: the clock that times
steps; of two ranks the group, and what each divides.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import deep
from deep import LAYERS, WIDTH, Deep
from infinity import stats
from infinity.gradients import early
from infinity.gradients.early import EarlyUpdates, length_of
from infinity.lane.counts import LaneTimes
from infinity.planning.split import HalfStep, UpdateSplit

FEW, MANY = 2, 40
"""Rows of an input."""


class Clock:
    """Stands still but for what computing is said to take."""

    def __init__(self):
        self.now_s = 0.0
        self.takes = {FEW: (100.0, 900.0), MANY: (9000.0, 1000.0)}
        """Seconds of forward and backward, by rows."""

    def __call__(self):
        return self.now_s

    def passes(self, rows, half):
        self.now_s += self.takes[rows][half]


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock, ctx.rows = clock, len(x)
        clock.passes(ctx.rows, 0)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.passes(ctx.rows, 1)
        return grad, None


class Slow(Deep):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def forward(self, x):
        x = Passing.apply(torch.tanh(self.layers[0](x)), self.clock)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x


class Both(deep.Both):
    def step(self, number, rows):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
        for model, optimizer in self:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(early, "perf_counter", clock)
    return clock


@pytest.fixture
def decided(monkeypatch):
    """The computing of both halves, of each decision."""
    found, decide = [], early.split_updates

    def noted(computes, *more, **settings):
        found.append(computes)
        return decide(computes, *more, **settings)

    monkeypatch.setattr(early, "split_updates", noted)
    return found


@pytest.mark.disk
@pytest.mark.usefixtures("repeatable")
def test_lengths_in_turn_have_their_own_early_updates_and_the_recipes_bits(folder, clock, decided):
    both = Both(folder, build=lambda: Slow(clock), ours={"update": "auto"})
    early_of, made = {FEW: set(), MANY: set()}, {FEW: set(), MANY: set()}
    for number in range(16):
        rows = (FEW, MANY)[number % 2]
        before = stats(both.model)
        both.step(number, rows)
        if number >= 10:
            early_of[rows].add(both.engine.arrivals.early.split.early)
            made[rows].add(stats(both.model).since(before).passes.get("UpdatePass", 0))
    both.check()
    (few,), (many,) = early_of.values()
    assert made == {FEW: {len(few)}, MANY: {len(many)}}
    assert len(many) < len(few) <= LAYERS, "the longer half has more of them"
    assert len(decided) == 2 * 3 + 1, "behind 1, 2 and 4 steps of each, and once for a length that is new"


@pytest.mark.disk
@pytest.mark.usefixtures("repeatable")
def test_steps_that_compute_otherwise_from_then_on_are_decided_for_anew(folder, clock, decided):
    both = Both(folder, build=lambda: Slow(clock), ours={"update": "auto"})
    for number in range(11):
        both.step(number, FEW)
    before, times = both.engine.arrivals.early.split, len(decided)
    clock.takes[FEW] = clock.takes[MANY]
    for number in range(11, 15):
        both.step(number, FEW)
    both.check()
    assert len(both.engine.arrivals.early.split.early) < len(before.early)
    assert len(decided) == times + 1


class Placed:
    """A unit that has nothing to move."""

    record, trainable = None, False

    def __init__(self, index):
        self.index = index


class Table:
    """Where two ranks, each a thread, tell each other integers."""

    def __init__(self):
        self.said = [[], []]
        self.barrier = threading.Barrier(2)


class Seat:
    """One rank's group: what it says at the table, and hears."""

    size = local_size = 2

    def __init__(self, table, rank):
        self.table, self.rank = table, rank

    def of_all(self, values, what):
        self.table.said[self.rank] = list(values)
        self.table.barrier.wait(60)
        rows = list(self.table.said)
        self.table.barrier.wait(60)
        return rows

    def least(self, value, what):
        return min(row[0] for row in self.of_all([value], what))


class Alone:
    """The group of a rank that is the only one."""

    size = local_size = 1

    def least(self, value, what):
        return value


class Rank:
    """One rank's decisions, of steps that take so long for it, by their length. works, stalls: seconds of the
    lane's work, and of waiting, in each half.
    """

    def __init__(self, group, takes, works=(0.0, 0.0), stalls=(0.0, 0.0)):
        self.lane_times, self.works, self.stalls = LaneTimes(), works, stalls
        self.units, self.takes, self.now_s = [Placed(index) for index in range(8)], takes, 0.0
        residency = SimpleNamespace(
            counts=SimpleNamespace(stalls_s={}), cursor=SimpleNamespace(plan="any"), routed=self.units
        )
        traffic, self.share = SimpleNamespace(read={}, written={}), SimpleNamespace(stall_s=0.0)
        seen = self.units, residency, traffic, self.share, self.lane_times, group
        self.early = EarlyUpdates(*seen, on_host=True)
        self.early.want()

    def step(self, elements):
        """Return which units the backward updates."""
        self.early.forward_began(((torch.empty(elements),), {}))
        self._passes(elements, 0)
        self.early.gradient_came(torch.nn.Parameter(torch.empty(0)))
        self._passes(elements, 1)
        self.early.backward_ended()
        chosen = [unit.index for unit in self.units if self.early.has(unit)]
        self.early.close_step()
        return chosen

    def _passes(self, elements, half):
        self.now_s += self.takes[elements][half]
        self.lane_times.worked(self.works[half])
        self.share.stall_s += self.stalls[half]


@pytest.mark.parametrize(
    ("threads", "computes", "work_s"), [(2, (3.0, 4.0), 9.0), (1, (4.0, 8.0), 0.0)], ids=["all cores", "one"]
)
def test_what_the_lane_takes_of_the_cores_that_compute_is_work_and_not_computing(
    monkeypatch, threads, computes, work_s
):
    rank, found = Rank(Alone(), {10: (4.0, 16.0)}, works=(1.0, 8.0), stalls=(0.0, 8.0)), []

    def divide(computes, _plan, _moves, _may, rates, **_):
        found.append((computes, 1 / rates.update if rates.shared else 0.0))
        return UpdateSplit((), 8, HalfStep(1.0, 1.0), HalfStep(1.0, 1.0))

    monkeypatch.setattr(early, "split_updates", divide)
    monkeypatch.setattr(early, "perf_counter", lambda: rank.now_s)
    monkeypatch.setattr(early.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(early.os, "sched_getaffinity", lambda _: {0, 1})
    for _ in range(3):
        rank.step(10)
    assert found == [(computes, pytest.approx(work_s))], "of 8 s of computing in 16 it takes half"


@pytest.fixture
def pair(monkeypatch):
    """Two ranks, which compute at other speeds, and a call that runs steps on both, of these elements."""
    table = Table()
    takes = {10: (1.0, 2.0), 99: (1.0, 5.0)}, {10: (1.0, 3.0), 99: (1.0, 7.0)}
    ranks = [Rank(Seat(table, number), one) for number, one in enumerate(takes)]
    clock = threading.local()
    monkeypatch.setattr(early, "perf_counter", lambda: clock.rank.now_s)
    half = HalfStep(1.0, 1.0)
    monkeypatch.setattr(
        early,
        "split_updates",
        lambda computes, *_, **__: UpdateSplit(tuple(range(int(computes[1] / computes[0]))), 8, half, half),
    )

    def run(elements):
        def of_rank(number):
            clock.rank = ranks[number]
            return [ranks[number].step(each[number]) for each in elements]

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(of_rank, range(2)))

    return ranks, run


def test_ranks_whose_sequences_and_speeds_differ_choose_the_same_units(pair):
    _, run = pair
    first, second = run([(10, 10), (10, 10), (10, 10), (10, 99), (99, 10), (99, 99), (10, 10)])
    assert first == second
    assert list(map(len, first)) == [0, 0, 3, 3, 7, 5, 3], "as the slower one computes the longer"


def test_where_one_rank_needs_its_gradients_no_rank_updates_in_the_backward(pair):
    ranks, run = pair
    run([(10, 10)] * 3)
    ranks[1].early.stop("gradients are read")
    assert run([(10, 10)] * 2) == [[[], []], [[], []]]
    assert "of another rank need their gradients" in ranks[0].early.told
    assert "gradients are read" in ranks[1].early.told


def test_a_length_is_counted_in_what_a_forward_is_given():
    ids = torch.zeros(4, 32, dtype=torch.int64)
    assert length_of(((), {"input_ids": ids, "labels": ids, "use_cache": False})) == (2 * 4 * 32).bit_length()
    assert length_of(((), {})) == 0

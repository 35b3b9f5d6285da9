"""Buckets of gradients. Faked: units, and the other rank, which has twice this rank's gradients."""

import types

import pytest
import torch

from infinity.device.room import DeviceRoom
from infinity.gradients import reduction as reductions
from infinity.gradients.reduction import Reduction, _pack, _pack_on_device
from infinity.gradients.store import GradientStore
from infinity.lane.outgoing import OutgoingShare
from infinity.planning.layout import Holders, lay_out
from infinity.storage.memory import Ledger
from infinity.timeline import Timeline

UNIT = 8 << 10
HOST = types.SimpleNamespace(
    is_host=True, room=None, torch_device=torch.device("cpu"), arrived=lambda _: None, leaving=lambda _: None
)


class Unit:
    """Parameters of 3000 elements, 8 KiB with what pads them to shares of two ranks, of which this is one."""

    def __init__(self, name, parameters=1, *, holders=None):
        self.name, self.flat = name, torch.empty(0, dtype=torch.bfloat16)
        self.layout = lay_out([(f"{name}.{number}", (3000,)) for number in range(parameters)], ranks=2)
        self.parameters = [types.SimpleNamespace(grad=None) for _ in range(parameters)]
        self.pending = {}
        self.record = types.SimpleNamespace(
            shard=Holders(2).shard_of(self.layout, 0),
            holders=holders or Holders(2),
            is_elsewhere=False,
            on_device=False,
        )


class Lane:
    def __init__(self):
        self.queued = []

    def submit(self, job):
        self.queued.append(job)

    def wait(self, job):
        for one in self.queued:
            if not one.done:
                one.run(CHANNEL)
                one.end()
        assert job.done


def exchange(received, sent, _what):
    own = sent.view(2, -1)[0]
    received.view(2, -1).copy_(torch.stack([own, 2 * own]))


CHANNEL = types.SimpleNamespace(ranks=types.SimpleNamespace(size=2), exchange=exchange, hops=None)


class Means:
    """Where means go."""

    def __init__(self):
        self.came, self.added, self.leases = {}, [], []

    def reduced(self, gradient, mean, arriving, lease, *, keep):
        assert keep
        gradient.comes(arriving)
        self.came[gradient.unit.name, gradient.index] = mean
        self.leases.append(lease)

    def add_mean(self, gradient, tensor, lease):
        self.added.append((gradient.unit.name, tensor))


def opened(bucket=5 * UNIT, outgoing=1 << 20, units=(), device=HOST, places=None, size=2):
    lane, share, means = Lane(), OutgoingShare(HOST, Timeline()), Means()
    share.open(outgoing)
    ranks = types.SimpleNamespace(size=size, least=lambda value, _: value)
    reducers = types.SimpleNamespace(
        ranks=ranks, coding=None, reduces=lambda _: lane, share_gradients=lambda _: places
    )
    reduction = Reduction(
        reducers, lane, device, Ledger(1 << 20), share, deferred=False, bucket_nbytes=bucket
    )
    reduction.open(units)
    return reduction, lane, share, means


def arrive(reduction, unit, value=1.0, dtype=torch.bfloat16):
    """Let all gradients of a unit come."""
    for index, parameter in enumerate(unit.parameters):
        grad = torch.full((3000,), value + index, dtype=dtype)
        gradient = reduction.arrive(unit, index, grad, keep=True)
        parameter.grad = types.SimpleNamespace(gradient=gradient)


def test_units_are_summed_together_when_a_bucket_is_full_and_each_gets_its_means():
    reduction, lane, share, means = opened()
    units = [Unit("a"), Unit("b", 2), Unit("c"), Unit("d")]
    closed = []
    for number, unit in enumerate(units):
        arrive(reduction, unit, value=4.0 * number)
        closed.append(reduction.complete(unit, means))
    assert closed == [[], [], [], []]
    assert (lane.queued, means.came) == ([], {})
    more = Unit("e")
    arrive(reduction, more)
    assert reduction.complete(more, means) == units[:3] + units[3:]
    (job,) = lane.queued
    assert job.what.startswith("reduce a (0 of 1, bfloat16); b (0, 1 of 2, bfloat16); c (0 of 1")
    lane.wait(job)
    for number, unit in enumerate(units):
        for index, segment in enumerate(unit.record.shard.segments):
            mean = means.came[unit.name, index]
            assert torch.equal(mean, torch.full((segment.numel,), 1.5 * (4.0 * number + index)).bfloat16())
    assert share.ledger.held_nbytes == UNIT, "of the unit that waits"
    assert reduction.has_complete(more)


class Places:
    """Where the gradients of both ranks are summed, in two pieces."""

    nbytes = 2 * UNIT

    def pieces(self, rows):
        return [range(1000), range(1000, rows.shape[1])]

    def meet(self, rows, columns, _channel, _what):
        own = rows[0, columns.start : columns.stop].clone()
        self.there = own, 2 * own
        return [one.data_ptr() for one in self.there]


def test_where_ranks_have_places_in_common_these_are_charged_for_good_and_what_comes_takes_no_room():
    reduction, lane, share, means = opened(places=Places())
    assert share.ledger.held_nbytes == Places.nbytes
    unit = Unit("a")
    arrive(reduction, unit, value=4.0)
    reduction.reduce([unit], means)
    (job,) = lane.queued
    assert share.ledger.held_nbytes == Places.nbytes + UNIT, "what is brought there"
    lane.wait(job)
    assert job.nbytes == 0
    (segment,) = unit.record.shard.segments
    assert torch.equal(means.came["a", 0], torch.full((segment.numel,), 6.0).bfloat16())
    assert share.ledger.held_nbytes == Places.nbytes


def test_a_further_gradient_is_not_added_to_one_in_the_open_bucket():
    reduction, lane, _, means = opened()
    unit = Unit("a")
    arrive(reduction, unit)
    reduction.complete(unit, means)
    assert reduction.close_bucket(means) == [unit]
    gradient = unit.parameters[0].grad.gradient
    gradient.keep(means.came["a", 0])
    reduction.add(gradient, torch.full((3000,), 8.0, dtype=torch.bfloat16))
    reduction.settle([unit], means)
    assert len(lane.queued) == 2
    ((_, added),) = means.added
    assert set(added.tolist()) == {12.0}


@pytest.mark.parametrize("keep", [False, True])
def test_a_sum_with_a_further_gradient_is_kept_where_the_first_one_was_to_be(keep):
    reduction, _, _, _ = opened()
    unit, kept = Unit("a"), []
    gradient = reduction.arrive(unit, 0, torch.ones(3000, dtype=torch.bfloat16), keep=keep)
    unit.parameters[0].grad = types.SimpleNamespace(gradient=gradient)
    reduction.add(gradient, torch.ones(3000, dtype=torch.bfloat16))
    into = types.SimpleNamespace(reduced=lambda *_, keep: kept.append(keep))
    reduction.reduce([unit], into)
    assert kept == [keep]


def test_a_stored_gradient_of_a_unit_in_the_open_bucket_is_summed_before_a_further_one_comes():
    _, lane, share, _ = opened()
    device = types.SimpleNamespace(**vars(HOST), room_for_downloads=lambda _: None)
    ranks = types.SimpleNamespace(size=2, least=lambda value, _: value)
    peers = types.SimpleNamespace(
        ranks=ranks, coding=None, reduces=lambda _: lane, share_gradients=lambda _: None
    )
    residency = types.SimpleNamespace(share_of_steps=lambda _: 1.0)
    store = GradientStore(
        *(lane, device, Ledger(1 << 20), None, share, residency, None, ranks, None, peers),
        deferred=False,
        bucket_nbytes=5 * UNIT,
    )
    store.open(types.SimpleNamespace(outgoing_nbytes=share.ledger.limit_nbytes), [])
    unit, value = Unit("a"), 1 + 2**-7
    gradient = store.arrive(unit, 0, torch.full((3000,), value, dtype=torch.bfloat16), keep=True)
    unit.parameters[0].grad = types.SimpleNamespace(gradient=gradient)
    store.reduce(unit, at_once=False)
    assert lane.queued == []
    store.add(gradient, torch.full((3000,), 8.0, dtype=torch.bfloat16))
    store.settle_ranks([unit])
    means = [torch.tensor(1.5 * one).bfloat16().float() for one in (value, 8.0)]
    assert set(gradient.in_memory.tolist()) == {sum(means).item()}
    assert means[0] != 1.5 * value, "rounded, as that of a unit that is summed by itself"


@pytest.mark.parametrize("limits", [{"bucket": 0}, {"bucket": UNIT}, {"outgoing": 8 * UNIT}])
def test_without_room_each_unit_is_summed_by_itself(limits):
    reduction, lane, _, means = opened(**limits)
    for name in "abc":
        unit = Unit(name)
        arrive(reduction, unit)
        assert reduction.complete(unit, means) == [unit]
    assert [one.what for one in lane.queued] == [f"reduce {name} (0 of 1, bfloat16)" for name in "abc"]


def test_what_waits_at_a_steps_end_is_summed_in_buckets_of_one_type_each():
    reduction, lane, share, means = opened()
    units = [Unit(name) for name in "abcdef"]
    for unit in units:
        arrive(reduction, unit, dtype=torch.float32 if unit.name == "c" else torch.bfloat16)
    reduction.settle(units, means)
    assert ["".join(part[0] for part in one.what[7:].split("; ")) for one in lane.queued] == [
        "abd",
        "c",
        "ef",
    ]
    assert share.ledger.held_nbytes == sum(one.nbytes * 2 for one in lane.queued if not one.done)
    assert {name for name, _ in means.came} == set("abcdef")


def test_a_unit_that_is_asked_for_is_summed_by_itself_and_the_bucket_stays_open():
    reduction, lane, share, means = opened()
    units = [Unit("a"), Unit("b")]
    for unit in units:
        arrive(reduction, unit)
        reduction.complete(unit, means)
    reduction.settle(units[:1], means)
    assert [one.what for one in lane.queued] == ["reduce a (0 of 1, bfloat16)"]
    assert [reduction.has_complete(one) for one in units] == [False, True]
    lane.wait(lane.queued[0])
    assert share.ledger.held_nbytes == UNIT


def test_experts_that_only_some_ranks_have_are_summed_by_themselves_and_divided_by_all():
    reduction, lane, _, means = opened(size=4)
    unit = Unit("a", holders=Holders(4, 0, 2))
    arrive(reduction, unit, value=4.0)
    assert reduction.complete(unit, means) == [unit]
    (job,) = lane.queued
    lane.wait(job)
    assert set(means.came["a", 0].tolist()) == {3.0}, "of 4 and 8, which two ranks have, over four"


def test_a_sum_that_fails_gives_the_devices_memory_back(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(reductions, "total_of", full)
    room = DeviceRoom()
    device = types.SimpleNamespace(**{**vars(HOST), "is_host": False, "room": room})
    reduction, *_ = opened(device=device)
    unit = Unit("a")
    arrive(reduction, unit)
    before = room.ledger.held_nbytes
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        reduction.add(unit.parameters[0].grad.gradient, torch.zeros(3000, dtype=torch.bfloat16))
    assert room.ledger.held_nbytes == before > 0


def test_the_mean_of_a_unit_whose_record_lives_on_the_device_stays_there_as_long_as_any_of_its_gradients():
    room, nothing = DeviceRoom(), lambda *_: None
    there = {
        "is_host": False,
        "room": room,
        "allocated": nothing,
        "assembled": nothing,
        "take_host_buffer": None,
    }
    reduction, lane, _, means = opened(device=types.SimpleNamespace(**{**vars(HOST), **there}))
    unit = Unit("a", 2)
    unit.record.on_device = True
    arrive(reduction, unit)
    reduction.reduce([unit], means)
    lane.wait(lane.queued[0])
    room.collect()
    assert (means.came["a", 0] == 1.5).all()
    assert room.ledger.held_nbytes == room.nbytes(2 * unit.record.shard.numel)
    first, second = means.leases
    first.end()
    assert room.ledger.held_nbytes > 0
    second.end()
    assert room.ledger.held_nbytes == 0


@pytest.mark.parametrize("missing", [(), (0,), (1,), (0, 2)])
def test_a_unit_lies_in_a_bucket_as_each_rank_holds_it_with_zeros_where_there_is_none(missing):
    unit = Unit("a", 3)
    grads = {one: torch.randn(3000).bfloat16() for one in range(3) if one not in missing}
    flat = torch.zeros(unit.layout.numel, dtype=torch.bfloat16)
    for index, grad in grads.items():
        segment = unit.layout.segments[index]
        flat[segment.start : segment.stop] = grad
    share = unit.layout.numel // 2
    for pack, filled in ((_pack, torch.nan), (_pack_on_device, 0.0)):
        whole = torch.full((2, share + 32), filled, dtype=torch.bfloat16)
        pack(unit, grads, whole[:, 16 : 16 + share])
        assert torch.equal(whole[:, 16 : 16 + share], flat.view(2, -1))
    wide = torch.full((2, share), torch.nan)
    _pack(unit, grads, wide)
    assert torch.equal(wide, flat.float().view(2, -1))

"""What of the records lies in host memory, step after step, on a real lane. The disk is faked, and so are
the steps: uses are counted and records updated as an engine does.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fakes import FakeDisk
from infinity.device.blocks import HostBlocks
from infinity.device.device import CpuDevice
from infinity.kernels import AdamWScalars
from infinity.lane.fetch import FetchAndUpdatePass
from infinity.lane.lane import StreamLane
from infinity.lane.passes import ReadPass, WritePass
from infinity.planning.frequency import Frequencies
from infinity.planning.layout import lay_out
from infinity.records.record import Record, Traffic
from infinity.records.updates import Update
from infinity.storage.memory import Ledger, Pool
from infinity.storage.store import HostStore
from infinity.units import all_fields
from infinity.units.pinning import Pins
from infinity.units.unit import Unit

TILE = 2048
HI = LO = 2 * TILE
M = V = 4 * TILE
GRADIENT = 2 * TILE


class Bounded(Ledger):
    """A share of the budget that never holds more than its limit, or says so."""

    def reserve_anyway(self, nbytes):
        super().reserve_anyway(nbytes)
        assert self.held_nbytes <= self.limit_nbytes, "more is held than the budget allows"


class Disk(FakeDisk):
    """Knows how many bytes are in use."""

    used_nbytes = 0

    def __init__(self, seed):
        super().__init__(seed, delay_s=0)

    def allocate(self, nbytes, what):
        self.used_nbytes += nbytes
        return super().allocate(nbytes, what)

    def free(self, extent):
        self.used_nbytes -= extent.nbytes


class Model:
    """Units of one tile each, and steps in which some of them are used and updated."""

    def __init__(self, units, kept_nbytes, *, inline=False, tier=None):
        self.kept, self.disk = Bounded(kept_nbytes), Disk(0)
        self.host, self.traffic = HostStore(self.kept), Traffic()
        self.lane = StreamLane(Pool(TILE * 16, 3), inline=inline)
        self.units = [self.unit(index) for index in range(units)]
        self.frequencies = Frequencies(units)
        stores = self.host, self.disk
        self.pins = Pins(self.units, self.frequencies, self.lane, self.kept, stores, tier)
        self.gradients = []

    def unit(self, index):
        shard = lay_out([("w", (TILE,))])
        record = Record(shard, TILE, self.traffic, name=f"layers.{index}")
        for field in record.schema.fields:
            record.add(field, self.disk)
        values = {"master": torch.full((TILE,), 1.0 + index), "m": torch.zeros(TILE), "v": torch.zeros(TILE)}
        self.lane.submit(WritePass(record, TILE, {0: values}))
        unit = Unit(index, [nn.Parameter(torch.empty(TILE, dtype=torch.bfloat16))], record)
        unit.open(HostBlocks(Ledger(0)), torch.device("cpu"), {}, in_place=True)
        return unit

    def update(self, index):
        """Fetch a unit with an update pending, which leaves its fields in their targets."""
        unit = self.units[index]
        scalars = AdamWScalars(0.01, 0.9, 0.99, 1e-8, 0.0, 1)
        unit.pending[0] = Update(scalars, torch.ones(TILE).bfloat16(), None)
        unit.allocate()
        job = FetchAndUpdatePass(unit, CpuDevice(), TILE)
        self.lane.submit(job)
        self.lane.wait(job, finished=True)
        unit.deallocate()

    def use(self, used=None, *, gradients=True):
        """Two uses and an update of each unit, and its gradient, kept where there is room."""
        for index in range(len(self.units)) if used is None else used:
            self.frequencies.used(index)
            self.frequencies.used(index)
            self.frequencies.updated(index)
            if gradients and self.kept.try_reserve(GRADIENT):
                self.gradients.append(index)

    def release(self):
        self.kept.release(GRADIENT * len(self.gradients))
        self.gradients.clear()

    def step(self, used=None, updated=()):
        """One step in which the gradients are applied before it ends, and these units fetched."""
        self.use(used)
        self.release()
        for index in updated:
            self.update(index)
        self.close_step()

    def close_step(self):
        self.frequencies.close_step()
        self.pins.close_step()
        placed = [0] * len(self.units)
        for (index, name), tier in self.pins._placement.items():
            placed[index] += self.units[index].record.field_nbytes(name) if tier == "host" else 0
        assert self.pins._host_nbytes.tolist() == placed

    def targets(self):
        return {(unit.index, name) for unit in self.units for name in unit.record.targets}

    def pinned(self):
        return {
            (unit.index, name) for unit in self.units for name, tier in unit.record.tiers() if tier == "host"
        }

    def master(self, index):
        into = {"master": torch.empty(TILE)}
        job = ReadPass(self.units[index].record, 0, TILE, into)
        self.lane.submit(job)
        self.lane.wait(job)
        return into["master"]


@pytest.fixture
def made():
    """Make models; their lanes end with the test."""
    models = []

    def make(*args, **more):
        models.append(Model(*args, **more))
        return models[-1]

    yield make
    for model in models:
        model.lane.close()


def names(keys):
    return sorted(name for _, name in keys)


# Free room


def test_a_slice_takes_free_room_with_its_first_fetch(made):
    model = made(4, 3 * (HI + LO + M + V) + GRADIENT)
    model.step([0])
    model.update(0)
    assert {unit for unit, _ in model.pinned()} == {0}
    model.pins.admit([model.units[1]], [1])
    model.update(1)
    assert {unit for unit, _ in model.pinned()} == {0, 1}
    model.step([0, 1])
    assert {unit for unit, _ in model.pinned()} == {0, 1}


def test_a_slice_takes_no_room_that_gradients_need_or_that_others_wait_for(made):
    of_unit = HI + LO + M + V
    model = made(3, 2 * of_unit + GRADIENT // 2)
    model.pins.admit([model.units[0]], [0])
    assert model.targets() == set(), "the first step shows what gradients take"
    model.step([0], [0])
    model.pins.admit([model.units[1]], [1])
    assert {unit for unit, _ in model.targets()} <= {0}


def test_what_took_free_room_leaves_for_what_is_used_more_often(made):
    model = made(3, HI + LO + M + V + 3 * GRADIENT)
    model.step([], [])
    model.pins.admit([model.units[2]], [2])
    model.update(2)
    assert {unit for unit, _ in model.pinned()} == {2}
    for _ in range(40):
        model.step([0], [0])
    assert {(0, name) for name in ("hi", "lo", "m", "v")} <= model.pinned()
    assert len(model.pinned()) < 8


def test_a_decision_asks_no_unit_how_it_is_packed_that_never_was(made, monkeypatch):
    model, asked = made(6, 2 * (HI + LO + M + V)), []
    for _ in range(12):
        model.step()
    monkeypatch.setattr(Record, "packed_nbytes", property(asked.append))
    before = model.pins.reason
    for _ in range(12):
        model.step()
    assert asked == []
    assert before == model.pins.reason, "nothing moves"


# What is decided after the first step


def test_nothing_is_placed_before_the_first_step_has_ended(made):
    model = made(4, 1 << 20)
    model.use()
    assert model.targets() == model.pinned() == set()
    assert model.pins.revisions == 0


def test_after_the_first_step_what_saves_most_gets_its_place_as_far_as_there_is_room(made):
    model = made(4, 3 * HI + HI // 2)
    model.step()
    assert names(model.targets()) == ["hi"] * 3
    assert model.pins.revisions == 1
    assert "pays in" in model.pins.reason


def test_with_room_for_all_every_field_of_every_unit_gets_its_place(made):
    model = made(4, 4 * (HI + LO + M + V + GRADIENT))
    model.step()
    assert model.targets() == {(unit, name) for unit in range(4) for name in ("hi", "lo", "m", "v")}


def test_the_first_step_shows_what_gradients_take_and_only_weights_are_kept_at_their_expense(made):
    model = made(4, 4 * HI + 4 * GRADIENT)
    model.step()
    assert names(model.targets()) == ["hi"] * 4
    model = made(4, 4 * HI + 4 * GRADIENT)
    model.use(gradients=False)
    model.close_step()
    assert names(model.targets()) == ["hi"] * 4 + ["lo"] * 4, "the room of gradients that never came"


def test_gradients_that_come_only_after_the_first_step_are_given_room_as_well(made):
    model = made(4, 4 * HI + 4 * GRADIENT)
    model.step(used=[])
    for _ in range(8):
        model.use()
        model.close_step()
        model.release()
    model.close_step()
    assert names(model.targets()) == ["hi"] * 4


def test_without_updates_or_uses_nothing_is_worth_a_place(made):
    model = made(4, 1 << 20)
    model.step(used=[])
    assert model.targets() == set()
    assert (model.pins.revisions, model.kept.held_nbytes) == (0, 0)


# On the way up


def test_a_field_with_a_target_lies_there_once_a_pass_has_had_it(made):
    model = made(4, 1 << 20)
    model.step()
    model.update(2)
    assert model.pinned() == {(2, name) for name in ("hi", "lo", "m", "v")}
    held = model.kept.held_nbytes
    assert held == 4 * (HI + LO + M + V)
    for index in (0, 1, 3):
        model.update(index)
    assert model.kept.held_nbytes == held, "a target was charged when it was given"
    assert model.disk.used_nbytes == 0
    model.traffic.written.clear()
    model.update(0)
    assert model.traffic.written == {}


def test_targets_wait_for_the_room_that_gradients_still_take(made):
    model = made(4, 4 * HI)
    model.use()
    assert len(model.gradients) == 4
    model.close_step()
    assert model.targets() == set(), "all the room is taken"
    assert model.kept.aside_nbytes == 4 * HI
    assert not model.kept.try_reserve(1), "what is promised is no room for further gradients"
    model.kept.release(GRADIENT)
    model.gradients.pop()
    model.close_step()
    assert names(model.targets()) == ["hi"]
    assert model.kept.aside_nbytes == 3 * HI
    model.release()
    model.close_step()
    assert names(model.targets()) == ["hi"] * 4
    assert (model.kept.aside_nbytes, model.kept.held_nbytes) == (0, 4 * HI)


# On the way down


@pytest.fixture
def drifted(made):
    """Eight units of which the first two were used, and pinned, until now."""
    model = made(8, 2 * (HI + LO + M + V + GRADIENT))
    model.step([0, 1])
    model.step([0, 1], updated=[0, 1])
    assert model.pinned() == {(unit, name) for unit in (0, 1) for name in ("hi", "lo", "m", "v")}
    return model


def go_on(model, used, updated=()):
    """Make steps until the placement changes; the number of them."""
    before = model.pins.revisions
    for number in range(1, 100):
        model.step(used, updated)
        if model.pins.revisions > before:
            return number
    raise AssertionError(f"after 99 steps: {model.pins.reason}")


def test_what_is_no_longer_used_is_written_gives_its_room_and_keeps_its_values(drifted):
    masters = [drifted.master(index) for index in (0, 1)]
    drifted.traffic.written.clear()
    steps = go_on(drifted, [6, 7])
    assert steps % 8 == 7, "it is decided every eighth step, from the first on"
    assert drifted.pinned() < {(unit, name) for unit in (0, 1) for name in ("hi", "lo", "m", "v")}
    left = 8 - len(drifted.pinned())
    assert sum(drifted.traffic.written.values()) == sum(
        {"hi": HI, "lo": LO, "m": M, "v": V}[name]
        for unit in (0, 1)
        for name in ("hi", "lo", "m", "v")
        if (unit, name) not in drifted.pinned()
    )
    assert left > 0
    assert {unit for unit, _ in drifted.targets()} == {6, 7}
    assert [torch.equal(drifted.master(index), one) for index, one in enumerate(masters)] == [True] * 2
    for _ in range(60):
        drifted.step([6, 7], updated=[6, 7])
    assert drifted.pinned() == {(unit, name) for unit in (6, 7) for name in ("hi", "lo", "m", "v")}
    assert [torch.equal(drifted.master(index), one) for index, one in enumerate(masters)] == [True] * 2


def test_a_unit_that_leaves_while_nobody_uses_it_holds_its_memory_no_longer(drifted):
    unit = drifted.units[0]
    assert unit.flat.numel() == TILE, "in place"
    for _ in range(60):
        drifted.step([6, 7], updated=[6, 7])
    assert not unit.record.in_host("hi")
    assert unit.flat.numel() == 0


def test_fields_that_never_came_up_give_their_targets_back(made):
    model = made(8, 2 * (HI + LO + M + V + GRADIENT))
    model.step([0, 1])
    assert {unit for unit, _ in model.targets()} == {0, 1}
    for _ in range(80):
        model.step([6, 7])
    assert {unit for unit, _ in model.targets()} == {6, 7}
    assert model.kept.held_nbytes == 2 * (HI + LO + M + V)
    assert model.traffic.written["nvme", "hi"] == 8 * HI, "nothing but the first values"


def test_fields_that_still_wait_for_room_give_their_promise_back(made):
    model = made(8, 2 * HI)
    model.use([0, 1])  # and these gradients stay
    model.close_step()
    assert model.kept.aside_nbytes == 2 * HI
    for _ in range(100):
        model.use([6, 7])
        model.close_step()
    assert model.kept.aside_nbytes == 2 * HI
    model.release()
    model.close_step()
    assert model.targets() == {(6, "hi"), (7, "hi")}
    assert (model.kept.aside_nbytes, model.kept.held_nbytes) == (0, 2 * HI)


# Beside the device


class Tier:
    """Has room for some units on the device."""

    scratch_nbytes = 0

    def __init__(self, room_nbytes):
        self.room_nbytes, self.lodgers = room_nbytes, []

    def opening(self):
        return 0

    def is_routed(self, unit):
        return False

    def gradients_nbytes(self, unit):
        return None  # no whole record

    def lodge(self, units, records, *, moves):
        self.lodgers = [unit.index for unit in units]

    def lower(self, units, place):
        assert not any(unit.record.on_device for unit in units)


def test_room_that_is_made_in_host_memory_takes_nothing_off_the_device(made):
    tier = Tier(2 * HI)
    model = made(4, 1 << 20, tier=tier)
    for unit in range(4):
        model.frequencies.used(unit)
    model.close_step()
    lodgers = tier.lodgers
    assert len(lodgers) == 2
    assert len(model.targets()) == 2
    model.pins.make_room(1 << 20)
    assert model.targets() == set()
    model.pins.close_step()
    assert tier.lodgers == lodgers


def test_frozen_weights_that_the_device_has_no_room_for_before_the_first_step_come_to_host_memory(made):
    tier = Tier(2 * HI)
    model = made(4, 1 << 20, tier=tier)
    for unit in model.units:
        unit.parameters[0].requires_grad_(False)
    model.pins.forward_began(None)
    lodgers = tier.lodgers
    assert len(lodgers) == 2
    for unit in range(4):
        model.frequencies.used(unit)
    model.close_step()
    assert tier.lodgers == lodgers
    assert {unit for unit, _ in model.targets()} == {0, 1, 2, 3} - set(lodgers)


# How often


def test_the_same_steps_over_and_over_never_change_the_placement_again(made):
    model = made(6, 7 * HI)
    for number in range(40):
        model.step(updated=range(6) if number < 3 else ())
    assert model.pins.revisions == 1
    assert model.pins.reason.startswith("as before")


def test_uses_that_waver_do_not_move_anything(made):
    model = made(6, 4 * HI)
    model.step()
    model.step(updated=range(6))
    placed = model.pinned()
    assert names(placed) == ["hi"] * 4
    spare = [unit for unit in range(6) if (unit, "hi") not in placed]
    for number in range(60):
        if number % 12 == 11:  # a use in 24 steps: worth less than a move
            model.frequencies.used(spare[number // 12 % 2])
        model.step()
    assert model.pins.revisions == 1
    assert model.pinned() == placed


@given(
    room=st.integers(0, 60),
    phases=st.lists(st.sets(st.integers(0, 4)), min_size=2, max_size=3),
    passing=st.sets(st.integers(0, 4)),
)
@settings(max_examples=15)
def test_the_budget_is_kept_whatever_is_used_when_and_ends_as_it_is_accounted(room, phases, passing):
    model = Model(5, room * TILE)  # Bounded speaks up at once
    try:
        for used in phases:
            for number in range(25):
                model.use(used)
                if number % 3:
                    model.release()
                for index in used & passing if number % 5 == 0 else ():
                    model.update(index)
                model.close_step()
        model.release()
        model.close_step()
        extents = [unit.record.nbytes("host") for unit in model.units]
        targets = [extent.nbytes for unit in model.units for extent in unit.record.targets.values()]
        assert model.kept.held_nbytes == sum(extents) + sum(targets)
        assert model.kept.aside_nbytes == 0
        assert model.disk.used_nbytes == 5 * (HI + LO + M + V) - sum(extents)
    finally:
        model.lane.close()


# Without NVMe: fields in a checkpoint's files


class Files(Disk):
    """A checkpoint's files, as far as a record asks for their places."""

    def part(self, *_where):
        return None

    def lay(self, _parts, nbytes):
        return self.allocate(nbytes, "hi")

    def packed_nbytes(self, _extent):
        return None

    copy_of = forget = packed_nbytes


class NoRoom:
    """A device on which no unit lives."""

    room_nbytes = scratch_nbytes = 0

    def opening(self):
        return 0

    def gradients_nbytes(self, unit):
        return None

    def lodge(self, units, records, *, moves):
        assert not units

    def lower(self, units, place):
        assert not any(unit.record.on_device for unit in units)


class InFiles(Model):
    """Units whose weights lie in files, and no NVMe."""

    def __init__(self, units, kept_nbytes, tier=None):
        self.files = Files(0)
        super().__init__(units, kept_nbytes)
        self.pins = Pins(self.units, self.frequencies, self.lane, self.kept, (self.host, self.host), tier)

    def unit(self, index):
        record = Record(lay_out([("w", (TILE,))]), TILE, self.traffic, name=f"layers.{index}")
        record.lie_in(self.files, [None])
        unit = Unit(index, [nn.Parameter(torch.empty(TILE, dtype=torch.bfloat16))], record)
        unit.open(HostBlocks(Ledger(0)), torch.device("cpu"), {}, in_place=True)
        return unit

    def read(self, used=None):
        """A step without updates, whose uses are worth more than a gradient in memory."""
        for index in [*(range(len(self.units)) if used is None else used)] * 4:
            self.frequencies.used(index)
        self.close_step()


@pytest.mark.parametrize("tier", [None, NoRoom()])
@pytest.mark.parametrize("waiting", [False, True])
def test_what_leaves_its_files_without_nvme_is_placed_no_longer(tier, waiting):
    model = InFiles(3, 3 * (HI + LO), tier)
    try:
        taken = model.kept.limit_nbytes if waiting else 0
        model.kept.reserve_anyway(taken)
        model.read()
        assert (len(model.targets()), model.kept.aside_nbytes) == ((0, 3 * HI) if waiting else (3, 0))
        model.kept.release(taken)
        own = model.units[1].record
        own.make_own(model.host)
        model.lane.submit(WritePass(own, TILE, {0: {"master": torch.full((TILE,), 7.0)}}))
        held = own.nbytes("host")
        model.read()
        assert model.targets() == {(0, "hi"), (2, "hi")}
        assert model.kept.held_nbytes == held + 2 * HI
        for _ in range(20):
            model.read([0])
        model.pins.make_room(model.kept.limit_nbytes)
        assert model.targets() == set()
        assert (own.targets, own.nbytes("host"), own.all_in_host) == ({}, held, True)
        assert (model.kept.held_nbytes, model.kept.aside_nbytes) == (held, 0)
        assert torch.equal(model.master(1), torch.full((TILE,), 7.0))
    finally:
        model.lane.close()


def test_of_many_units_the_likely_alone_are_ranked_and_placed_as_if_all_were(made, monkeypatch):
    monkeypatch.setattr(all_fields, "_LEAST_LIKELY", 1)
    monkeypatch.setattr(all_fields, "_LIKELY", 2)
    draw, count, found = random.Random(2), 60, []
    some, every = (made(count, 4 * (HI + LO + M + V) + 3 * GRADIENT, inline=True) for _ in range(2))
    likely = some.pins._fields.likely
    monkeypatch.setattr(some.pins._fields, "likely", lambda *args: found.append(likely(*args)) or found[-1])
    monkeypatch.setattr(every.pins._fields, "likely", lambda *_: None)
    weights = [1 / (1 + unit) for unit in range(count)]
    for step in range(24):
        if step == 12:
            draw.shuffle(weights)
        used = sorted(set(draw.choices(range(count), weights, k=8)))
        for model in (some, every):
            model.step(used, updated=used)
        assert some.pins._placement == every.pins._placement
        assert some.pinned() == every.pinned()
    assert any(one is not None for one in found)
    assert some.pins.revisions == every.pins.revisions > 1

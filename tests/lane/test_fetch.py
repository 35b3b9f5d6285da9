"""The walk that fetches and updates, on a real lane. Faked: the disk. Trusted: the reference recipe."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fakes import FakeDisk
from infinity.device.blocks import HostBlocks
from infinity.device.device import CpuDevice
from infinity.errors import CorruptionError
from infinity.kernels import AdamWScalars, state_key
from infinity.lane.fetch import FetchAndUpdatePass, FetchPass, UpdatePass
from infinity.lane.lane import StreamLane
from infinity.lane.passes import ReadPass, SpillPart, SpillPass, WritePass
from infinity.planning.layout import RecordSchema, lay_out, shard_of
from infinity.records.record import Record, Traffic
from infinity.records.updates import PendingUpdates, Update
from infinity.reference import ReferenceAdamW
from infinity.reference import recipe as reference
from infinity.reference.moments import widened
from infinity.storage.memory import Ledger, Pool, view
from infinity.storage.store import HostStore
from infinity.units.unit import Unit

TILE = 4096
NUMELS = [5000, 3, 9000]  # of tiles 0 and 1; 2; 3 to 5
FORMS = ["fp32", "bf16", "int8"]
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


class Setup:
    """One unit whose record lies on a faked disk, a lane, and the same parameters in the reference."""

    def __init__(self, seed, schema, slots=3):
        self.lane, self.device = StreamLane(Pool(TILE * 16, slots)), CpuDevice()
        self.host, self.disk = HostStore(Ledger(1 << 24)), FakeDisk(seed)
        self.schema = RecordSchema(schema)
        named = [(f"p{index}", (numel,)) for index, numel in enumerate(NUMELS)]
        shard = lay_out(named, TILE)
        self.traffic = Traffic()
        self.record = Record(shard, TILE, self.traffic, schema=self.schema, name="layers.3")
        for field in self.schema.fields:
            self.record.add(field, self.disk)
        start = [torch.randn(numel).bfloat16() for numel in NUMELS]
        self.plain = [nn.Parameter(one.clone()) for one in start]
        self.reference = ReferenceAdamW(self.plain, state_dtype=schema, **SETTINGS)
        self.run(WritePass(self.record, TILE, {n: {"master": one.float()} for n, one in enumerate(start)}))
        self.unit = Unit(0, [nn.Parameter(one) for one in start], self.record)
        self.steps = [0] * len(NUMELS)

    def open(self, *, in_place=False):
        self.blocks = HostBlocks(Ledger(0))
        self.unit.open(self.blocks, self.device.torch_device, {}, in_place=in_place)
        return self

    def run(self, job):
        self.lane.submit(job)
        self.lane.wait(job, finished=True)
        return job

    def pend(self, indices, kind="bf16"):
        """Let gradients be pending for some parameters; the reference makes its step with the same ones."""
        gradients = {index: torch.randn(NUMELS[index]).bfloat16() for index in indices}
        if kind == "fp32":
            gradients = {index: one.float() * 1.0001 for index, one in gradients.items()}
        if kind == "zero":
            gradients = {index: torch.zeros_like(one) for index, one in gradients.items()}
        if kind == "spilled":
            self.record.add("grad16", self.disk)
            parts = {index: SpillPart(one) for index, one in gradients.items()}
            self.run(SpillPass(self.unit.record, TILE, parts, set(), None, "grad16"))
        for index, gradient in gradients.items():
            self.steps[index] += 1
            tensor = gradient if kind in ("bf16", "fp32") else None
            field = "grad16" if kind == "spilled" else None
            key = state_key(0, index, self.steps[index])
            self.unit.pending[index] = Update(self.scalars(index), tensor, field, key)
            reference._store(self.plain[index], gradient, torch.ones(()))
        self.reference.step()
        self.reference.zero_grad()

    def scalars(self, index):
        (beta1, beta2), step = SETTINGS["betas"], self.steps[index]
        return AdamWScalars(SETTINGS["lr"], beta1, beta2, SETTINGS["eps"], SETTINGS["weight_decay"], step)

    def fetching(self):
        """The pass that fetches the unit and applies what is pending."""
        self.unit.allocate()
        make = FetchAndUpdatePass if self.unit.pending else FetchPass
        return make(self.unit, self.device, TILE)

    def updating(self, flat=None):
        """The pass that applies what is pending, to the values in `flat`, or to those in the record."""
        return UpdatePass(self.unit, self.device, TILE, flat)

    def fetch(self):
        return self.run(self.fetching())

    def update(self, flat=None):
        return self.run(self.updating(flat))

    def resident(self):
        """The parameters' values in the unit's memory."""
        return [self.unit.flat[one.start : one.stop] for one in self.record.shard.segments]

    def update_counts(self):
        read, written = dict(self.traffic.read), dict(self.traffic.written)
        self.traffic.read.clear()
        self.traffic.written.clear()
        return read, written

    def assert_same_weights(self):
        for found, expected in zip(self.resident(), self.plain, strict=True):
            assert torch.equal(found, expected.detach())

    def assert_same_record(self):
        """Masters and moments are the reference's, and so is `hi`."""
        for index, one in enumerate(self.plain):
            into = {name: torch.empty(NUMELS[index]) for name in ("master", "m", "v")}
            into["hi"] = torch.empty(NUMELS[index], dtype=torch.bfloat16)
            self.run(ReadPass(self.record, index, TILE, into))
            state = self.reference.state[one]
            m, v = widened(state, self.reference.state_dtype)
            expected = {"master": state["master"], "m": m, "v": v, "hi": one.detach()}
            for name, tensor in into.items():
                assert torch.equal(tensor, expected[name]), f"p{index}.{name}"

    def give_targets(self, *names):
        for name in names:
            self.record.targets[name] = self.host.allocate(self.record.field_nbytes(name), name)


@pytest.fixture
def made(seed, request):
    """Make set-ups; their lanes end with the test."""
    setups = []

    def make(schema="fp32", *, in_place=False, slots=3):
        setups.append(Setup(seed, schema, slots).open(in_place=in_place))
        return setups[-1]

    yield make
    for setup in setups:
        setup.lane.close()


def nbytes_of(setup, name):
    return setup.record.field_nbytes(name)


@pytest.mark.parametrize("schema", FORMS)
def test_an_update_of_what_came_back_damaged_is_refused_and_not_written(made, schema):
    setup = made(schema)
    setup.pend([0])
    setup.disk.data[setup.record.home("lo")[0].offset + 100] ^= 1
    before = bytes(setup.disk.data)
    with pytest.raises(CorruptionError, match=r"layers\.3\.lo: the 8192 bytes read from fake disk"):
        setup.update()
    setup.lane.close()
    assert bytes(setup.disk.data) == before


# Fetching


def test_a_fetched_unit_has_its_weights_and_moves_nothing_else(made):
    setup = made()
    setup.update_counts()
    setup.fetch()
    setup.assert_same_weights()
    assert setup.update_counts() == ({("nvme", "hi"): nbytes_of(setup, "hi")}, {})


def test_weights_are_read_from_the_disk_straight_into_the_units_memory(made):
    setup, addresses = made(), []
    read = setup.disk.read

    def noted(request):
        addresses.append((request.start, request.address, request.owner))
        return read(request)

    setup.disk.read = noted
    setup.fetch()
    base = setup.unit.flat.data_ptr()
    assert addresses, "something was read"
    assert [address for _, address, _ in addresses] == [base + start for start, _, _ in addresses]
    assert all(any(one is setup.unit.flat for one in owner) for _, _, owner in addresses), "it stays alive"


def test_weights_alone_are_read_in_ranges_as_wide_as_a_slot_and_with_updates_tile_by_tile(made):
    setup = made()
    wide = setup.fetching()
    assert list(wide.tiles()) == [(0, 6 * TILE)]
    setup.pend([0])
    narrow = setup.fetching()
    assert list(narrow.tiles()) == [(tile * TILE, tile * TILE + TILE) for tile in range(6)]


def test_a_finished_fetch_holds_neither_memory_nor_gradients(made):
    setup = made()
    setup.pend([0, 1, 2])
    job = setup.fetch()
    assert job.own_memory is None
    assert job.updates == {}
    assert setup.unit.pending == {}


def test_who_waits_for_the_values_is_called_once_they_are_there(made):
    setup, found = made(), []
    setup.pend([0])
    job = setup.fetching()
    job.on_done = lambda: found.append((job.done, job.updates))
    setup.run(job)
    assert found == [(False, {})]
    assert job.on_done is None


# Updates


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("schema", FORMS)
def test_pending_updates_are_applied_on_the_way_and_written_behind(made, schema, slots):
    setup = made(schema, slots=slots)
    for kind in ("bf16", "fp32", "spilled", "zero"):
        setup.pend([0, 1, 2], kind)
        setup.fetch()
        setup.assert_same_weights()
    setup.assert_same_record()


@pytest.mark.parametrize("schema", FORMS)
def test_only_tiles_with_an_updated_parameter_are_read_whole_and_written(made, schema):
    setup = made(schema)
    setup.pend([0, 1, 2])
    setup.fetch()
    setup.pend([1])  # the third tile of six
    setup.update_counts()
    setup.fetch()
    read, written = setup.update_counts()
    tile = {("nvme", name): setup.record.tile_nbytes(name, TILE) for name in setup.schema.fields}
    assert written == tile
    assert read == {**tile, ("nvme", "hi"): nbytes_of(setup, "hi")}
    setup.assert_same_weights()
    setup.assert_same_record()


def test_an_update_without_upload_passes_by_tiles_it_does_not_change(made):
    setup = made()
    setup.pend([0, 2])
    job = setup.updating()
    assert [start // TILE for start, _ in job.tiles()] == [0, 1, 3, 4, 5]
    setup.run(job)
    setup.assert_same_record()
    setup.fetch()
    setup.assert_same_weights()


def test_moments_that_were_never_written_are_not_read_and_count_as_zero(made):
    setup = made()
    setup.update_counts()
    setup.pend([0, 1, 2])
    setup.fetch()
    read, written = setup.update_counts()
    assert set(read) == {("nvme", "hi"), ("nvme", "lo")}
    assert set(written) == {("nvme", name) for name in setup.schema.fields}
    setup.assert_same_record()


@pytest.mark.parametrize("schema", FORMS)
def test_steps_that_were_missed_are_made_up_for_in_order(made, schema):
    setup = made(schema)
    setup.pend([2])
    setup.fetch()
    missed = []
    for _ in range(3):
        setup.pend([2], "zero")
        update = setup.unit.pending.pop(2)
        missed.append((update.scalars, update.key))
    setup.pend([2])
    last = setup.unit.pending[2]
    setup.unit.pending[2] = Update(last.scalars, last.tensor, None, last.key, missed=tuple(missed))
    setup.fetch()
    setup.assert_same_weights()
    setup.assert_same_record()


def test_weights_beside_those_that_an_update_of_their_tile_derives_anew_stay_what_they_were(made):
    setup, numel = made(), TILE // 2
    shard = lay_out([(name, (numel,)) for name in "ab"], numel)
    record = Record(shard, TILE, Traffic(), schema=RecordSchema("fp32", "fp16"), name="layers.3")
    for field in record.schema.fields:
        record.add(field, FakeDisk())
    masters = torch.randn(2, numel)
    setup.run(WritePass(record, TILE, {index: {"master": one} for index, one in enumerate(masters)}))
    update = Update(AdamWScalars(0.1, 0.9, 0.99, 1e-8, 0.1, 1), torch.randn(numel).half(), None)
    target = SimpleNamespace(record=record, base=0, flat=None, pending=PendingUpdates({0: update}))
    setup.run(UpdatePass(target, setup.device, TILE))
    for index, changes in ((0, True), (1, False)):
        found = {"hi": torch.empty(numel, dtype=torch.float16), "master": torch.empty(numel)}
        setup.run(ReadPass(record, index, TILE, found))
        assert torch.equal(found["hi"], found["master"].half())
        assert torch.equal(found["master"], masters[index]) != changes


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_random_bits_that_round_a_ranks_part_are_those_of_its_place_in_the_parameter(made, state_dtype):
    setup = made()
    master, gradient = torch.randn(2 * TILE), torch.randn(2 * TILE).bfloat16()
    scalars = AdamWScalars(0.1, 0.9, 0.99, 1e-8, 0.1, 1)
    whole = lay_out([("p", (2 * TILE,))], TILE, ranks=2)
    found = []
    for shard in (whole, *(shard_of(whole, rank, 2) for rank in range(2))):
        record = Record(shard, TILE, Traffic(), schema=RecordSchema(state_dtype), name="layers.3")
        for field in record.schema.fields:
            record.add(field, FakeDisk())
        (part,) = shard.segments
        its = slice(part.first, part.first + part.numel)
        setup.run(WritePass(record, TILE, {0: {"master": master[its].clone()}}))
        update = Update(scalars, gradient[its].clone(), None, state_key(0, 0, 1))
        target = SimpleNamespace(record=record, base=0, flat=None, pending=PendingUpdates({0: update}))
        setup.run(UpdatePass(target, setup.device, TILE))
        found.append({name: torch.empty(part.numel) for name in ("master", "m", "v")})
        setup.run(ReadPass(record, 0, TILE, found[-1]))
    for name, values in found[0].items():
        assert torch.equal(values, torch.cat([one[name] for one in found[1:]])), name


def test_an_update_knows_how_many_steps_it_missed():
    scalars = AdamWScalars(0.1, 0.9, 0.99, 1e-8, 0.0, 4)
    assert Update(scalars, None, None).misses == 1
    assert Update(scalars, None, None, missed=((scalars, 0),) * 3).misses == 4
    in_memory, in_record = Update(scalars, torch.zeros(1), None), Update(scalars, None, "grad16")
    assert (in_memory.misses, in_record.misses) == (math.inf, 0)
    later = in_record.then_missed([(scalars, 1)]).then_missed([(scalars, 2)])
    assert (later.misses, later.field, later.after) == (2, "grad16", ((scalars, 1), (scalars, 2)))
    zeros = Update(scalars, None, None, 7).then_missed([(scalars, 8)])
    assert (zeros.misses, zeros.key, zeros.missed) == (2, 8, ((scalars, 7),))


class Arriving:
    """A gradient's copy to the host that is made when it is waited for."""

    done = False

    def __init__(self, tensor):
        self.tensor, self.values = tensor, tensor.clone()
        tensor.fill_(float("nan"))

    def wait(self, timeout_s=None):
        self.tensor.copy_(self.values)


def test_a_gradient_on_its_way_to_the_host_is_waited_for(made):
    setup = made()
    setup.pend([0])
    update = setup.unit.pending[0]
    setup.unit.pending[0] = Update(
        update.scalars, update.tensor, None, update.key, arriving=Arriving(update.tensor)
    )
    setup.fetch()
    setup.assert_same_weights()


@pytest.mark.parametrize("schema", FORMS)
def test_a_resident_unit_is_updated_from_the_values_it_has_without_reading_them(made, schema):
    setup = made(schema)
    setup.pend([0, 1, 2])
    setup.fetch()
    setup.update_counts()
    setup.pend([0, 2])
    setup.update(setup.unit.flat)
    read, written = setup.update_counts()
    assert ("nvme", "hi") not in read
    assert written["nvme", "hi"] == 5 * 2 * TILE
    setup.assert_same_record()


# Fields on their way into host memory


def everything(schema):
    return RecordSchema(schema).fields


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_are_left_in_their_target_by_a_fetch_and_moments_are_not(made, in_place):
    setup = made(in_place=in_place)
    setup.pend([0, 1, 2])
    setup.fetch()
    setup.unit.deallocate()
    setup.give_targets("hi", "m")
    setup.update_counts()
    setup.fetch()
    assert setup.update_counts() == ({("nvme", "hi"): nbytes_of(setup, "hi")}, {})
    assert setup.record.in_host("hi")
    assert list(setup.record.targets) == ["m"]
    assert (setup.unit.flat.data_ptr() == setup.record.host_address("hi", 0)) is in_place
    setup.assert_same_weights()
    setup.assert_same_record()


@pytest.mark.parametrize("schema", FORMS)
@pytest.mark.parametrize("upload", [True, False])
def test_a_pass_with_updates_leaves_every_field_in_its_target_and_writes_none_of_them(made, schema, upload):
    setup = made(schema)
    setup.pend([0, 1, 2])
    setup.fetch()
    setup.give_targets(*everything(schema))
    setup.pend([0, 1, 2])
    setup.update_counts()
    setup.fetch() if upload else setup.update()
    _, written = setup.update_counts()
    assert written == {}
    assert setup.record.all_in_host
    assert setup.record.targets == {}
    setup.assert_same_record()
    setup.pend([0, 1, 2])
    setup.update_counts()
    setup.fetch()
    assert setup.update_counts() == ({}, {})
    setup.assert_same_weights()
    setup.assert_same_record()


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("updated", [[0], [1], [2], [0, 2]], ids=str)
@pytest.mark.parametrize("schema", FORMS)
@pytest.mark.parametrize("resident", [False, True])
def test_what_an_update_does_not_touch_is_left_in_the_target_too(made, schema, updated, written, resident):
    setup = made(schema)
    if written:
        setup.pend([0, 1, 2])
    setup.fetch()
    setup.give_targets(*everything(schema))
    setup.pend(updated)
    setup.update(setup.unit.flat) if resident else setup.fetch()
    assert setup.record.all_in_host
    setup.assert_same_record()
    setup.unit.deallocate()
    setup.fetch()
    setup.assert_same_weights()


def test_some_fields_go_into_host_memory_and_the_others_are_written_to_the_disk(made):
    setup = made("int8")
    setup.pend([0, 1, 2])
    setup.fetch()
    setup.give_targets("lo", "scale")
    setup.pend([0, 1])
    setup.update_counts()
    setup.fetch()
    _, written = setup.update_counts()
    assert set(written) == {("nvme", "hi"), ("nvme", "m"), ("nvme", "v")}
    assert [name for name, tier in setup.record.tiers() if tier == "host"] == ["lo", "scale"]
    setup.pend([1, 2])
    setup.fetch()
    setup.assert_same_record()


def test_a_target_given_while_the_pass_waits_is_adopted_and_one_given_later_is_not(made):
    setup = made()
    job = setup.fetching()
    setup.give_targets("hi")
    setup.run(job)
    assert setup.record.in_host("hi")
    setup.pend([0, 1, 2])
    job = setup.fetching()
    list(job.tiles())
    setup.give_targets("m")
    assert job.adopts == frozenset()


# In place


@pytest.fixture
def pinned(made):
    """A unit all of whose fields lie in host memory, and are computed with where they lie."""
    setup = made(in_place=True)
    setup.pend([0, 1, 2])
    setup.fetch()
    setup.unit.deallocate()
    setup.give_targets(*everything("fp32"))
    setup.pend([0, 1, 2])
    setup.fetch()
    assert setup.record.all_in_host
    return setup


def test_a_unit_in_place_without_updates_has_nothing_to_walk_over(pinned):
    assert list(pinned.fetching().tiles()) == []
    pinned.assert_same_weights()


def test_an_update_in_place_changes_the_weights_where_they_are_used(pinned):
    flat = pinned.unit.flat
    pinned.pend([0, 2])
    pinned.fetch()
    assert pinned.unit.flat is flat
    pinned.assert_same_weights()
    pinned.assert_same_record()


def test_a_private_copy_is_not_mistaken_for_the_record(pinned):
    pinned.unit.make_private()
    pinned.unit.flat.zero_()
    pinned.pend([0, 1, 2])
    pinned.run(FetchAndUpdatePass(pinned.unit, pinned.device, TILE))
    pinned.assert_same_weights()
    pinned.assert_same_record()


def test_other_elements_of_a_block_stay_what_they_were(pinned):
    padding = pinned.record.host_address("hi", NUMELS[0])
    before = bytes(view(padding, 2 * (2 * TILE - NUMELS[0])))
    pinned.pend([0])
    pinned.fetch()
    assert bytes(view(padding, 2 * (2 * TILE - NUMELS[0]))) == before


def test_an_update_of_all_parameters_in_host_memory_is_done_at_once_and_of_some_by_tiles(pinned):
    by_tiles = [(tile * TILE, tile * TILE + TILE) for tile in range(6)]
    pinned.pend([0, 1, 2])
    assert list(pinned.updating().tiles()) == [(0, 6 * TILE)]
    del pinned.unit.pending[1]
    by_tiles.remove((2 * TILE, 3 * TILE))
    assert list(pinned.updating().tiles()) == by_tiles


@pytest.mark.parametrize("schema", FORMS)
def test_an_update_in_host_memory_of_moments_written_in_part_goes_by_tiles_and_is_the_same(made, schema):
    setup = made(schema, in_place=True)
    for name in setup.schema.moments:
        setup.record.drop(name)
        setup.record.add(name, setup.host)
    setup.give_targets("hi", "lo")
    setup.pend([1])
    setup.fetch()
    assert setup.record.all_in_host
    setup.pend([0, 1, 2])
    assert len(list(setup.fetching().tiles())) == 6
    setup.fetch()
    setup.assert_same_record()
    setup.pend([0, 1, 2])
    assert len(list(setup.fetching().tiles())) == 1
    setup.fetch()
    setup.assert_same_record()
    setup.assert_same_weights()

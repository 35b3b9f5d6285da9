"""The walks over records beside fetching, on a real lane. The disk is faked."""

import math
import threading

import pytest
import torch
from torch import nn

from fakes import FakeDisk
from infinity.lane.lane import StreamLane
from infinity.lane.passes import LeavePass, ReadPass, SpillPart, SpillPass, WritePass
from infinity.planning.layout import RecordSchema, lay_out
from infinity.records.record import Record, Traffic
from infinity.reference import rounded
from infinity.reference.moments import M4, M8, V4, V8, decode, encode_at_random
from infinity.storage.memory import Ledger, Pool
from infinity.storage.store import HostStore
from infinity.units.unit import Unit

TILE = 4096
NUMELS = [5000, 3, 9000]  # of tiles 0 and 1; 2; 3 to 5
ALL = range(len(NUMELS))


class Setup:
    """A record on a faked disk and a lane."""

    def __init__(self, seed, schema):
        self.lane, self.disk = StreamLane(Pool(TILE * 16, 3)), FakeDisk(seed)
        self.host = HostStore(Ledger(1 << 24))
        self.traffic = Traffic()
        self.shard = lay_out([(f"p{index}", (numel,)) for index, numel in enumerate(NUMELS)], TILE)
        self.record = Record(self.shard, TILE, self.traffic, schema=RecordSchema(schema), name="layers.3")
        for field in self.record.schema.fields:
            self.record.add(field, self.disk)
        parameters = [nn.Parameter(torch.empty(numel, dtype=torch.bfloat16)) for numel in NUMELS]
        self.unit = Unit(0, parameters, self.record)

    def run(self, job):
        self.lane.submit(job)
        self.lane.wait(job, finished=True)
        return job

    def write(self, values, **more):
        self.run(WritePass(self.record, TILE, values, **more))

    def read(self, index, *names):
        """Read one parameter's fields; 16-bit ones as bf16."""
        dtypes = {"hi": torch.bfloat16, "grad16": torch.bfloat16}
        into = {
            name: torch.full((NUMELS[index],), 77.0, dtype=dtypes.get(name, torch.float32)) for name in names
        }
        self.run(ReadPass(self.record, index, TILE, into))
        return into

    def spill(self, parts, carried=(), source=None, target="grad16"):
        if target not in self.record:
            self.record.add(target, self.disk)
        self.run(SpillPass(self.unit.record, TILE, parts, set(carried), source, target))
        if source not in (None, target):
            self.record.drop(source)
        return parts

    def moved(self):
        """Return tiles read and written, by field, since this was asked."""
        found = []
        for counter in (self.traffic.read, self.traffic.written):
            found.append(
                {name: n // self.record.tile_nbytes(name, TILE) for (_, name), n in counter.items() if n}
            )
            counter.clear()
        return found


@pytest.fixture
def made(seed):
    """Make set-ups; their lanes end with the test."""
    setups = []

    def make(schema="fp32"):
        setups.append(Setup(seed, schema))
        return setups[-1]

    yield make
    for setup in setups:
        setup.lane.close()


@pytest.fixture
def setup(made):
    return made()


def gradients(dtype=torch.bfloat16):
    return {index: torch.randn(NUMELS[index]).to(dtype) for index in ALL}


# Write and read


def test_masters_are_stored_as_their_rounding_and_a_rest_and_come_back_exactly(setup):
    masters = {index: torch.randn(NUMELS[index]) for index in ALL}
    setup.write({index: {"master": one} for index, one in masters.items()})
    for index, one in masters.items():
        found = setup.read(index, "master", "hi")
        assert torch.equal(found["master"], one)
        assert torch.equal(found["hi"], rounded(one))


def test_what_was_never_written_reads_as_zero_without_any_transfer(setup):
    setup.write({index: {"master": torch.randn(NUMELS[index])} for index in ALL})
    setup.moved()
    found = setup.read(2, "m", "v")
    assert all(one.count_nonzero() == 0 for one in found.values())
    assert setup.moved() == [{}, {}]


@pytest.mark.parametrize("schema", ["fp32", "bf16", "int8"])
def test_moments_are_stored_in_the_records_format(made, schema):
    setup = made(schema)
    m, v = torch.randn(NUMELS[2]), torch.rand(NUMELS[2])
    setup.write({2: {"m": m, "v": v}})
    once = setup.read(2, "m", "v")
    worst = {"fp32": 0, "bf16": 2**-8, "int8": 2**-4}[schema]
    assert ((once["m"] - m).abs() <= worst * m.abs() + (schema == "int8") * 1e-3).all()
    assert ((once["v"] - v).abs() <= worst * v.abs() + (schema == "int8") * 1e-3).all()
    setup.write({2: once})
    again = setup.read(2, "m", "v")
    assert all(torch.equal(again[name], once[name]) for name in once), "what is on the grid stays"
    alone = [setup.read(2, name)[name] for name in ("m", "v")]
    assert all(torch.equal(*pair) for pair in zip(alone, once.values(), strict=True))


@pytest.mark.parametrize(("state_dtype", "m", "v"), [("int8", M8, V8), ("int4", M4, V4)])
def test_codes_that_the_reference_has_stored_are_those_that_are_read(made, state_dtype, m, v):
    setup = made(state_dtype)
    half = torch.full((NUMELS[2],), 1 << 15)
    stored = {}
    for name, codes in (("m", m), ("v", v)):
        values = torch.randn(NUMELS[2]) if name == "m" else torch.rand(NUMELS[2])
        stored[name] = decode(*encode_at_random(values, half, codes), codes)
    setup.write({2: stored})
    found = setup.read(2, "m", "v")
    assert all(torch.equal(found[name], one) for name, one in stored.items())


@pytest.mark.parametrize("state_dtype", ["int8", "int4"])
def test_of_moments_that_share_blocks_the_one_that_is_not_set_stays(made, state_dtype):
    setup = made(state_dtype)
    m, v = torch.randn(NUMELS[2]), torch.rand(NUMELS[2])
    setup.write({2: {"m": m, "v": v}})
    before = setup.read(2, "m", "v")
    setup.write({2: {"m": -2 * before["m"]}})
    after = setup.read(2, "m", "v")
    assert torch.equal(after["m"], -2 * before["m"])
    assert torch.equal(after["v"], before["v"])


def test_one_parameters_write_leaves_the_others_as_they_are(setup):
    values = {index: {"master": torch.randn(NUMELS[index]), "m": torch.randn(NUMELS[index])} for index in ALL}
    setup.write(values)
    values[1]["master"] = torch.randn(3)
    setup.moved()
    setup.write({1: {"master": values[1]["master"]}})
    assert setup.moved() == [{}, {"hi": 1, "lo": 1}]
    for index, fields in values.items():
        found = setup.read(index, *fields)
        assert all(torch.equal(found[name], one) for name, one in fields.items())


def share_a_tile(setup):
    """Give a set-up a record of two parameters in one tile."""
    setup.shard = lay_out([("a", (100,)), ("b", (200,))])
    setup.record = Record(setup.shard, TILE, setup.traffic)
    for field in setup.record.schema.fields:
        setup.record.add(field, setup.disk)


def test_a_parameter_that_shares_its_tile_is_kept_by_reading_it_first(setup):
    share_a_tile(setup)
    old = {0: {"master": torch.randn(100)}, 1: {"master": torch.randn(200)}}
    setup.write(old)
    assert setup.moved() == [{}, {"hi": 1, "lo": 1}], "nothing is read where all is new"
    new = torch.randn(200)
    setup.write({1: {"master": new}})
    assert setup.moved() == [{"hi": 1, "lo": 1}, {"hi": 1, "lo": 1}]
    for numel, index, expected in ((100, 0, old[0]["master"]), (200, 1, new)):
        into = {"master": torch.empty(numel)}
        setup.run(ReadPass(setup.record, index, TILE, into))
        assert torch.equal(into["master"], expected)


def test_a_16_bit_value_becomes_a_master_without_a_rest(setup):
    share_a_tile(setup)
    masters = [torch.randn(100), torch.randn(200)]
    setup.write({index: {"master": one} for index, one in enumerate(masters)})
    masters[1] = torch.randn(200).bfloat16()
    setup.write({1: {"master": masters[1]}})
    for index, one in enumerate(masters):
        into = {"master": torch.empty(len(one))}
        setup.run(ReadPass(setup.record, index, TILE, into))
        assert torch.equal(into["master"], one.float())


def test_rewriting_changes_the_masters_of_changed_weights_alone(setup):
    masters = torch.randn(NUMELS[2])
    setup.write({2: {"master": masters}})
    new = rounded(masters)
    new[::3] = 5
    setup.write({2: {"master": new}}, rewrite=True)
    expected = masters.clone()
    expected[::3] = 5
    assert torch.equal(setup.read(2, "master")["master"], expected)


def test_a_finished_write_holds_no_values(setup):
    job = setup.run(WritePass(setup.record, TILE, {1: {"master": torch.randn(3)}}))
    assert job._values == {}


# Spill


def test_new_gradients_are_stored_as_they_are(setup):
    new = gradients()
    setup.spill({index: SpillPart(one) for index, one in new.items()})
    for index, one in new.items():
        assert torch.equal(setup.read(index, "grad16")["grad16"], one)
    assert setup.moved()[1] == {"grad16": 6}


def test_parameters_without_a_gradient_store_zeros(setup):
    setup.spill({0: SpillPart(gradients()[0])})
    assert all(setup.read(index, "grad16")["grad16"].count_nonzero() == 0 for index in (1, 2))


@pytest.mark.parametrize("first", ["grad16", "grad32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_added_gradient_becomes_an_fp32_sum_and_a_carried_one_survives(setup, first, dtype):
    old = gradients(torch.bfloat16 if first == "grad16" else torch.float32)
    setup.spill({index: SpillPart(one) for index, one in old.items()}, target=first)
    new = gradients(dtype)
    parts = {0: SpillPart(new[0], add=True, measure=True), 1: SpillPart(new[1])}
    setup.spill(parts, carried={2}, source=first, target="grad32")
    expected = [old[0].float() + new[0].float(), new[1].float(), old[2].float()]
    for index, one in enumerate(expected):
        assert torch.equal(setup.read(index, "grad32")["grad32"], one), index


def test_a_16_bit_gradient_may_be_replaced_beside_one_that_is_carried(setup):
    old, new = gradients(), gradients()
    setup.spill({index: SpillPart(one) for index, one in old.items()})
    setup.spill({2: SpillPart(new[2])}, carried={0, 1}, source="grad16")
    for index, one in enumerate([old[0], old[1], new[2]]):
        assert torch.equal(setup.read(index, "grad16")["grad16"], one), index


@pytest.mark.parametrize("target", ["grad16", "grad32"])
def test_the_squares_of_what_is_stored_are_summed_over_all_tiles(setup, target):
    new = gradients()
    parts = {index: SpillPart(one, measure=index != 1) for index, one in new.items()}
    parts[2].tensor[8000] = 1e20
    setup.spill(parts, target=target)
    for index in (0, 2):
        exact = float(new[index].double().square().sum())
        assert math.isclose(parts[index].square_sum.value, exact, rel_tol=1e-12)
    assert parts[1].square_sum.value == 0, "nobody asked for it"
    assert all(part.square_sum.finite for part in parts.values())


def test_the_sum_that_is_stored_is_what_is_measured(setup):
    old, new = gradients(), gradients()
    setup.spill({0: SpillPart(old[0])})
    part = SpillPart(new[0], add=True, measure=True)
    setup.spill({0: part}, source="grad16", target="grad32")
    exact = float((old[0].float() + new[0].float()).double().square().sum())
    assert math.isclose(part.square_sum.value, exact, rel_tol=1e-12)


@pytest.mark.parametrize("place", [0, 4999])
def test_a_gradient_that_is_infinite_in_any_tile_is_seen(setup, place):
    new = gradients()
    new[0][place] = float("inf")
    parts = setup.spill({index: SpillPart(one, measure=True) for index, one in new.items()})
    assert [part.square_sum.finite for part in parts.values()] == [False, True, True]


class Arriving:
    """A copy to the host that is made when it is waited for."""

    done = False

    def __init__(self, tensor):
        self.tensor, self.values = tensor, tensor.clone()
        tensor.zero_()

    def wait(self, timeout_s=None):
        self.tensor.copy_(self.values)


def test_a_gradient_on_its_way_to_the_host_is_waited_for(setup):
    new = gradients()[0]
    expected = new.clone()
    setup.spill({0: SpillPart(new, arriving=Arriving(new))})
    assert torch.equal(setup.read(0, "grad16")["grad16"], expected)


def test_a_spill_touches_gradients_alone(setup):
    job = SpillPass(setup.unit.record, TILE, {}, {0}, "grad16", "grad32")
    assert set(job.touched()) == {"grad16", "grad32"}
    assert set(SpillPass(setup.unit.record, TILE, {}, set(), None, "grad16").touched()) == {"grad16"}


def test_who_spills_gets_the_measured_parts_when_the_tensors_may_go(setup):
    setup.record.add("grad16", setup.disk)
    parts = {1: SpillPart(torch.ones(3, dtype=torch.bfloat16), measure=True)}
    job, found = SpillPass(setup.unit.record, TILE, parts, set(), None, "grad16"), []
    job.give_parts_to(found.append)
    setup.run(job)
    assert found == [parts]
    assert found[0][1].square_sum.value == 3
    assert job._parts == {}


# Leave


@pytest.fixture
def pinned(setup):
    """A set-up whose field `m` lies in host memory, of which only the last parameter was ever set."""
    setup.record.drop("m")
    setup.record.add("m", setup.host)
    setup.values = torch.randn(NUMELS[2])
    setup.write({2: {"m": setup.values}})
    setup.moved()
    return setup


def test_a_field_that_left_host_memory_is_read_from_where_it_was_written(pinned):
    extent = pinned.disk.allocate(pinned.record.field_nbytes("m"), "m")
    pinned.run(LeavePass(pinned.record, "m", extent, TILE))
    assert pinned.record.tier("m") == "nvme"
    assert pinned.host.ledger.held_nbytes == 0
    assert torch.equal(pinned.read(2, "m")["m"], pinned.values)
    assert pinned.read(0, "m")["m"].count_nonzero() == 0
    assert pinned.moved() == [{"m": 3}, {"m": 3}], "three tiles of six were ever written"


def test_a_field_lies_in_host_memory_until_all_of_it_is_written(pinned):
    extent = pinned.disk.allocate(pinned.record.field_nbytes("m"), "m")
    job = LeavePass(pinned.record, "m", extent, TILE)
    gate, write, seen = threading.Event(), pinned.disk.write, []

    class Held:
        """A write that is over when the test says so."""

        done = False
        began_s = ended_s = 0.0

        def __init__(self, transfer):
            self.transfer = transfer

        def wait(self, timeout_s=None):
            gate.wait(60)
            self.transfer.wait()
            seen.append(pinned.record.tier("m"))

    pinned.disk.write = lambda *request: Held(write(*request))
    pinned.lane.submit(job)
    pinned.lane.wait(job)
    assert not job.finished
    gate.set()
    pinned.lane.wait(job, finished=True)
    assert seen == ["host"] * 3
    assert pinned.record.tier("m") == "nvme"


def test_a_write_that_fails_leaves_the_field_where_it_is(pinned):
    extent = pinned.disk.allocate(pinned.record.field_nbytes("m"), "m")
    pinned.disk._fail_at = pinned.disk.transfers + 2
    with pytest.raises(OSError, match=r"layers\.3\.m: injected"):
        pinned.run(LeavePass(pinned.record, "m", extent, TILE))
    assert pinned.record.in_host("m")

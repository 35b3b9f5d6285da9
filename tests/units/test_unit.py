"""A unit at run time: the memory its parameters lie in, and who else has a view of it. Nothing is faked."""

import gc

import pytest
import torch
from torch import nn

from infinity.device.blocks import HostBlocks
from infinity.errors import NotResidentError
from infinity.planning.layout import ALIGN_NUMEL, lay_out
from infinity.records.record import Record, Traffic
from infinity.storage.memory import Ledger, view
from infinity.storage.store import HostStore
from infinity.units.unit import Unit

SHAPES = [(3, 4), (5,)]
CPU = torch.device("cpu")


class Home:
    """A unit of two parameters, its record in host memory, and the blocks it becomes resident in."""

    def __init__(self, *, in_place):
        self.host = HostStore(Ledger(1 << 24))
        self.blocks = HostBlocks(Ledger(1 << 24))
        shard = lay_out([(f"p{index}", shape) for index, shape in enumerate(SHAPES)])
        record = Record(shard, ALIGN_NUMEL, Traffic(), name="layers.3")
        record.add("hi", self.host)
        parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in SHAPES]
        self.unit = Unit(3, parameters, record)
        self.by_storage = {}
        self.unit.open(self.blocks, CPU, self.by_storage, in_place=in_place)

    def resident(self, value):
        """Fetch: the first parameter becomes `value`."""
        self.unit.allocate()
        self.unit.flat.fill_(value)
        self.unit.attach()
        return self.unit.parameters[0]

    def release(self):
        self.unit.detach()
        self.unit.deallocate()

    @property
    def pinned(self):
        """What the record holds in host memory, as the first parameter's values."""
        memory = self.unit.record.host_address("hi", 0)
        return torch.frombuffer(view(memory, 24), dtype=torch.bfloat16).unique().tolist()


@pytest.fixture
def home():
    return Home(in_place=False)


@pytest.fixture
def pinned():
    return Home(in_place=True)


def values(tensor):
    return tensor.detach().unique().tolist()


# Residence in a buffer


def test_memory_that_a_fetch_left_behind_is_taken_no_second_time_and_given_back_once(home, monkeypatch):
    given_back = []
    monkeypatch.setattr(home.blocks, "leaving", lambda flat: given_back.append(flat.data_ptr()))
    home.unit.allocate()
    left = home.unit.flat.data_ptr()
    home.unit.allocate()
    assert (home.unit.flat.data_ptr(), given_back) == (left, [])
    home.unit.deallocate()
    assert given_back == [left]
    home.unit.unbind()
    assert given_back == [left]


def test_attached_parameters_are_their_part_of_the_units_memory(home):
    unit = home.unit
    unit.allocate()
    unit.flat.copy_(torch.arange(unit.layout.numel))
    unit.attach()
    first, second = unit.parameters
    assert torch.equal(first.detach().flatten(), torch.arange(12).bfloat16())
    assert torch.equal(second.detach(), torch.arange(ALIGN_NUMEL, ALIGN_NUMEL + 5).bfloat16())
    assert [tuple(one.shape) for one in unit.parameters] == SHAPES
    assert unit.attached


def test_detached_parameters_are_guarded_and_keep_their_shape(home):
    parameter = home.resident(1)
    home.unit.detach()
    assert tuple(parameter.shape) == (3, 4)
    assert not home.unit.attached
    with pytest.raises(NotResidentError):
        parameter + 1


def test_a_released_units_buffer_is_used_by_the_next(home):
    home.resident(1)
    address = home.unit.flat.data_ptr()
    home.release()
    assert home.blocks.buffers.free_nbytes == home.unit.resident_nbytes
    home.resident(2)
    assert home.unit.flat.data_ptr() == address
    assert home.blocks.buffers.made == 1


@pytest.mark.parametrize("shown", ["view", "detached", "storage"])
def test_a_view_that_outlives_its_use_keeps_its_values_and_their_memory(home, shown):
    parameter = home.resident(1)
    if shown == "storage":
        kept = torch.empty(0, dtype=torch.bfloat16).set_(parameter.untyped_storage())[:12]
    else:
        kept = parameter.t() if shown == "view" else parameter.detach()
    home.release()
    home.resident(2)
    assert values(kept) == [1]
    assert values(home.unit.parameters[0]) == [2]
    assert home.blocks.buffers.made == 2
    home.release()
    del kept, parameter
    gc.collect()
    assert home.blocks.buffers.free_nbytes == 2 * home.unit.resident_nbytes, "both buffers are back"


def test_what_a_graph_saved_keeps_its_values(home):
    parameter = home.resident(1)
    x = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    out = parameter.t() @ x
    home.release()
    home.resident(2)
    out.sum().backward()
    assert values(x.grad) == [4], "the sum over four ones, not twos"


def test_a_unit_is_found_by_the_storage_of_any_view_while_it_has_memory(home):
    parameter = home.resident(1)
    key = int(parameter[0].untyped_storage()._cdata)
    assert home.by_storage == {key: home.unit}
    assert key == home.unit.storage_key
    home.release()
    assert home.by_storage == {}


def test_a_change_in_place_is_reported_once_by_name(home):
    parameter = home.resident(1)
    assert home.unit.changes.found() is None
    with torch.no_grad():
        parameter.add_(1)
    assert home.unit.changes.found() == "p0"
    assert home.unit.changes.found() is None


def test_being_resident_takes_the_units_16_bit_weights(home):
    assert home.unit.resident_nbytes == home.unit.window_nbytes == 2 * 2 * ALIGN_NUMEL
    assert not home.unit.in_place
    home.unit.allocate()
    assert home.unit.flat.nbytes == home.unit.resident_nbytes


# In place: `hi` lies in the memory that computes


def test_a_pinned_unit_is_where_it_computes_and_takes_nothing_more(pinned):
    unit = pinned.unit
    assert unit.in_place
    assert unit.window_nbytes == 0
    pinned.resident(1)
    assert unit.flat.data_ptr() == unit.record.host_address("hi", 0)
    assert pinned.pinned == [1], "computing and storing are in one memory"
    assert pinned.blocks.buffers.made == 0


def test_a_pinned_unit_that_is_used_again_has_its_views_already(pinned):
    pinned.resident(1)
    flat = pinned.unit.flat
    pinned.release()
    pinned.unit.allocate()
    assert pinned.unit.flat is flat
    pinned.unit.attach()
    assert values(pinned.unit.parameters[0]) == [1]


def test_a_view_of_a_pinned_unit_keeps_its_values_when_the_record_is_updated(pinned):
    kept = pinned.resident(1).t()
    old = pinned.unit.record.memory("hi")
    pinned.release()
    assert pinned.unit.record.memory("hi") is not old
    assert pinned.pinned == [1], "the record goes on with the same values"
    view(pinned.unit.record.host_address("hi", 0), 2 * 12)[:] = bytes(2 * 12)  # as an update in place does
    pinned.unit.allocate()
    pinned.unit.attach()
    assert values(pinned.unit.parameters[0]) == [0]
    assert values(kept) == [1]


def test_a_private_copy_has_the_values_and_its_changes_stay_out_of_the_record(pinned):
    pinned.resident(1)
    assert pinned.unit.resident_in_place
    pinned.unit.make_private()
    pinned.unit.attach()
    assert not pinned.unit.resident_in_place
    assert values(pinned.unit.parameters[0]) == [1]
    with torch.no_grad():
        pinned.unit.parameters[0].fill_(9)
    assert pinned.pinned == [1]
    pinned.release()
    assert pinned.blocks.buffers.free_nbytes == pinned.unit.resident_nbytes, "a copy is given back"
    pinned.unit.allocate()
    pinned.unit.attach()
    assert values(pinned.unit.parameters[0]) == [1]


@pytest.mark.parametrize("in_place", [False, True])
def test_before_a_units_memory_changes_it_parts_from_those_who_have_a_view_of_it(in_place):
    home = Home(in_place=in_place)
    kept = home.resident(1).t()
    home.unit.detach()
    home.unit.stop_sharing()
    home.unit.flat.fill_(2)  # as an update does
    home.unit.attach()
    assert values(home.unit.parameters[0]) == [2]
    assert values(kept) == [1]
    assert home.pinned == ([2] if in_place else [0])


@pytest.mark.parametrize("in_place", [False, True])
def test_a_unit_that_nobody_has_a_view_of_stays_where_it_is(in_place):
    home = Home(in_place=in_place)
    home.resident(1)
    home.unit.detach()
    flat = home.unit.flat
    home.unit.stop_sharing()
    assert home.unit.flat is flat


def test_parting_takes_the_values_along(home):
    kept = home.resident(1).t()
    home.unit.detach()
    home.unit.stop_sharing()
    home.unit.attach()
    assert values(home.unit.parameters[0]) == values(kept) == [1]


def test_a_view_taken_before_a_private_copy_keeps_its_values(pinned):
    kept = pinned.resident(1).t()
    pinned.unit.detach()
    pinned.unit.make_private()
    view(pinned.unit.record.host_address("hi", 0), 2 * 12)[:] = bytes(2 * 12)  # as an update in place does
    assert values(kept) == [1]
    assert pinned.pinned == [0]


def test_a_unit_in_a_buffer_is_private_as_it_is(home):
    home.resident(1)
    flat = home.unit.flat
    home.unit.make_private()
    assert home.unit.flat is flat


def test_a_unit_that_is_going_to_be_pinned_becomes_resident_in_its_target(pinned):
    unit, store = pinned.unit, HostStore(Ledger(1 << 24))
    target = unit.record.targets["hi"] = store.allocate(unit.record.field_nbytes("hi"), "hi")
    pinned.resident(4)
    assert unit.flat.data_ptr() == target.offset
    unit.record.adopt("hi")
    assert pinned.pinned == [4]
    assert pinned.host.ledger.held_nbytes == 0


def test_a_unit_whose_memory_was_replaced_meanwhile_moves_to_the_new_one(pinned):
    unit = pinned.unit
    pinned.resident(1)
    unit.detach()
    unit.record.give_new_memory("hi")
    unit.allocate()
    assert unit.flat.data_ptr() == unit.record.host_address("hi", 0)
    unit.attach()
    assert values(unit.parameters[0]) == [1]


def test_a_unit_that_is_not_in_place_copies_even_what_is_pinned(home):
    home.resident(1)
    assert home.unit.flat.data_ptr() != home.unit.record.host_address("hi", 0)
    assert home.pinned == [0]


def test_its_state_is_told_in_a_word(home):
    assert "released" in repr(home.unit)
    home.resident(1)
    assert repr(home.unit) == f"<Unit layers.3, {2 * ALIGN_NUMEL} elements, attached, 0 users, 0 pending>"
    assert (home.unit.name, home.unit.trainable) == ("layers.3", True)

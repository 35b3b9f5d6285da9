"""Whether host memory holds all fields, before any use. Trusted: records on NVMe. Nothing is faked."""

import pytest

import infinity
from deep import Both
from infinity.units.all_fields import AllFields
from infinity.units.all_fit import place_all

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]


@pytest.fixture
def units(folder):
    both = Both(folder, memory="16MiB", ours={})
    yield both.engine.units
    both.engine.lane.drain()


def needed_nbytes(units):
    fields = sum(one.record.field_nbytes(name) for one in units for name in one.record.fields)
    return fields + 2 * sum(one.record.field_nbytes("hi") for one in units)


def test_all_fields_come_where_they_fit_beside_the_gradients_of_two_steps(units):
    revision = place_all(units, AllFields(units), needed_nbytes(units))
    expected = {(one.index, name) for one in units for name in one.record.fields}
    assert revision.placement == dict.fromkeys(expected, "host")
    assert {(one.unit, one.field) for one in revision.moves} == expected
    assert all((one.source, one.target) == ("nvme", "host") for one in revision.moves)


def test_a_byte_less_is_left_to_the_counts_of_the_first_step(units):
    assert place_all(units, AllFields(units), needed_nbytes(units) - 1) is None


def test_a_model_with_a_frozen_unit_is_left_to_them(units):
    for parameter in units[0].parameters:
        parameter.requires_grad_(False)
    assert not units[0].trainable
    assert place_all(units, AllFields(units), 1 << 40) is None


def test_a_unit_that_was_fetched_already_leaves_it_to_them(units):
    assert place_all(units, AllFields(units), 1 << 40) is not None
    with infinity.gathered(units[0].parameters[0]):
        assert units[0].residence.fetch is not None
        assert place_all(units, AllFields(units), 1 << 40) is None

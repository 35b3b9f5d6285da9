"""The fields of all units as columns. Faked: units and their records, which tell of changes."""

from types import SimpleNamespace

import numpy as np
import pytest

from infinity.planning.frequency import Frequencies
from infinity.units import all_fields
from infinity.units.all_fields import AllFields


class FakeRecord:
    schema = SimpleNamespace(derived=())
    packed_nbytes = None

    def __init__(self):
        self.sizes = {"hi": 2, "m": 4}

    @property
    def fields(self):
        return tuple(self.sizes)

    def field_nbytes(self, name):
        return self.sizes[name]

    def tell_fields(self, changed, place):
        self.changed, self.place = changed, place

    def change(self, **sizes):
        self.sizes = {**self.sizes, **sizes}
        self.changed.add(self.place)


@pytest.fixture
def units():
    return [SimpleNamespace(index=index, record=FakeRecord()) for index in range(40)]


def test_records_that_have_told_of_a_change_are_looked_at_again_and_no_others(units):
    fields = AllFields(units)
    fields.look()
    units[0].record.sizes["hi"] = 16
    units[1].record.change(m=8)
    fields.look()
    assert fields.nbytes[:6].tolist() == [2, 4, 2, 8, 2, 4]
    units[1].record.change(v=32)
    fields.look()
    assert fields.keys[:5] == [(0, "hi"), (0, "m"), (1, "hi"), (1, "m"), (1, "v")]
    assert fields.nbytes[:5].tolist() == [16, 4, 2, 8, 32]


def test_likely_fields_are_those_of_the_units_used_most_and_all_that_are_placed(units, monkeypatch):
    monkeypatch.setattr(all_fields, "_LEAST_LIKELY", 1)
    fields, expected = AllFields(units), Frequencies(len(units))
    fields.look()
    for unit in (3, 7, 7, 7, 9, 9, 30):
        expected.used(unit)
    expected.updated(9)
    expected.close_step()
    placed = {(20, "m"): "host"}
    keys, columns, rest = fields.likely(expected, placed, 6)  # room for a unit, and 4 times that
    assert {unit for unit, _ in keys} == {3, 7, 9, 20, 30}
    every = fields.columns(expected, placed)
    of_row = [fields.keys.index(key) for key in keys]
    for name in ("unit", "field", "nbytes", "density", "placed"):
        assert np.array_equal(getattr(columns, name), getattr(every, name)[of_row])
    others = np.setdiff1d(np.arange(len(fields.keys)), of_row)
    assert (rest.density, rest.nbytes) == (0.0, 2)
    assert every.density[others].max() == 0
    assert fields.likely(expected, placed, 30) is None, "that many there are not"

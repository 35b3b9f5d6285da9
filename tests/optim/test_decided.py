"""Which updates that earlier steps decided cannot wait for the next one. Faked: units, without records."""

import pytest
import torch

from infinity.optim import missed
from infinity.optim.decided import DecidedUpdates
from infinity.records.update_rules import ADAMW, MUON
from infinity.records.updates import PendingUpdates, Update

IN_RECORD = Update(None, None, "grad16", recipe=ADAMW)
IN_MEMORY = Update(None, torch.zeros(1), None, recipe=ADAMW)


class FakeUnit:
    def __init__(self, index):
        self.index, self.told, self.looks = index, PendingUpdates(), 0

    @property
    def pending(self):
        self.looks += 1
        return self.told

    def decide(self, decided, update):
        self.told[0] = update
        decided.add(self, update)


def of_zeros(steps):
    return Update.of_zeros([(None, 0)] * steps, ADAMW)


@pytest.fixture
def units():
    return [FakeUnit(index) for index in range(3)]


@pytest.fixture
def decided():
    return DecidedUpdates()


def test_an_update_whose_gradient_is_in_the_record_waits_and_is_not_looked_at(decided, units):
    units[0].decide(decided, IN_RECORD)
    for begin in ([], [units[0]], []):
        assert decided.that_cannot_wait([], begin, []) == []
    assert (units[0].looks, units[0] in decided) == (0, True)


def test_what_waits_is_applied_before_another_update_of_its_unit_or_where_it_may_miss_no_more(decided, units):
    for unit in units:
        unit.decide(decided, IN_RECORD)
    assert decided.that_cannot_wait([units[1]], units, []) == [units[1]]
    units[0].told[0] = IN_RECORD.then_missed([(None, 0)] * 100)
    assert decided.that_cannot_wait([], [], [units[0]]) == [units[0]]
    assert [unit in decided for unit in units] == [False, False, True]


@pytest.mark.parametrize(
    "update", [IN_MEMORY, of_zeros(100), IN_RECORD._replace(recipe=MUON)], ids=["memory", "many", "matrix"]
)
def test_what_may_not_wait_is_applied_in_the_next_step_in_the_order_of_units(decided, units, update):
    for unit in reversed(units):
        unit.decide(decided, update)
    assert decided.that_cannot_wait([], [], []) == units
    assert decided.that_cannot_wait([], [], []) == []


def test_what_a_pass_has_taken_is_forgotten_and_so_is_what_is_known_elsewhere(decided, units):
    for unit in units:
        unit.decide(decided, of_zeros(2))
    units[0].told.clear()
    decided.leave(units[1:2])
    assert decided.that_cannot_wait(units[:1], [], []) == []
    assert [unit in decided for unit in units] == [False, False, True]


def test_slices_that_begin_to_miss_steps_without_an_update_of_the_last_step_are_looked_at(decided, units):
    units[0].told[0], units[1].told[0] = of_zeros(missed.MISSED_LIMIT), of_zeros(2)
    assert decided.that_cannot_wait([], units, []) == units[:1]


def test_units_that_are_expected_to_wait_are_not_looked_at_until_others_are_decided_for_them(decided, units):
    for unit in units:
        unit.told[0] = IN_RECORD
    decided.expect(units)
    units[2].decide(decided, IN_MEMORY)
    assert decided.that_cannot_wait([units[1]], units[:1], []) == units[1:]
    assert ([unit.looks for unit in units], units[0] in decided) == ([0, 1, 2], True)

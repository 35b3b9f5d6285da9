"""Which slices are asked for gradients. Trusted: torch. Faked: engines, which tell what they see; units."""

import pytest
import torch
from torch import nn

from infinity.autograd.slice_watch import SliceWatch


class FakeUnit:
    def __init__(self, *parameters):
        self.parameters, self.attached = parameters, True


@pytest.fixture
def slices():
    return [nn.Parameter(torch.zeros(2)) for _ in range(4)]


@pytest.fixture
def watch(slices):
    made = SliceWatch()
    made.follow(slices)
    return made


def test_slices_that_have_gradients_when_they_are_followed_are_found(slices):
    slices[2].grad = torch.ones(2)
    watch = SliceWatch()
    watch.follow(slices)
    assert [one is slices[2] for one in watch.with_gradients()] == [True]
    assert (len(watch), slices[0] in watch, nn.Parameter(torch.zeros(2)) in watch) == (4, True, False)


def test_slices_are_found_that_were_told_of_or_attached_until_their_gradient_is_gone(watch, slices):
    assert watch.with_gradients() == []
    unit = FakeUnit(slices[3])
    watch.attached(unit)
    for one in slices:
        one.grad = torch.ones(2)
    unit.attached = False
    watch.assigned(slices[1], "grad")
    for _ in range(2):
        assert set(map(id, watch.with_gradients())) == {id(slices[1]), id(slices[3])}
    slices[1].grad = None
    assert list(map(id, watch.with_gradients())) == [id(slices[3])]


def test_slices_that_stay_attached_are_asked_again_and_once_more_when_they_are_released(watch, slices):
    unit = FakeUnit(*slices[:2])
    assert not watch.any_attached
    watch.attached(unit)
    assert (watch.with_gradients(), watch.any_attached) == ([], True)
    slices[0].grad = torch.ones(2)
    assert list(map(id, watch.with_gradients())) == [id(slices[0])]
    slices[1].grad = torch.ones(2)
    unit.attached = False
    assert not watch.any_attached
    assert set(map(id, watch.with_gradients())) == set(map(id, slices[:2]))
    for one in slices[:3]:
        one.grad = None
    assert watch.with_gradients() == []
    slices[0].grad = torch.ones(2)
    assert watch.with_gradients() == [], "it is released, and its guard has not told"


def test_gradients_that_autograd_brings_are_found_of_units_that_were_used_and_of_others(watch, slices):
    used, other = FakeUnit(slices[0]), FakeUnit(slices[1])
    watch.attached(used)
    used.attached = other.attached = False
    for unit in (used, other):
        unit.parameters[0].grad = torch.ones(2)
        watch.gradient_came(unit.parameters[0])
    for _ in range(2):
        assert set(map(id, watch.with_gradients())) == {id(slices[0]), id(slices[1])}


def test_what_is_no_slice_is_not_kept(watch):
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    before = watch.freezes
    watch.assigned(other, "grad")
    watch.assigned(other, "requires_grad")
    assert (watch.with_gradients(), watch.freezes) == ([], before)


def test_a_slice_that_may_have_been_frozen_or_was_attached_and_is_frozen_is_counted(watch, slices):
    def seen():
        watch.attached(unit)
        watch.with_gradients()
        return watch.freezes

    unit = FakeUnit(*slices)
    counts = [watch.freezes, seen()]
    watch.assigned(slices[0], "requires_grad")
    counts.append(watch.freezes)
    slices[0].requires_grad = False
    counts.append(seen())
    assert counts[0] == counts[1] < counts[2] < counts[3]

"""Which slices are asked for gradients. Trusted: torch. Faked: engines, which tell what they see; units."""

import numpy as np
import pytest
import torch
from torch import nn

from infinity.autograd.slice_watch import SliceWatch


class FakeUnit:
    """A unit of slices by their numbers; -1 for a parameter that is none. It does what a unit does."""

    def __init__(self, watch, slices, *numbers):
        self.watch, self.slice_numbers, self.attached = watch, numbers, False
        self.parameters = [slices[one] if one >= 0 else nn.Parameter(torch.zeros(2)) for one in numbers]

    def attach(self):
        self.attached = True
        self.watch.attached.add(self)

    def release(self):
        self.attached = False
        self.watch.attached.discard(self)
        self.watch.look(self)


@pytest.fixture
def slices():
    return [nn.Parameter(torch.zeros(2)) for _ in range(4)]


@pytest.fixture
def watch(slices):
    made = SliceWatch()
    made.follow(slices)
    return made


def give(*some):
    for one in some:
        one.grad = torch.ones(2)


def test_slices_that_have_gradients_when_they_are_followed_are_found(slices):
    give(slices[2])
    watch = SliceWatch()
    watch.follow(slices)
    other = nn.Parameter(torch.zeros(2))
    assert watch.with_gradients().tolist() == [2]
    assert (len(watch), slices[0] in watch, other in watch) == (4, True, False)
    assert [watch.number(one) for one in (*slices, other)] == [0, 1, 2, 3, -1]
    assert all(one is other for one, other in zip(watch.slices([3, 0]), (slices[3], slices[0]), strict=True))


def test_slices_that_are_followed_twice_keep_their_numbers(watch, slices):
    other = nn.Parameter(torch.zeros(2))
    watch.follow([slices[1], other])
    assert (len(watch), watch.number(slices[1]), watch.number(other)) == (5, 1, 4)


def test_slices_are_found_that_were_told_of_or_assigned_to_while_attached_until_their_gradient_is_gone(
    watch, slices
):
    assert watch.with_gradients().tolist() == []
    unit = FakeUnit(watch, slices, 3)
    unit.attach()
    give(*slices)
    unit.release()
    watch.assigned(slices[1], "grad")
    for _ in range(2):
        assert watch.with_gradients().tolist() == [1, 3]
    slices[1].grad = None
    assert watch.with_gradients().tolist() == [3]


def test_slices_that_stay_attached_are_asked_again_and_once_more_when_they_are_released(watch, slices):
    unit = FakeUnit(watch, slices, 0, -1, 1)
    assert not watch.any_attached
    unit.attach()
    assert (watch.with_gradients().tolist(), watch.any_attached) == ([], True)
    give(slices[0], unit.parameters[1])
    assert watch.with_gradients().tolist() == [0]
    give(slices[1])
    unit.release()
    assert not watch.any_attached
    assert watch.with_gradients().tolist() == [0, 1]
    for one in slices[:3]:
        one.grad = None
    assert watch.with_gradients().tolist() == []
    give(slices[0])
    assert watch.with_gradients().tolist() == [], "it is released, and its guard has not told"


def test_a_unit_whose_release_was_interrupted_is_asked_all_the_same(watch, slices):
    watch.with_gradients()
    unit = FakeUnit(watch, slices, 2)
    unit.attach()
    give(slices[2])
    unit.attached = False
    assert not watch.any_attached
    for _ in range(2):
        assert watch.with_gradients().tolist() == [2]


def test_gradients_that_autograd_brings_are_found_once_each_of_units_that_were_used_and_of_others(
    watch, slices
):
    watch.with_gradients()
    used = FakeUnit(watch, slices, 0)
    used.attach()
    give(*slices[:2])
    for _ in range(2):
        watch.gradient_came(0)
        watch.gradient_came(1)
    used.release()
    for _ in range(2):
        assert watch.with_gradients().tolist() == [0, 1]


def test_slices_whose_gradients_were_dropped_are_asked_no_more(watch, slices):
    assert watch.may_have().tolist() == [0, 1, 2, 3], "nobody has asked so far"
    give(*slices)
    assert watch.with_gradients().tolist() == [0, 1, 2, 3]
    for one in slices[:3]:
        one.grad = None
    watch.dropped(np.array([0, 2]))
    found = watch.may_have(), watch.with_gradients(), watch.may_have()
    assert [one.tolist() for one in found] == [[1, 3], [3], [3]]


def test_what_is_no_slice_is_not_kept(watch):
    other = nn.Parameter(torch.zeros(2))
    give(other)
    watch.with_gradients()
    before = watch.freezes
    watch.assigned(other, "grad")
    watch.assigned(other, "requires_grad")
    assert (watch.may_have().tolist(), watch.freezes) == ([], before)


def test_a_slice_that_may_have_been_frozen_or_was_attached_and_is_frozen_is_counted(watch, slices):
    def seen():
        unit.attach()
        unit.release()
        return watch.freezes

    unit = FakeUnit(watch, slices, *range(4))
    counts = [watch.freezes, seen()]
    watch.assigned(slices[0], "requires_grad")
    counts.append(watch.freezes)
    slices[0].requires_grad = False
    counts.append(seen())
    assert counts[0] == counts[1] < counts[2] < counts[3]
    unit.attach()
    watch.with_gradients()
    assert watch.freezes > counts[3], "it is attached"


def test_gradients_that_many_backwards_bring_without_a_step_are_noted_once(watch, slices):
    watch.with_gradients()
    give(slices[2])
    for _ in range(1000):
        watch.gradient_came(2)
        watch.note_once()
    assert len(watch._may_have) <= len(slices) + 1
    assert watch.with_gradients().tolist() == [2]

"""Which slices are asked for gradients. Trusted: torch. Faked: engines, which tell what they see."""

import pytest
import torch
from torch import nn

from infinity.autograd.slice_watch import SliceWatch


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


def test_slices_are_found_that_were_told_of_or_looked_at_until_their_gradient_is_gone(watch, slices):
    assert watch.with_gradients() == []
    for one in slices:
        one.grad = torch.ones(2)
    watch.assigned(slices[1], "grad")
    watch.released(slices[3:])
    for _ in range(2):
        assert set(map(id, watch.with_gradients())) == {id(slices[1]), id(slices[3])}
    slices[1].grad = None
    assert list(map(id, watch.with_gradients())) == [id(slices[3])]


def test_what_is_no_slice_is_not_kept(watch):
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    before = watch.freezes
    watch.assigned(other, "grad")
    watch.assigned(other, "requires_grad")
    assert (watch.with_gradients(), watch.freezes) == ([], before)


def test_a_slice_that_may_have_been_frozen_or_is_released_frozen_is_counted(watch, slices):
    seen = [watch.freezes]
    watch.released(slices)
    seen.append(watch.freezes)
    watch.assigned(slices[0], "requires_grad")
    seen.append(watch.freezes)
    slices[0].requires_grad = False
    watch.released(slices)
    seen.append(watch.freezes)
    assert seen[0] == seen[1] < seen[2] < seen[3]

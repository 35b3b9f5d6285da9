"""Copies of weights that were put together: read as any tensor, and never changed. Trusted: torch."""

import pytest
import torch

from infinity.tiling.joined import ReadOnlyCopy


@pytest.fixture
def copy():
    return ReadOnlyCopy.of(torch.arange(12.0).view(3, 4), lambda name: KeyError(f"{name} is refused"))


CHANGES = {
    "mul_": lambda one: one.mul_(2),
    "a slice": lambda one: one[1:].zero_(),
    "a row's view": lambda one: one[1].view(2, 2)[0].add_(1),
    "an item": lambda one: one.__setitem__(0, 1.0),
    "through data": lambda one: one.data[0].fill_(1),
    "a part of unbind": lambda one: one.unbind()[2].neg_(),
    "as out": lambda one: torch.add(one, 1, out=one[:]),
    "in a list": lambda one: torch._foreach_mul_([one[0]], 2),
    "nn.init": lambda one: torch.nn.init.ones_(one[0]),
    "in place": lambda one: one.__imul__(2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_no_change_of_it_or_of_a_view_is_made(copy, change):
    with pytest.raises(KeyError, match="is refused"):
        change(copy)
    assert copy.tolist() == torch.arange(12.0).view(3, 4).tolist()


def test_its_numpy_array_cannot_be_written_to(copy):
    with pytest.raises(ValueError, match="read-only"):
        copy.numpy()[0] = 1


def test_what_is_computed_with_it_is_plain_and_gradients_come_through():
    weight = torch.ones(3, 4, requires_grad=True)
    copy = ReadOnlyCopy.of(torch.cat([weight]), KeyError)
    product = copy[1:] * 2
    assert type(product) is torch.Tensor
    product.mul_(3).sum().backward()
    assert weight.grad.tolist() == [[0.0] * 4, [6.0] * 4, [6.0] * 4]
    assert torch.zeros(3, 4).copy_(copy.detach()).sum() == 12

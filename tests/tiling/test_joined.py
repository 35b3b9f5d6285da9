"""Copies of weights that were put together: read as any tensor, and never changed. Trusted: torch."""

import copy as copying
import pickle

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


def test_a_change_that_no_name_tells_of_is_refused_when_it_was_made(copy):
    with pytest.raises(KeyError, match="is refused"):
        torch.nn.functional.relu(copy[1:], inplace=True)


READS = {
    "int": lambda one: int(one[1, 2]),
    "a loop": lambda one: [float(row.sum()) for row in one],
    "deepcopy": lambda one: copying.deepcopy(one).mul_(2).tolist(),
    "torch.func": lambda one: torch.func.grad(lambda x: (x * one).sum())(torch.ones(3, 4)).tolist(),
    "pickle": lambda one: len(pickle.dumps(one)) > 0,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_reads_it_has_what_it_has_of_any_tensor(copy, read):
    assert read(copy) == read(torch.arange(12.0).view(3, 4))


def test_what_returns_its_own_tensor_does(copy):
    own = copy.detach()
    assert own.requires_grad_() is own
    assert own.is_leaf


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

"""What a backward makes beside what was kept, by autograd's graph. Trusted: arithmetic on small graphs, and
the operations of a real backward, counted."""

import pytest
import torch
from torch import nn

from allocations import Allocations
from infinity.activations.measured import Storages, backward_nbytes, largest_nbytes

NBYTES = 4 * 1000


def made(x, *operations):
    for operation in operations:
        x = operation(x)
    return x


def entry():
    """A tensor that a model's earlier part made, and the node that ends the walk."""
    x = torch.randn(1000, requires_grad=True) * 1
    return x, {x.grad_fn}


def test_a_chain_of_operations_has_two_gradients_at_a_time():
    x, ends = entry()
    y = made(x, torch.tanh, torch.sigmoid, torch.exp, torch.tanh)
    assert backward_nbytes([y], ends) == 2 * NBYTES


def test_a_view_makes_no_gradient_of_its_own():
    x, ends = entry()
    y = x.view(10, 100).t().unsqueeze(0)
    assert backward_nbytes([y], ends) == NBYTES


def test_a_residual_keeps_the_gradient_that_waits_for_its_other_branch():
    x, ends = entry()
    y = x + torch.tanh(torch.sigmoid(torch.exp(x)))
    assert backward_nbytes([y], ends) == 3 * NBYTES


def test_gradients_of_weights_are_not_counted():
    x, ends = entry()
    weight = nn.Parameter(torch.randn(1000, 50_000))
    y = (x[None] @ weight).sum(-1)
    large = 4 * 50_000
    assert backward_nbytes([y], ends) < 2 * large + 2 * NBYTES


def test_an_output_that_is_the_input_has_its_gradient_alone():
    x, ends = entry()
    assert backward_nbytes([x], ends) == NBYTES
    assert backward_nbytes([torch.randn(10)], set()) == 0


@pytest.mark.parametrize("layers", [1, 3])
def test_a_real_backward_makes_no_more(layers):
    torch.manual_seed(0)
    parts = [[nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)] for _ in range(layers)]
    block = nn.Sequential(*(one for part in parts for one in part))
    x = (torch.randn(512, 32, requires_grad=True) * 1).detach().requires_grad_()
    start = x * 1
    y = start + block(start)
    counted = backward_nbytes([y], {start.grad_fn})
    gradient = torch.ones_like(y)
    weights = sum(one.nbytes for one in block.parameters())
    with Allocations() as memory:
        torch.autograd.grad([y], [start, *block.parameters()], [gradient])
    assert memory.peak_nbytes <= counted + weights
    assert counted <= 3 * (memory.peak_nbytes + gradient.nbytes)


def test_the_largest_result_is_one_of_a_shape_in_between():
    x, ends = entry()
    y = (x[:, None] * torch.ones(7)).sum(-1)
    assert largest_nbytes([y], ends) == 7 * NBYTES


def test_a_storage_counts_once_while_it_lives_and_its_number_is_no_others():
    storages = Storages()
    x = torch.zeros(100)
    assert storages.add(x) == 400
    assert storages.add(x[:10]) == 0
    for _ in range(5):
        del x
        x = torch.zeros(100)
        assert storages.add(x) == 400
    assert storages.add(torch.zeros(3, 3).to_sparse()) == 0

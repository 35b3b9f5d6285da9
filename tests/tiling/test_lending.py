"""Results of pointwise operations in memory of earlier ones. Trusted: the same operations without."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from covers import matrix
from infinity import tiling
from infinity.tiling import mapped
from infinity.tiling.lending import Lending

pytestmark = pytest.mark.usefixtures("repeatable")
ROWS, COLUMNS = 512, 1024  # 1 MiB in 16 bits

OPERATIONS = {
    "an activation": lambda x, y: F.silu(x),
    "one with an option": lambda x, y: F.gelu(x, approximate="tanh"),
    "a product": lambda x, y: x * y,
    "a number": lambda x, y: 2.5 * x + 1,
    "a sum with a factor": lambda x, y: torch.add(x, y, alpha=3),
    "a row": lambda x, y: x * y[0],
    "a column made a matrix": lambda x, y: x[:, :1] * y,
    "a matrix that is turned": lambda x, y: x.t() * y.t(),
    "another dtype": lambda x, y: x * y.double(),
    "a comparison": lambda x, y: x < y,
    "a choice": lambda x, y: torch.where(x < y, x, y),
    "integers": lambda x, y: x.int() * 2.5,
    "in place": lambda x, y: (x + 1).mul_(y),
    "no pointwise one": lambda x, y: F.softmax(x, -1),
    "one argument twice": lambda x, y: x * x,
}


def with_gradients(operation, *inputs):
    inputs = [one.detach().requires_grad_() for one in inputs]
    found = operation(*inputs)
    if not found.requires_grad:
        return [found]
    upstream = torch.linspace(-1, 1, found.numel()).to(found.dtype).view(found.shape)
    return [found.detach(), *torch.autograd.grad(found, inputs, upstream, allow_unused=True)]


@pytest.mark.parametrize(
    *matrix(name=list(OPERATIONS), dtype=[torch.bfloat16, torch.float16, torch.float32], rows=[ROWS, 3])
)
def test_lent_memory_changes_no_bits_dtype_or_order(name, dtype, rows):
    inputs = [torch.randn(rows, COLUMNS).to(dtype) for _ in range(2)]
    expected = with_gradients(OPERATIONS[name], *inputs)
    pool = mapped.BufferPool()
    with Lending(pool):
        for _ in range(2):  # the second time in memory of the first
            found = with_gradients(OPERATIONS[name], *inputs)
            for one, other in zip(found, expected, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    assert (one.dtype, one.stride()) == (other.dtype, other.stride())
                    assert torch.equal(one, other)
            del found, one


def test_large_results_lie_where_earlier_ones_were():
    x = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
    kept = []
    with Lending(mapped.BufferPool()):
        places = {F.silu(x).data_ptr() for _ in range(5)}
        kept = [F.silu(x) for _ in range(3)]
    assert len(places) == 1
    assert len({one.data_ptr() for one in kept}) == 3
    assert all(torch.equal(one, F.silu(x)) for one in kept)


class Watched(nn.Module):
    """An MLP that tells where its activations and their gradients lie."""

    def __init__(self, features, dtype):
        super().__init__()
        self.up, self.gate = (nn.Linear(features, 4 * features, False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(4 * features, features, False, dtype=dtype)
        self.places = []

    def forward(self, x):
        gate, up = self.gate(x), self.up(x)
        active = F.silu(gate)
        product = active * up
        self.places += [one.data_ptr() for one in (gate, up, active, product)]
        if product.requires_grad:
            for one in (gate, up, active, product):
                one.register_hook(lambda grad: self.places.append(grad.data_ptr()))
        return self.down(product)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slices_take_the_memory_of_those_before(dtype):
    mlp = Watched(256, dtype)
    tiling.tile_sequence(mlp, 8)
    x = torch.randn(1, 8 * ROWS, 256, dtype=dtype, requires_grad=True)
    y = mlp(x)
    forward, mlp.places = mlp.places, []
    assert (len(forward), len(set(forward))) == (4 * 8, 4)
    y.backward(torch.ones_like(y))
    assert len(mlp.places) == 8 * 8
    assert len(set(mlp.places)) <= 8, "of one slice there are eight"

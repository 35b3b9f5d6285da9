"""Products of 16-bit tensors in fp32, and linear layers that add theirs to sums. Trusted: fp64."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from infinity import kernels
from infinity.tiling import TiledLinear, products, tile_sequence
from infinity.tiling.products import add_product, product

SIDES = st.integers(0, 40)


@pytest.fixture(autouse=True)
def _in_small_pieces(monkeypatch):
    monkeypatch.setattr(products, "_multiplies_16_bit", lambda: False)
    monkeypatch.setattr(products, "WIDENED_NBYTES", 1)
    monkeypatch.setattr(products, "FEWEST_ROWS", 7)


@given(m=SIDES, k=SIDES, n=SIDES, dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_products_are_fp64s_rounded_once_whatever_side_is_the_longest(m, k, n, dtype):
    left, right = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype).t()
    exact = left.double() @ right.double()
    slack = 1e-4  # of sums in fp32
    rounding = torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0
    found = product(left, right)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().le(exact.abs() * rounding * 1.01 + slack).all()
    total = torch.ones(m, n)
    add_product(total, left, right)
    assert (total.double() - exact - 1).abs().le(slack).all()


@pytest.mark.skipif(not kernels.multiplies_bf16(), reason="this machine has no AVX512-BF16")
@pytest.mark.parametrize(("m", "n", "products_of_torchs"), [(16, 24, 0), (6, 24, 1), (16, 6, 3)])
def test_where_the_cpu_multiplies_bf16_large_products_are_added_where_the_sums_are(
    m, n, products_of_torchs, monkeypatch
):
    monkeypatch.setattr(products, "_multiplies_16_bit", lambda: True)
    monkeypatch.setattr(products, "_has_amx", lambda: False)  # torch is left everything where it has
    left, right, total = torch.randn(40, m).bfloat16().t(), torch.randn(40, n).bfloat16(), torch.ones(m, n)
    with Counted() as counted:
        add_product(total, left, right)
    assert counted.products == products_of_torchs
    rounding = 0.2 if products_of_torchs else 1e-4  # of products in 16 bits, or of sums in fp32
    assert (total - 1 - left.double() @ right.double()).abs().max() < rounding


@pytest.mark.skipif(not kernels.multiplies_bf16(), reason="this machine has no AVX512-BF16")
@pytest.mark.parametrize(
    ("k", "turned", "products_of_torchs"), [(40, True, 0), (40, False, 1), (513, True, 1)]
)
def test_there_gradients_of_weights_of_few_tokens_are_products_of_ours(
    k, turned, products_of_torchs, monkeypatch
):
    monkeypatch.setattr(products, "_multiplies_16_bit", lambda: True)
    monkeypatch.setattr(products, "_has_amx", lambda: False)  # torch is left everything where it has
    left, right = torch.randn(k, 24).bfloat16(), torch.randn(k, 32).bfloat16()
    left = left.t() if turned else left.t().contiguous()
    with Counted() as counted:
        found = product(left, right)
    assert counted.products == products_of_torchs
    exact = left.double() @ right.double()
    assert ((found - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()


def test_where_torch_has_a_matrix_unit_it_makes_every_product(monkeypatch):
    monkeypatch.setattr(products, "_multiplies_16_bit", lambda: True)
    monkeypatch.setattr(products, "_has_amx", lambda: True)
    left, right, total = (
        torch.randn(40, 16).bfloat16().t(),
        torch.randn(40, 24).bfloat16(),
        torch.ones(16, 24),
    )
    with Counted() as counted:
        product(left, right)
        add_product(total, left, right)
    assert counted.products == 1 + 3  # FEWEST_ROWS rows at a time


@pytest.mark.parametrize("bias", [True, False])
def test_a_slices_weight_gradients_are_rounded_once_over_all_slices(bias):
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 24, bias), nn.Linear(24, 8, bias)).bfloat16()
    with torch.no_grad():
        mlp[0].weight.copy_(torch.eye(24, 8))  # exact: what the second layer gets is not rounded
        if bias:
            mlp[0].bias.zero_()
    exact = copy.deepcopy(mlp).double()
    x, upstream = (torch.randn(64, 8).bfloat16() for _ in range(2))
    exact(x.double()).backward(upstream.double())
    tile_sequence(mlp, 32)(x).backward(upstream)
    found, expected = mlp[1].weight.grad.double(), exact[1].weight.grad
    assert ((found - expected).abs() <= expected.abs() * 2**-8 * 1.01 + 1e-5).all()


def test_a_weight_used_in_a_linear_layer_and_elsewhere_gets_both_gradients():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6, False)

        def forward(self, x):
            return self.linear(x) + x @ self.linear.weight + nn.functional.linear(x, self.linear.weight)

    torch.manual_seed(0)
    one, x = Both(), torch.randn(9, 6)
    plain = copy.deepcopy(one)
    plain(x).square().sum().backward()
    tile_sequence(one, 4)(x).square().sum().backward()
    torch.testing.assert_close(one.linear.weight.grad, plain.linear.weight.grad)


def test_what_a_backward_that_failed_has_sent_is_not_in_the_next_ones_sum():
    layer = TiledLinear(4, 8, False, dtype=torch.bfloat16, out_tiles=2)
    x = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
    failing = [True]

    def fail(grad):
        if failing[0]:
            raise RuntimeError("a full disk")
        return grad

    layer.tiles[0].weight.register_hook(fail)
    y = layer(x)
    with pytest.raises(RuntimeError, match="full disk"):
        y.backward(torch.ones_like(y), retain_graph=True)
    failing[0] = False
    y.backward(torch.ones_like(y))
    whole = torch.cat([tile.weight.detach() for tile in layer.tiles]).double()
    torch.testing.assert_close(x.grad.double(), whole.sum(0).expand(3, 4), rtol=2**-8, atol=1e-4)


def test_16_bit_tiles_have_gradients_of_gradients_too():
    layer = TiledLinear(4, 8, False, dtype=torch.bfloat16, out_tiles=2)
    x = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.cat([tile.weight.detach() for tile in layer.tiles]).double()
    plain = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for y, of in ((layer(x), x), (plain @ weight.t(), plain)):
        (first,) = torch.autograd.grad(y.square().sum(), of, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), of)[0].double())
    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=0.05)


# What is computed again


class Counted(TorchDispatchMode):
    """Counts matrix products inside the `with`."""

    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += "mm" in func.__name__
        return func(*args, **(kwargs or {}))


class Ending(nn.Module):
    """Two linear layers, and what becomes of the second's result."""

    def __init__(self, end=lambda y: y):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down, self.end = nn.Linear(6, 8), nn.Linear(8, 6), end

    def forward(self, x):
        return self.end(self.down(self.up(x).sigmoid()))


def in_slices(module, tiles):
    """Run a module in slices, forward and backward; returns its products, results and gradients."""
    x = torch.arange(60.0).sin().view(10, 6).requires_grad_()
    if tiles:
        tile_sequence(module, tiles)
    with Counted() as counted:
        found = module(x)
        found = found if isinstance(found, tuple) else (found,)
        sum(one.cos().sum() for one in found).backward()
    return counted.products, [*found, x.grad, *(one.grad for one in module.parameters())]


def test_a_last_linear_layers_result_is_not_computed_again():
    products, found = in_slices(Ending(), 2)
    assert products == 2 * (2 + 1 + 4)  # per slice: forward, again but for the last, backward
    for ours, plain in zip(found, in_slices(Ending(), 0)[1], strict=True):
        torch.testing.assert_close(ours, plain)


def test_to_ask_about_it_is_not_to_read_it_and_hooks_may_do_so_the_second_time_alone():
    def end(y):
        if torch.is_grad_enabled():
            assert y.requires_grad
            assert y.grad_fn is not None
            y.register_hook(lambda grad: grad * 2)
        return y if y.shape == (5, 6) else None

    products, found = in_slices(Ending(end), 2)
    assert products == 2 * (2 + 1 + 4)
    _, plain = in_slices(Ending(), 2)
    torch.testing.assert_close([one * 2 for one in plain[1:]], found[1:])


@pytest.mark.parametrize(
    "end",
    [
        lambda y: y * y,
        lambda y: (y, y.square()),
        lambda y: (y.exp_(), y)[1],
        lambda y: torch.stack([y, y.exp()], -1).prod(-1),
        lambda y: y.view(-1).view(y.shape),
    ],
    ids=["product", "two results", "in place", "in a list", "a view"],
)
def test_where_a_function_reads_it_it_is(end):
    products, found = in_slices(Ending(end), 2)
    assert products == 2 * (2 + 2 + 4)
    for ours, plain in zip(found, in_slices(Ending(end), 0)[1], strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_module_that_reads_it_only_when_computed_again_is_refused():
    calls = []

    def end(y):
        calls.append(None)
        return y if len(calls) == 1 else y * 2

    with pytest.raises(RuntimeError, match=r"mul reads the result of linear layer 1 .* not in its forward"):
        in_slices(Ending(end), 1)

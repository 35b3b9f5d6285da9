"""Peaks of memory, counted operation by operation. Trusted: allocations.py, which the first test checks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from allocations import Allocations
from infinity.tiling import TiledLinear, cross_entropy, products, tile_sequence

pytestmark = pytest.mark.usefixtures("repeatable")


def peak(work):
    with Allocations() as counted:
        work()
    return counted.peak_nbytes


def test_the_count_sees_storages_come_and_go():
    with Allocations() as counted:
        one = torch.zeros(1000)
        view = one[10:]
        two = view + 1
        assert counted.live_nbytes == 4000 + 3960
        del one, view
        assert counted.live_nbytes == 3960
        del two
    assert (counted.live_nbytes, counted.peak_nbytes) == (0, 7960)


@pytest.mark.parametrize(
    "form",
    [
        "fp32",
        "bf16 in tiles",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("bf16", "fp32 in tiles")),
    ],
)
def test_a_loss_takes_a_sixteenth_of_the_logits_beyond_its_gradients(form):
    tokens, classes, features = 4096, 4096, 32
    dtype = torch.bfloat16 if "bf16" in form else torch.float32
    hidden = torch.randn(tokens, features, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, features, dtype=dtype).mul_(0.1).requires_grad_()
    head = weight
    if "tiles" in form:
        head = TiledLinear(features, classes, False, dtype=dtype, out_tiles=8)
    labels = torch.randint(classes, (tokens,))
    ours = peak(lambda: cross_entropy(hidden, head, labels).backward())
    results = hidden.nbytes + weight.nbytes
    logits = tokens * classes * 4
    assert ours - results <= logits / 16
    # The plain loss holds logits, their log-softmax and its gradient.
    hidden.grad = weight.grad = None
    plain = peak(lambda: F.cross_entropy(F.linear(hidden, weight).float(), labels).backward())
    assert plain > 2 * logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiled_layer_holds_one_tiles_gradient_and_one_output(dtype, monkeypatch):
    monkeypatch.setattr(products, "WIDENED_NBYTES", 1)
    monkeypatch.setattr(products, "FEWEST_ROWS", 16)
    tokens, inputs, outputs, tiles = 64, 512, 4096, 16
    layer = TiledLinear(inputs, outputs, False, dtype=dtype, out_tiles=tiles)
    for tile in layer.tiles:
        tile.weight.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    x = torch.randn(tokens, inputs, dtype=dtype, requires_grad=True)
    y_nbytes, x_nbytes = tokens * outputs * x.element_size(), x.nbytes
    upstream = torch.randn(tokens, outputs, dtype=dtype)
    assert peak(lambda: layer(x)) <= y_nbytes * (1 + 1 / tiles) + 16
    weight_nbytes = inputs * outputs * x.element_size()
    # In backward: one tile's weight gradient; the input's, of one tile, summed (fp32), and in its dtype.
    most = y_nbytes * (1 + 1 / tiles) + weight_nbytes / tiles + 3 * tokens * inputs * 4 + x_nbytes
    assert peak(lambda: layer(x).backward(upstream)) <= most
    assert most < weight_nbytes / 2


def test_an_mlp_in_slices_holds_one_slices_activations():
    features, hidden, tokens, tiles = 32, 1024, 2048, 16
    mlp = nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features))
    x = torch.randn(1, tokens, features, requires_grad=True)
    inner = tokens * hidden * 4
    plain = peak(lambda: mlp(x).sum().backward())
    mlp.zero_grad()
    x.grad = None
    sliced = peak(lambda: tile_sequence(mlp, tiles)(x).sum().backward())
    parameters = sum(one.nbytes for one in mlp.parameters())
    assert plain > 2 * inner
    assert sliced <= 4 * inner / tiles + 2 * parameters + 5 * x.nbytes


def test_a_slices_gradients_go_one_by_one_and_one_slice_needs_no_sums():
    width, layers = 256, 8
    stack = nn.Sequential(*(nn.Linear(width, width, False) for _ in range(layers))).bfloat16()
    weight_nbytes = 2 * width * width
    x = torch.randn(1, 8, width).bfloat16().requires_grad_()
    few = peak(lambda: tile_sequence(stack, 4)(x).sum().backward())
    assert few < (2 * layers + 3) * weight_nbytes
    stack.zero_grad()
    one = peak(lambda: tile_sequence(stack, 1)(x).sum().backward())
    assert layers * weight_nbytes <= one < (layers + 3) * weight_nbytes

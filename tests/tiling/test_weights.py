"""TiledLinear, TiledEmbedding and TiledConv1D. Trusted: torch's own layers, in fp64 as the reference of
gradients.

Where a sum is cut, the bound is that of its rounding: terms * epsilon * the sum of magnitudes.
"""

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from infinity.tiling import Tile, TiledConv1D, TiledEmbedding, TiledLinear

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("repeatable")


def gradient(tiled, name):
    """The whole gradient, from those of the tiles."""
    with torch.no_grad():
        whole = torch.full(tuple(getattr(tiled, name).shape), float("nan"), dtype=getattr(tiled, name).dtype)
        owners = [tile for tile in tiled.tiles if getattr(tile, name) is not None]
        for tile, (rows, columns) in zip(owners, getattr(tiled, name).grid.slices(), strict=True):
            whole[(rows, columns) if name == "weight" else rows] = getattr(tile, name).grad
    return whole


def close(actual, exact, magnitude, terms, dtype):
    """Within the rounding of a sum of so many terms in fp32 or wider, and of its result, its parts and its
    inputs' products in `dtype`; of those below its normal numbers, in their steps.
    """
    narrow = torch.finfo(dtype)
    bound = (terms * torch.finfo(torch.promote_types(dtype, torch.float32)).eps + 4 * narrow.eps) * magnitude
    return bool(((actual.double() - exact).abs() <= bound + 4 * narrow.smallest_normal * narrow.eps).all())


@given(
    shape=st.sampled_from([(), (0,), (1,), (3, 5), (2, 0), (2, 3, 2)]),
    features=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    tiles=st.tuples(st.integers(1, 7), st.integers(1, 5)),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    contiguous=st.booleans(),
    number=st.integers(0, 99),
)
def test_results_and_gradients_are_those_of_the_whole_layer(
    shape, features, tiles, dtype, bias, contiguous, number
):
    torch.manual_seed(number)
    inputs, outputs = features
    tiled = TiledLinear(
        inputs, outputs, bias, dtype=dtype, out_tiles=min(tiles[0], outputs), in_tiles=min(tiles[1], inputs)
    )
    state = {name: value.double() for name, value in tiled.state_dict().items()}
    x = torch.randn(*shape, inputs, dtype=dtype)
    x = (x if contiguous else x.transpose(0, -1).contiguous().transpose(0, -1)).requires_grad_()
    upstream = torch.randn(*shape, outputs, dtype=dtype)

    y = tiled(x)
    y.backward(upstream)

    exact_x, weight = x.detach().double().reshape(-1, inputs), state["weight"]
    rows, up = exact_x.shape[0], upstream.double().reshape(-1, outputs)
    offset = state["bias"] if bias else torch.zeros(outputs, dtype=torch.float64)
    assert y.shape == (*shape, outputs)
    assert y.dtype == dtype
    magnitude = exact_x.abs() @ weight.abs().t() + offset.abs()
    assert close(y.reshape(-1, outputs), exact_x @ weight.t() + offset, magnitude, inputs, dtype)
    assert close(x.grad.reshape(-1, inputs), up @ weight, up.abs() @ weight.abs(), outputs, dtype)
    assert close(gradient(tiled, "weight"), up.t() @ exact_x, up.abs().t() @ exact_x.abs(), rows, dtype)
    if bias:
        assert close(gradient(tiled, "bias"), up.sum(0), up.abs().sum(0), rows, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tiles", [2, 4, 8])
def test_cuts_along_the_outputs_keep_every_bit_of_the_forward(dtype, tiles):
    whole = nn.Linear(192, 512, dtype=dtype)
    tiled = TiledLinear(192, 512, dtype=dtype, out_tiles=tiles)
    tiled.load_state_dict(whole.state_dict())
    x = torch.randn(7, 33, 192, dtype=dtype)
    cuts = zip(whole.weight.chunk(tiles), whole.bias.chunk(tiles), strict=True)
    assert torch.equal(tiled(x), torch.cat([F.linear(x, *one) for one in cuts], -1))
    if dtype != torch.float64:  # MKL's fp64 on AMD adds in another order when there are fewer outputs
        assert torch.equal(tiled(x), whole(x))


def test_more_tiles_do_not_make_16_bit_gradients_of_the_input_worse():
    whole = nn.Linear(64, 1024, dtype=torch.bfloat16)
    x = torch.randn(256, 64, dtype=torch.bfloat16)
    upstream = torch.randn(256, 1024, dtype=torch.bfloat16)
    exact = upstream.double() @ whole.weight.detach().double()
    errors = {}
    for tiles in (1, 64):
        tiled = TiledLinear(64, 1024, dtype=torch.bfloat16, out_tiles=tiles)
        tiled.load_state_dict(whole.state_dict())
        inputs = x.clone().requires_grad_()
        tiled(inputs).backward(upstream)
        errors[tiles] = float((inputs.grad.double() - exact).square().mean().sqrt())
    # Each tile's product is rounded, and then their sum: twice the variance; summed in 16 bits, ten times.
    assert errors[64] <= 1.6 * errors[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_tiles", "in_tiles"), [(1, 1), (3, 1), (3, 4), (1, 2)])
def test_a_linear_layer_draws_the_numbers_of_the_whole(dtype, out_tiles, in_tiles, seed):
    torch.manual_seed(seed)
    whole = nn.Linear(50, 70, dtype=dtype)
    torch.manual_seed(seed)
    tiled = TiledLinear(50, 70, dtype=dtype, out_tiles=out_tiles, in_tiles=in_tiles)
    assert torch.equal(tiled.state_dict()["weight"], whole.weight)
    assert torch.equal(tiled.state_dict()["bias"], whole.bias)


def test_an_embedding_draws_the_numbers_of_the_whole(seed):
    torch.manual_seed(seed)
    whole = nn.Embedding(1000, 37, padding_idx=-3)
    torch.manual_seed(seed)
    tiled = TiledEmbedding(1000, 37, padding_idx=-3, row_tiles=7)
    assert tiled.padding_idx == whole.padding_idx
    assert torch.equal(tiled.state_dict()["weight"], whole.weight)


@given(
    shape=st.sampled_from([(), (0,), (40,), (3, 5), (2, 0)]),
    rows=st.integers(1, 60),
    tiles=st.integers(1, 9),
    padding=st.none() | st.integers(-60, 59),
    by_frequency=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    number=st.integers(0, 99),
)
def test_an_embedding_and_its_gradient_are_those_of_the_whole_bit_for_bit(
    shape, rows, tiles, padding, by_frequency, dtype, number
):
    torch.manual_seed(number)
    padding = None if padding is None or not -rows <= padding < rows else padding
    whole = nn.Embedding(rows, 5, padding, scale_grad_by_freq=by_frequency, dtype=dtype)
    tiled = TiledEmbedding(
        rows, 5, padding, scale_grad_by_freq=by_frequency, dtype=dtype, row_tiles=min(tiles, rows)
    )
    tiled.load_state_dict(whole.state_dict())
    ids = torch.randint(rows, (*shape, 2))[..., 0]
    expected, actual = whole(ids), tiled(ids)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    actual.backward(upstream)
    assert torch.equal(actual, expected)
    assert torch.equal(gradient(tiled, "weight"), whole.weight.grad)


def test_an_id_outside_the_embedding_is_an_error():
    embedding = TiledEmbedding(20, 4, row_tiles=3)
    for wrong in (20, -1):
        with pytest.raises(IndexError, match="20 rows"):
            embedding(torch.tensor([3, wrong]))


def test_conv1d_computes_what_transformers_does(seed):
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(seed)
    whole = Conv1D(70, 50)
    for out_tiles, in_tiles in ((3, 1), (1, 3), (2, 2)):
        torch.manual_seed(seed)
        tiled = TiledConv1D(70, 50, out_tiles=out_tiles, in_tiles=in_tiles)
        assert torch.equal(tiled.state_dict()["weight"], whole.weight)
        x = torch.randn(4, 9, 50, requires_grad=True)
        whole.zero_grad()
        expected = torch.autograd.grad(whole(x).square().sum(), [x, whole.weight, whole.bias])
        (grad_x,) = torch.autograd.grad(tiled(x).square().sum(), [x], retain_graph=True)
        tiled(x).square().sum().backward()
        torch.testing.assert_close(grad_x, expected[0])
        torch.testing.assert_close(gradient(tiled, "weight"), expected[1])
        torch.testing.assert_close(gradient(tiled, "bias"), expected[2])


def test_whole_and_tiled_load_each_others_checkpoints():
    whole, tiled = (
        nn.Sequential(nn.Linear(20, 50)),
        nn.Sequential(TiledLinear(20, 50, out_tiles=3, in_tiles=2)),
    )
    assert list(tiled.state_dict()) == list(whole.state_dict())
    tiled.load_state_dict(whole.state_dict())
    other = nn.Sequential(nn.Linear(20, 50))
    other.load_state_dict(tiled.state_dict())
    assert torch.equal(other[0].weight, whole[0].weight)
    assert torch.equal(other[0].bias, whole[0].bias)
    assigned = nn.Sequential(TiledLinear(20, 50, out_tiles=3, in_tiles=2))
    assigned.load_state_dict(whole.state_dict(), assign=True)
    assert torch.equal(assigned[0].tiles[0].weight, tiled[0].tiles[0].weight)
    assert assigned[0].tiles[0].weight.untyped_storage().nbytes() < whole[0].weight.nbytes


def test_what_a_checkpoint_lacks_or_has_too_much_is_named_whole():
    tiled = nn.Sequential(TiledLinear(20, 50, out_tiles=3))
    state = tiled.state_dict()
    found = tiled.load_state_dict({"0.bias": state["0.bias"], "0.other": state["0.bias"]}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["0.weight"], ["0.other"])
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
        tiled.load_state_dict({**state, "0.weight": torch.zeros(50, 21)})


def test_a_copy_and_a_pickle_have_tiles_of_their_own():
    tiled = TiledLinear(20, 50, out_tiles=3)
    file = io.BytesIO()
    torch.save(tiled, file)
    file.seek(0)
    for other in (copy.deepcopy(tiled), torch.load(file, weights_only=False)):
        nn.init.zeros_(other.weight)
        assert not other.state_dict()["weight"].any()
        assert tiled.state_dict()["weight"].all()


def test_conversions_reach_the_tiles_and_show():
    tiled = TiledLinear(20, 50, out_tiles=3).to(torch.bfloat16)
    assert tiled.weight.dtype == tiled.bias.dtype == torch.bfloat16
    assert tiled(torch.randn(2, 20, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="cast one"):
        tiled(torch.randn(2, 20))
    with torch.autocast("cpu", torch.bfloat16):
        assert tiled.float()(torch.randn(2, 20)).dtype == torch.bfloat16


def test_backward_after_a_change_of_the_weights_is_an_error():
    tiled = TiledLinear(20, 50, out_tiles=3)
    y = tiled(torch.randn(2, 20, requires_grad=True)).sum()
    with torch.no_grad():
        tiled.tiles[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()


def test_second_derivatives_are_those_of_the_whole():
    whole, tiled = nn.Linear(6, 40).double(), TiledLinear(6, 40, out_tiles=2, in_tiles=2).double()
    tiled.load_state_dict(whole.state_dict())
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    found = []
    for layer in (whole, tiled):
        (first,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(found[1], found[0])


def test_one_tile_is_used_at_a_time_and_its_gradient_comes_at_once():
    """What an engine relies on: tile after tile in forward; in backward, each tile's gradient accumulates
    before the next tile begins.
    """
    tiled = TiledLinear(20, 64, out_tiles=4)
    events = []
    for number, tile in enumerate(tiled.tiles):
        assert isinstance(tile, Tile)
        tile.register_forward_hook(lambda *_, number=number: events.append(f"forward {number}"))
        tile.register_full_backward_pre_hook(lambda *_, number=number: events.append(f"backward {number}"))
        tile.weight.register_post_accumulate_grad_hook(
            lambda _, number=number: events.append(f"grad {number}")
        )
    tiled(torch.randn(2, 20, requires_grad=True)).sum().backward()
    forward = [f"forward {number}" for number in range(4)]
    backward = [event for number in (3, 2, 1, 0) for event in (f"backward {number}", f"grad {number}")]
    assert events == forward + backward


def test_nothing_that_a_tile_saves_shares_memory_with_its_weight():
    tiled = TiledLinear(20, 64, out_tiles=4, in_tiles=2)
    weights = {tile.weight.untyped_storage()._cdata for tile in tiled.tiles}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        x = torch.randn(8, 20, requires_grad=True)
        tiled(x)
    assert saved
    assert not weights & {one.untyped_storage()._cdata for one in saved}
    assert {one.untyped_storage()._cdata for one in saved} == {x.untyped_storage()._cdata}


@pytest.mark.parametrize("reentrant", [True, False])
def test_tiles_work_under_checkpoints(reentrant):
    from torch.utils.checkpoint import checkpoint

    tiled = TiledLinear(20, 64, out_tiles=4, in_tiles=2)
    x = torch.randn(8, 20, requires_grad=True)
    tiled(x).square().sum().backward()
    expected = gradient(tiled, "weight")
    tiled.zero_grad()
    checkpoint(tiled, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(gradient(tiled, "weight"), expected)


def test_frozen_tiles_pass_gradients_on():
    tiled = TiledLinear(20, 64, out_tiles=4)
    tiled.weight.requires_grad = False
    assert not any(tile.weight.requires_grad for tile in tiled.tiles)
    x = torch.randn(8, 20, requires_grad=True)
    tiled(x).sum().backward()
    torch.testing.assert_close(x.grad, tiled.state_dict()["weight"].sum(0).expand(8, 20))
    assert tiled.tiles[0].weight.grad is None
    assert F.linear(x, tiled.state_dict()["weight"]).requires_grad

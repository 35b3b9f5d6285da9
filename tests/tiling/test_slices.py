"""Modules over slices of the sequence and of the batch. Trusted: the module unsliced, and accumulated
gradients."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infinity.tiling import TiledMLP, runs_in_slices, tile_batch, tile_sequence, untile_
from models import MODELS, batch

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("repeatable")


def blocks(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def count_gradients(model):
    counts = {}
    for name, one in model.named_parameters():
        one.register_post_accumulate_grad_hook(
            lambda _, name=name: counts.__setitem__(name, counts.get(name, 0) + 1)
        )
    return counts


def assert_gradients(actual, expected):
    for (name, one), other in zip(actual.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("tiles", [1, 3, 40])
def test_mlps_in_slices_give_the_models_loss_and_gradients_each_once(name, tiles, seed):
    model = MODELS[name]()
    sliced = copy.deepcopy(model)
    for block in blocks(sliced):
        tile_sequence(block.mlp, tiles)
    counts = count_gradients(sliced)
    ids = batch(1)
    options = (
        {"output_router_logits": True} if name == "mixtral" else {}
    )  # their loss needs the routers' gradient
    losses = [one(ids, labels=ids, **options).loss for one in (model, sliced)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    assert_gradients(sliced, model)
    assert set(counts.values()) == {1}
    assert list(sliced.state_dict()) == list(model.state_dict())


@given(
    shape=st.sampled_from([(2, 7), (1, 1), (7,), (3, 0), (0, 5), (2, 3, 6)]),
    tiles=st.integers(1, 9),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    contiguous=st.booleans(),
    number=st.integers(0, 99),
)
def test_slices_give_fp64_gradients_within_rounding(shape, tiles, dtype, contiguous, number):
    torch.manual_seed(number)
    mlp = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)).to(dtype)
    exact = copy.deepcopy(mlp).double()
    x = torch.randn(*shape, 6, dtype=dtype)
    x = (x if contiguous else x.transpose(0, -1).contiguous().transpose(0, -1)).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    upstream = torch.randn(*shape, 6, dtype=dtype)
    y = tile_sequence(mlp, tiles)(x)
    y.backward(upstream)
    exact_y = exact(exact_x)
    exact_y.backward(upstream.double())
    tolerance = 200 * torch.finfo(dtype).eps
    for one, other in [(y, exact_y), (x.grad, exact_x.grad)] + [
        (one.grad, other.grad) for one, other in zip(mlp.parameters(), exact.parameters(), strict=True)
    ]:
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance / 10)


def test_a_wrapped_mlp_keeps_the_keys_of_the_inner_module():
    inner = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
    outer = nn.Sequential(TiledMLP(copy.deepcopy(inner), 3))
    plain = nn.Sequential(inner)
    assert list(outer.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        inner[0].weight.zero_()
    outer.load_state_dict(plain.state_dict())
    x = torch.randn(2, 7, 6)
    torch.testing.assert_close(outer(x), plain(x))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("masked", [True, False])
def test_blocks_in_micro_batches_give_the_gradients_of_accumulation(name, masked, seed):
    model = MODELS[name]()
    model.config.use_cache = False
    sliced = copy.deepcopy(model)
    for block in blocks(sliced):
        tile_batch(block, 2)
    counts = count_gradients(sliced)
    ids = batch(1, rows=5)
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[4, :6] = 0
    options = {"attention_mask": mask} if masked else {}
    sliced(ids, labels=ids, **options).loss.backward()
    for start in (0, 2, 4):
        part = {key: one[start : start + 2] for key, one in options.items()}
        some = ids[start : start + 2]
        (model(some, labels=some, **part).loss * len(some) / len(ids)).backward()
    assert_gradients(sliced, model)
    assert set(counts.values()) == {1}


def test_fp32_gradients_are_the_bits_of_accumulation(seed):
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    sliced = copy.deepcopy(block)
    tile_batch(sliced, 2)
    x, upstream = torch.randn(6, 3, 8), torch.randn(6, 3, 8)
    sliced(x).backward(upstream)
    for start in (0, 2, 4):
        block(x[start : start + 2]).backward(upstream[start : start + 2])
    for one, other in zip(sliced.parameters(), block.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_16_bit_gradients_add_up_in_fp32_and_are_rounded_once(seed):
    block = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    sliced = tile_batch(copy.deepcopy(block), 1)
    x, upstream = (torch.randn(64, 3, 8, dtype=torch.bfloat16) for _ in range(2))
    sliced(x).backward(upstream)
    total = torch.zeros(8, 8)
    for row in range(64):
        block.zero_grad()
        block(x[row : row + 1]).backward(upstream[row : row + 1])
        total += block.weight.grad.float()
    assert torch.equal(sliced.weight.grad, total.bfloat16())


def test_recomputation_drops_what_the_forward_dropped_and_leaves_the_generator_alone(seed):
    block = tile_batch(nn.Sequential(nn.Dropout(0.5)), 2)
    x = torch.ones(6, 50, requires_grad=True)
    y = block(x)
    torch.rand(3)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert torch.equal(torch.get_rng_state(), before)
    masks = y.detach().view(3, 100)
    assert not torch.equal(masks[0], masks[1])


def test_the_forwards_autocast_holds_in_the_recomputation(seed):
    seen = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            seen.append(y.dtype)
            return y

    block = tile_batch(Block(), 2)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(torch.randn(4, 4, requires_grad=True))
    y.sum().backward()
    assert seen == [torch.bfloat16] * 4


def test_what_all_samples_share_gets_the_sum_of_the_gradients():
    class Block(nn.Module):
        def forward(self, x, shared, whole=None):
            return {"out": x * shared + (0 if whole is None else whole.sum()), "none": None, "count": 3}

    block, x = tile_batch(Block(), 2, whole=["whole"]), torch.randn(4, 3, requires_grad=True)
    shared, whole = torch.randn(1, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    result = block(x, shared, whole=whole)
    assert (result["none"], result["count"]) == (None, 3)
    result["out"].sum().backward()
    torch.testing.assert_close(shared.grad, x.detach().sum(0, keepdim=True))
    torch.testing.assert_close(whole.grad, torch.full((4, 3), 12.0))


def test_without_gradients_slices_are_just_run():
    block = tile_batch(nn.Linear(4, 4), 2)
    x = torch.randn(5, 4)
    with torch.no_grad():
        y = block(x)
    assert not y.requires_grad
    torch.testing.assert_close(y, untile_(block)(x))
    assert not runs_in_slices(block)


def test_tiled_again_the_last_choice_counts_and_a_copy_stands_alone():
    mlp = tile_sequence(tile_sequence(nn.Linear(4, 4), 2), 3)
    other = copy.deepcopy(mlp)
    assert runs_in_slices(other)
    assert other.forward.module is other
    assert other.forward.tiles == 3
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    assert not other(torch.ones(2, 4)).any()
    assert mlp(torch.ones(2, 4)).any()


@pytest.mark.parametrize(
    ("module", "inputs", "error", "message"),
    [
        (lambda x: x.mul_(2), torch.ones(4, 3), RuntimeError, "in place"),
        (lambda x: x.sum(), torch.ones(4, 3), TypeError, "assembled from slices"),
        (lambda x: (x, object()), torch.ones(4, 3), TypeError, "assembled from slices"),
        (lambda x: x, torch.tensor(1.0), ValueError, "without a tensor to cut"),
    ],
)
def test_what_cannot_be_sliced_says_so(module, inputs, error, message):
    class Block(nn.Module):
        def forward(self, x):
            return module(x)

    with pytest.raises(error, match=message):
        tile_batch(Block(), 2)(inputs)


def test_a_weight_changed_between_forward_and_backward_is_an_error():
    block = tile_batch(nn.Linear(4, 4), 2)
    y = block(torch.randn(4, 4)).sum()
    with torch.no_grad():
        block.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()


def test_router_logits_from_inside_slices_are_refused():
    model = MODELS["mixtral"]()
    model.config.use_cache = False
    for block in blocks(model):
        tile_batch(block, 2)
    ids = batch(1, rows=4)
    with pytest.raises(ValueError, match="router_logits"):
        model(ids, labels=ids, output_router_logits=True)


def test_caches_and_double_recomputation_are_refused():
    model = MODELS["llama"]()
    tile_batch(model.model.layers[0], 1)
    ids = batch(1)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(ids, use_cache=True)
    block, states = model.model.layers[0], torch.zeros(1, 4, model.config.hidden_size)
    for cache in ({"past_key_values": ((states, states),)}, {"anything": transformers.DynamicCache()}):
        with pytest.raises(ValueError, match="use_cache=False"):
            block(states, **cache)
    model.train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing off"):
        model(ids, use_cache=False)
    for wrong in (lambda: tile_batch(nn.Linear(2, 2), 0), lambda: tile_sequence(nn.Linear(2, 2), 0)):
        with pytest.raises(ValueError, match="1 or more"):
            wrong()

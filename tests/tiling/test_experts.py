"""Stacks of experts in tiles, without an engine. Trusted: the same model with whole stacks."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as registration

import models
from infinity.tiling import TiledExperts, assembled, stand_in_for_stack

pytestmark = pytest.mark.usefixtures("repeatable")
LEAST = 64 << 10  # bytes of fp32: of two experts of the small models


def build(name, how, **changes):
    """Build a model with its experts in tiles."""
    hooks = [
        registration.register_module_parameter_registration_hook(
            lambda module, key, one: None if one is None else stand_in_for_stack(module, key, one, LEAST)
        ),
        registration.register_module_module_registration_hook(lambda _module, _key, child: assembled(child)),
    ]
    try:
        return models.of_experts(name, how, **changes)
    finally:
        for hook in hooks:
            hook.remove()


def whole_gradients(model):
    """Return gradients by the names of whole stacks; zeros where a tile has none."""
    return {
        name: torch.cat([torch.zeros_like(one) if one.grad is None else one.grad for one in pieces])
        for name, pieces in models.named_wholes(model)
    }


@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", list(models.OF_EXPERTS))
def test_losses_and_gradients_are_those_of_whole_stacks(name, how):
    whole, tiled = models.of_experts(name, how), build(name, how)
    kinds = [one for one in tiled.modules() if isinstance(one, TiledExperts)]
    assert kinds
    assert all(1 < len(one.tiles) <= one.num_experts for one in kinds)
    assert list(tiled.state_dict()) == list(whole.state_dict())
    ids = models.batch(0, rows=1, length=20)
    losses = [one(input_ids=ids, labels=ids).loss for one in (whole, tiled)]
    assert losses[0].item() == losses[1].item()
    for loss in losses:
        loss.backward()
    found, expected = whole_gradients(tiled), whole_gradients(whole)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        if how == "batched_mm":
            torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-6)
        else:
            assert torch.equal(found[key], gradient), key


def test_initial_values_and_checkpoints_are_those_of_whole_stacks():
    whole, tiled = models.of_experts("gpt_oss"), build("gpt_oss", None)
    expected, found = whole.state_dict(), tiled.state_dict()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    changed = {key: one + 1 for key, one in expected.items()}
    tiled.load_state_dict(changed)
    assert [key for key, one in tiled.state_dict().items() if not torch.equal(one, changed[key])] == []
    del changed["model.layers.0.mlp.experts.down_proj"]
    with pytest.raises(RuntimeError, match=r"Missing key.*experts\.down_proj"):
        tiled.load_state_dict(changed)


def test_slices_that_do_not_begin_with_a_chunk_of_numbers_are_drawn_as_the_whole(seed):
    torch.manual_seed(seed)
    whole = nn.init.normal_(torch.empty(5, 3, 7))
    after = torch.rand(1)
    tiled = build("mixtral", None, hidden_size=64, intermediate_size=192)
    experts = next(one for one in tiled.modules() if isinstance(one, TiledExperts))
    for tile in experts.tiles:
        tile.gate_up_proj = nn.Parameter(torch.empty(1, 3, 7))
    del experts.tiles[5:]
    stack = type(experts.gate_up_proj).of(
        list(experts.tiles), type(experts.grid)((1,) * 5, (1,)), "gate_up_proj"
    )
    torch.manual_seed(seed)
    nn.init.normal_(stack)
    assert torch.equal(torch.cat(stack.pieces()), whole)
    assert torch.equal(torch.rand(1), after)


def test_a_module_that_transformers_does_not_dispatch_keeps_its_stack():
    class Own(nn.Module):
        num_experts = 4

        def forward(self, x):
            return x

    stack = nn.Parameter(torch.zeros(4, 256, 256))
    assert stand_in_for_stack(Own(), "weight", stack, LEAST) is None

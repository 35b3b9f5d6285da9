"""Attention of a rank's heads by itself: with sinks, against transformers' eager form. On flex attention: one
rank.
"""

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from infinity.errors import ConfigError
from infinity.sequences.attention import HeadsOfRank, divide_heads, sdpa


class Module(torch.nn.Module):
    """What an attention function asks a module for."""

    num_key_value_groups = 2
    is_causal = True

    def __init__(self, sinks):
        super().__init__()
        self.sinks = sinks


@pytest.mark.parametrize("masked", [False, True])
def test_sinks_take_their_share_of_the_softmax(masked):
    generator = torch.Generator().manual_seed(0)
    drawn = {"query": (2, 4, 7, 8), "key": (2, 2, 7, 8), "value": (2, 2, 7, 8), "sinks": (4,)}
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril() & (torch.arange(7) >= 0)
    if masked:
        mask = mask.triu(-3)
    added = torch.zeros(1, 1, 7, 7).masked_fill(~mask, float("-inf"))
    grads = []
    for way in ("eager", "sdpa"):
        given = {
            name: torch.randn(size, generator=generator.manual_seed(len(name)))
            for name, size in drawn.items()
        }
        leaves = [one.requires_grad_() for one in given.values()]
        sinks = given.pop("sinks")
        if way == "eager":
            out, _ = eager_attention_forward(Module(sinks), **given, attention_mask=added, scaling=0.25)
        else:
            out, _ = sdpa(Module(sinks), *given.values(), mask if masked else None, s_aux=sinks, scaling=0.25)
        grads.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for eager, ours in zip(*grads, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [((8, 8, 4), (2, 2, 1)), ((8, 2, 2), (4, 1, 1)), ((8, 2, 4), (2, 1, 2)), ((8, 1, 8), (1, 1, 8))],
)
def test_heads_are_divided_and_key_heads_shared_where_there_are_too_few(heads, expected):
    assert divide_heads(*heads) == HeadsOfRank(*expected)


@pytest.mark.parametrize("heads", [(8, 8, 3), (24, 6, 4), (4, 4, 8)])
def test_heads_that_cannot_be_divided_are_refused_with_the_sizes_that_can(heads):
    with pytest.raises(ConfigError, match="Sizes that work here: 1, 2"):
        divide_heads(*heads)

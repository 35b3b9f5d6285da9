"""Arguments of layers for some of the tokens. Trusted: plain indexing."""

import types

import pytest
import torch

from infinity import ConfigError, UnsupportedError
from infinity.sequences.tokens import KNOWN, KeptTokens, check_layouts

INDICES = torch.tensor([[0, 2, 3], [1, 2, 4]])
KEPT = KeptTokens(INDICES, 5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_masks_positions_and_embeddings_are_those_of_the_kept_tokens_of_each_row(dtype):
    mask = (torch.randn(2, 3, 5, 5) > 0).to(dtype)
    found = KEPT.argument("attention_mask", mask, KNOWN)
    for row, kept in enumerate(INDICES):
        assert torch.equal(found[row], mask[row][:, kept][:, :, kept])
    shared = torch.arange(50).view(1, 5, 10).to(dtype)  # the same for all rows
    cos, nothing = KEPT.argument("position_embeddings", (shared, None), KNOWN)
    assert nothing is None
    assert all(torch.equal(cos[row], shared[0][kept]) for row, kept in enumerate(INDICES))
    of_three = torch.arange(30).view(3, 2, 5).to(dtype)  # in three directions, as for images
    found = KEPT.argument("position_ids", of_three, KNOWN)
    assert all(torch.equal(found[:, row], of_three[:, row, kept]) for row, kept in enumerate(INDICES))


def test_what_is_the_same_for_all_tokens_stays_so():
    mask = torch.ones(2, 1, 1, 5)
    assert KEPT.argument("attention_mask", mask, KNOWN).shape == (2, 1, 1, 3)
    assert KEPT.argument("attention_mask", mask[..., :1], KNOWN).shape == (2, 1, 1, 1)
    for value in (None, True, 5, "sdpa", torch.float16, (1, {"scale": 0.5}), torch.ones(3, 7)):
        assert KEPT.argument("other", value, KNOWN) is value
    assert KEPT.argument("other", mask, {"other": ""}) is mask


def test_rows_may_stand_behind_tokens():
    whole = torch.randn(5, 2, 4)
    some = KEPT.of(whole, "tb.", "hidden")
    assert all(torch.equal(some[:, row], whole[kept, row]) for row, kept in enumerate(INDICES))
    back = KEPT.put_back(whole, some * 0, "tb.")
    zeroed = whole.clone()
    for row, kept in enumerate(INDICES):
        zeroed[kept, row] = 0
    assert torch.equal(back, zeroed)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("bias", torch.ones(2, 5), r"bias \(\(2, 5\)\) may be of the 5 tokens"),
        ("states", {"one": [torch.ones(5)]}, "may be of the 5 tokens"),
        ("mask", types.SimpleNamespace(), "may hold something of the tokens"),
        ("attention_mask", types.SimpleNamespace(), "attn_implementation="),
        ("attention_mask", torch.ones(2, 1, 5, 9), "but the layer has 2 rows of 5 tokens"),
        ("position_embeddings", (torch.ones(5, 8),) * 2, "has not the dimensions of 'bt.,.bt.'"),
        ("cu_seq_lens_q", torch.tensor([0, 2, 9]), "may be of the 5 tokens"),
        ("max_length_q", 4, "says where documents begin"),
    ],
)
def test_what_cannot_be_cut_or_is_not_known_is_refused_with_what_to_say(name, value, says):
    with pytest.raises(UnsupportedError, match=says):
        KEPT.argument(name, value, KNOWN)


@pytest.mark.parametrize("layout", ["tt", "bbt", "b t", "x", ["bt"]])
def test_layouts_that_mean_nothing_are_refused(layout):
    with pytest.raises(ConfigError, match="expected a letter for each dimension"):
        check_layouts({"bias": layout})

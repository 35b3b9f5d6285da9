"""Hooks that are taken off modules while a forward holds all they use. Trusted: plain PyTorch."""

import pytest
import torch
from torch import nn

from infinity import Init
from infinity.autograd.module_calls import Entering, Leaving

X = torch.ones(4, 5, 64, dtype=torch.bfloat16) / 16


class Looks(nn.Module):
    """Notes how many hooks other modules have when it is called; raises what it is told to."""

    def __init__(self):
        super().__init__()
        self.others, self.seen, self.raises = [], [], None

    def forward(self, x):
        self.seen.append([(len(one._forward_pre_hooks), len(one._forward_hooks)) for one in self.others])
        if self.raises is not None:
            raise self.raises
        return x


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), Looks(), nn.Linear(64, 64), nn.LayerNorm(64))


def offloaded(*, frozen=True):
    """A model, and what looks at its other layers."""
    with Init(host_memory="16MiB"):
        model = build()
    if frozen:
        model.requires_grad_(False)
    looks = model[2]
    looks.others = [one for one in model if one is not looks]
    return model, looks


def ours(module):
    kinds = (module._forward_pre_hooks, Entering), (module._forward_hooks, Leaving)
    return [isinstance(next(iter(hooks.values()), None), kind) for hooks, kind in kinds]


ALL, NONE = [(1, 1)] * 4, [(1, 0), (0, 0), (1, 0), (0, 0)]
"""With their hooks; without, but that a linear layer looks at what it is given."""


def test_frozen_modules_have_no_hooks_while_a_forward_holds_all_they_use_and_then_have_them_again():
    (model, looks), plain = offloaded(), build().to(torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(X), plain(X))
        assert looks.seen[1:] == [NONE, NONE]
        assert all(ours(one) == [True, True] for one in looks.others)
        assert torch.equal(model[1](X), plain[1](X)), "called by itself, a layer is followed"
    assert torch.equal(model(X.clone().requires_grad_()), plain(X))
    assert looks.seen[-1] == ALL, "with gradients all are followed"


def test_modules_that_train_keep_their_hooks():
    model, looks = offloaded(frozen=False)
    with torch.no_grad():
        for _ in range(3):
            model(X)
    assert looks.seen == [ALL] * 3


def test_a_module_with_hooks_of_others_keeps_ours_and_those_that_come_meanwhile_stay_behind_ours():
    model, looks = offloaded()
    called = []
    model[1].register_forward_hook(lambda *_: called.append("theirs"))

    def add(*_):
        model[4].register_forward_pre_hook(lambda *_: called.append("new"))

    with torch.no_grad():
        model(X)
        handle = looks.register_forward_hook(add)
        model(X)
        handle.remove()
        assert looks.seen[-1][1] == (1, 2)
        assert ours(model[4]) == [True, True]
        model(X)
    assert called == ["theirs", "theirs", "new", "theirs", "new"]


@pytest.mark.parametrize("error", [ValueError("stop"), KeyboardInterrupt("stop")])
def test_a_forward_that_does_not_end_leaves_the_next_one_with_all_hooks(error):
    (model, looks), plain = offloaded(), build().to(torch.bfloat16)
    with torch.no_grad():
        for _ in range(2):
            model(X)
        looks.raises = error
        with pytest.raises(type(error), match="stop"):
            model(X)
        assert looks.seen[-1] == NONE
        looks.raises = None
        assert torch.equal(model(X), plain(X))
    assert all(ours(one) == [True, True] for one in looks.others)
    assert torch.equal(model(X.clone().requires_grad_()), plain(X))
    assert looks.seen[-1] == ALL


def test_a_covered_layer_multiplies_the_last_tokens_of_a_batch_without_a_copy_of_its_weight_for_each():
    with Init(host_memory="32MiB"):
        model = nn.Sequential(nn.Linear(64, 96, bias=False))
    model.requires_grad_(False)
    strided = torch.randn(5, 8, 64).bfloat16().transpose(0, 1)
    with torch.no_grad():
        for _ in range(2):
            model(strided)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            model(strided)
    assert "aten::bmm" not in {event.name for event in seen.events()}

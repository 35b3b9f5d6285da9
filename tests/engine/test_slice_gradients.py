"""Gradients and frozen slices that a step finds without asking each slice: real training on a real disk,
against the reference recipe in memory.
"""

import contextlib

import pytest
import torch
from torch import nn

import infinity
import models
from infinity import AdamW
from infinity.engine.engine import engine_of_model
from infinity.reference import ReferenceAdamW
from parity import build_both, engine_in

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1024, 128), nn.Linear(128, 8)

    def forward(self, ids):
        return self.head(self.embed(ids)).float().square().sum()


@pytest.fixture
def pairs(folder):
    """A plain model, and ours, whose embedding is in 32 blocks of rows; each with its optimizer."""
    plain, ours = build_both(Lookup, nvme=folder, memory="2MiB", tile_above="16KiB", waits=True)
    return (plain, ReferenceAdamW(plain.parameters(), **SETTINGS)), (
        ours,
        AdamW(ours.parameters(), **SETTINGS),
    )


def step(pairs, ids, change=lambda model: None):
    """Train on some rows; `change` is called with each model, behind its backward."""
    for model, optimizer in pairs:
        model(torch.tensor(ids)).backward()
        change(model)
        optimizer.step()
        optimizer.zero_grad()


def assigned_while_released(last):
    last.grad = torch.ones_like(last)


def assigned_in_gathered(last):
    with infinity.gathered(last):
        last.grad = torch.ones_like(last)


@pytest.mark.parametrize("assign", [assigned_while_released, assigned_in_gathered])
def test_a_gradient_is_found_wherever_it_was_assigned(pairs, assign):
    (plain, reference), (ours, optimizer) = pairs
    last = list(ours.embed.parameters())[-1]

    def change(model):
        if model is plain:
            plain.embed.weight.grad[-len(last) :] = 1
        else:
            assign(last)

    for number in range(3):
        step(pairs, [3, 7], change if number == 1 else lambda _: None)
    models.assert_same_state(ours, optimizer, plain, reference)


def test_a_step_within_gathered_sees_what_was_assigned_there(pairs):
    ours, optimizer = pairs[1]
    last = list(ours.embed.parameters())[-1]
    with pytest.raises(infinity.UnsupportedError, match="gathered"), infinity.gathered(last):
        last.grad = torch.ones_like(last)
        optimizer.step()
    optimizer.zero_grad()
    assert last.grad is None


def freeze(model, trained):
    model.embed.requires_grad_(trained)


def freeze_by_hand(model, trained):
    for one in model.embed.parameters():
        one.requires_grad = trained


def freeze_in_gathered(model, trained):
    with contextlib.nullcontext() if engine_in(model) is None else infinity.gathered(model):
        freeze_by_hand(model, trained)


@pytest.mark.parametrize("change", [freeze, freeze_by_hand, freeze_in_gathered])
def test_a_stack_that_is_frozen_for_some_steps_misses_none_of_these(pairs, change):
    for number, trained in enumerate([True, True, False, False, True, True]):
        for model, _ in pairs:
            change(model, trained)
        step(pairs, [3, 100 * number])
    (plain, reference), (ours, optimizer) = pairs
    models.assert_same_state(ours, optimizer, plain, reference)


def test_a_step_asks_the_slices_alone_that_a_backward_came_to(pairs):
    ours, optimizer = pairs[1]
    watch = engine_of_model(ours).arrivals.slices
    assert watch.with_gradients().tolist() == []
    for number in range(3):
        ours(torch.tensor([3, 100 * number + 90])).backward()
        assert len(watch.may_have()) <= 4, "these two, and those of the step before"
        assert len(watch.with_gradients()) == 2
        optimizer.step()
        optimizer.zero_grad()
    freezes = watch.freezes
    ours(torch.tensor([3])).backward()
    optimizer.step()
    assert watch.freezes == freezes, "nothing was frozen, and no slice is asked"

"""Trusted: plain torch, autograd and torch.optim.AdamW. Faked: nothing."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from infinity.reference import recipe as reference


def build(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    model[0].bias.requires_grad_(False)
    return model


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 16, generator=generator).bfloat16() for _ in range(count)]


def loss_of(model, batch):
    return model(batch).float().square().mean()


def backward(model, batch):
    loss = loss_of(model, batch)
    loss.backward()
    return loss.item()


def prepared(**options):
    model = reference.prepare(build())
    model[1].bfloat16()
    return model, reference.ReferenceAdamW(model.parameters(), **options)


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def test_prepare_keeps_parameter_objects_and_buffers_and_remembers_what_was_drawn():
    model, drawn = build(), copy.deepcopy(build())
    objects = list(model.parameters())
    reference.prepare(model)
    optimizer = reference.ReferenceAdamW(model.parameters())
    for before, parameter, original in zip(objects, model.parameters(), drawn.parameters(), strict=True):
        assert parameter is before
        assert parameter.dtype == torch.bfloat16
        assert parameter.requires_grad == original.requires_grad
        assert torch.equal(optimizer.masters()[parameter], original)
        assert torch.equal(parameter.detach(), reference.rounded(original.detach()))
    assert model[1].running_mean.dtype == torch.float32


def test_rounding_goes_away_from_zero_on_a_tie_and_to_the_nearest_otherwise():
    patterns = [0x3F808000, 0x3F807FFF, -0x407F8000, 0x7F7F8000, 0x7F800000, 0x7F812345, 0]
    masters = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    expected = [0x3F81, 0x3F80, 0xBF81 - 2**16, 0x7F80, 0x7F80, 0x7FC0, 0]
    assert bits(reference.rounded(masters)).tolist() == expected
    values = torch.randn(100_000)
    values = values[(bits(values) & 0xFFFF) != 0x8000]
    assert torch.equal(reference.rounded(values), values.bfloat16())


def test_parameters_that_are_16_bit_already_are_their_own_masters():
    model = reference.prepare(build(dtype=torch.bfloat16))
    for parameter, master in reference.ReferenceAdamW(model.parameters()).masters().items():
        assert torch.equal(parameter.float(), master)


def test_in_fp32_the_recipe_follows_torch_adamw():
    ours, theirs = reference.prepare(build(), torch.float32), build()
    optimizers = [
        reference.ReferenceAdamW(ours.parameters(), lr=1e-2, weight_decay=0.1),
        torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1),
    ]
    for batch in batches(20):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, batch.float())
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_training_lowers_the_loss_and_leaves_what_is_frozen():
    model, optimizer = prepared(lr=1e-2)
    frozen = model[0].bias.detach().clone()
    batch = batches(1)[0]
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(backward(model, batch))
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]
    assert torch.equal(model[0].bias, frozen)
    for parameter, master in optimizer.masters().items():
        assert torch.equal(parameter.detach(), reference.rounded(master))


def gradients_of(batch):
    model, _ = prepared()
    backward(model, batch)
    return [p.grad.float() for p in model.parameters() if p.grad is not None]


def stored(model):
    return [reference._stored(p)[0] for p in model.parameters() if p.grad is not None]


def test_the_second_and_third_backward_add_in_fp32():
    model, _ = prepared()
    first, second, third = batches(3)
    backward(model, first)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    expected = gradients_of(first)
    for batch in (second, third):
        backward(model, batch)
        expected = [a + b for a, b in zip(expected, gradients_of(batch), strict=True)]
    for sum_expected, sum_found in zip(expected, stored(model), strict=True):
        assert sum_found.dtype == torch.float32
        assert torch.equal(sum_expected, sum_found)
    for parameter in model.parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, reference._stored(parameter)[0].bfloat16())


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_zero_grad_starts_anew(set_to_none, whose):
    model, optimizer = prepared()
    first, second, third = batches(3)
    backward(model, first)
    backward(model, second)
    {"model": model, "optimizer": optimizer}[whose].zero_grad(set_to_none=set_to_none)
    backward(model, third)
    for expected, found in zip(gradients_of(third), stored(model), strict=True):
        assert torch.equal(expected, found.float())


def test_a_gradient_edited_in_place_or_replaced_is_the_gradient():
    model, _ = prepared()
    for batch in batches(2):
        backward(model, batch)
    weight = model[0].weight
    with torch.no_grad():
        weight.grad.mul_(0.5)
    assert reference._stored(weight)[0].data_ptr() == weight.grad.data_ptr()
    weight.grad = torch.ones_like(weight)
    assert torch.equal(reference._stored(weight)[0], torch.ones_like(weight))


def test_autograd_grad_leaves_the_stored_gradient_alone():
    model, _ = prepared()
    first, second = batches(2)
    backward(model, first)
    before = [value.clone() for value in stored(model)]
    torch.autograd.grad(loss_of(model, second), model[0].weight)
    for expected, found in zip(before, stored(model), strict=True):
        assert torch.equal(expected, found)


def test_no_gradient_means_no_update_no_decay_no_step():
    model, optimizer = prepared(weight_decay=0.5)
    backward(model, batches(1)[0])
    model[3].weight.grad = None
    before = model[3].weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, model[3].weight)
    assert (optimizer.state[model[3].weight]["step"], optimizer.state[model[0].weight]["step"]) == (0, 1)


def one_step(max_norm=None, clip=None, accumulate=1):
    model, optimizer = prepared(max_norm=max_norm)
    for batch in batches(accumulate):
        backward(model, batch)
    norm = reference.clip_grad_norm_(optimizer, clip) if clip is not None else None
    gradients = stored(model)
    optimizer.step()
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters() if p.grad is not None]
    return gradients, moments, norm


@pytest.mark.parametrize("accumulate", [1, 2])
def test_max_norm_multiplies_the_fp32_gradient_by_an_fp32_factor(accumulate):
    gradients, moments, _ = one_step(max_norm=0.01, accumulate=accumulate)
    squares = sum(gradient.double().square().sum() for gradient in gradients)
    norm = squares.sqrt().float()
    clip = torch.tensor(0.01) / (norm + torch.tensor(1e-6))
    assert clip < 1
    for gradient, moment in zip(gradients, moments, strict=True):
        g = gradient.float() * clip
        assert torch.equal((g - 0) * torch.tensor(1 - 0.9), moment)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_clip_grad_norm_gives_torchs_norm_and_clips_in_fp32(accumulate):
    gradients, moments, norm = one_step(clip=0.01, accumulate=accumulate)
    stand_ins = [nn.Parameter(torch.zeros_like(g, dtype=torch.float64)) for g in gradients]
    for stand_in, gradient in zip(stand_ins, gradients, strict=True):
        stand_in.grad = gradient.double()
    theirs = nn.utils.clip_grad_norm_(stand_ins, 0.01)
    assert norm.dtype == torch.float64
    assert torch.equal(theirs, norm)
    coefficient = (0.01 / (norm + 1e-6)).float()
    for gradient, moment in zip(gradients, moments, strict=True):
        assert torch.equal((gradient.float() * coefficient) * torch.tensor(1 - 0.9), moment)


def test_a_norm_below_the_limit_changes_nothing():
    for options in ({"max_norm": 1e6}, {"clip": 1e6}):
        for clipped, plain in zip(one_step(**options)[1], one_step()[1], strict=True):
            assert torch.equal(plain, clipped)


def test_clipping_twice_over_is_refused():
    _, optimizer = prepared(max_norm=1.0)
    with pytest.raises(RuntimeError, match="either max_norm or clip_grad_norm_"):
        reference.clip_grad_norm_(optimizer, 1.0)


def test_a_scheduler_sets_the_learning_rate():
    model, optimizer = prepared(lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1e-2)
    steps = []
    for batch in batches(2):
        before = model[3].weight.detach().clone()
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        scheduler.step()
        steps.append(bool((model[3].weight != before).any()))
    assert steps == [True, False]


def test_param_groups_and_closures_work_as_in_torch():
    model = reference.prepare(build())
    model[1].bfloat16()
    optimizer = reference.ReferenceAdamW(
        [{"params": [model[0].weight], "lr": 0.0}, {"params": [model[3].weight]}]
    )
    before = [model[0].weight.detach().clone(), model[3].weight.detach().clone()]
    batch = batches(1)[0]
    assert optimizer.step(lambda: backward(model, batch)) is not None
    assert torch.equal(before[0], model[0].weight)
    assert not torch.equal(before[1], model[3].weight)


def run(model, optimizer, steps):
    losses = []
    for batch in steps:
        optimizer.zero_grad()
        losses.append(backward(model, batch))
        optimizer.step()
    return losses


def test_a_loaded_run_goes_on_bit_for_bit():
    steps = batches(10)
    model, optimizer = prepared(lr=1e-2)
    run(model, optimizer, steps[:5])
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = run(model, optimizer, steps[5:])
    other, other_optimizer = prepared(lr=1e-2)
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    assert run(other, other_optimizer, steps[5:]) == expected
    for mine, theirs in zip(optimizer.masters().values(), other_optimizer.masters().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_weight_the_user_changes_becomes_its_own_master():
    model, optimizer = prepared(lr=0.0)
    weight = model[0].weight
    untouched = optimizer.masters()[weight].clone()
    with torch.no_grad():
        weight[0] = 3.0
    backward(model, batches(1)[0])
    optimizer.step()
    assert torch.equal(optimizer.masters()[weight][0], torch.full((16,), 3.0))
    assert torch.equal(optimizer.masters()[weight][1:], untouched[1:])


def test_nothing_outlives_the_model():
    model, optimizer = prepared()
    backward(model, batches(1)[0])
    backward(model, batches(1)[0])
    watched = weakref.ref(model[0].weight)
    del model, optimizer
    gc.collect()
    assert watched() is None


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match="dtype"):
        reference.prepare(build(), torch.float64)
    with pytest.raises(TypeError, match="float64"):
        reference.prepare(build(dtype=torch.float64))
    for options in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"max_norm": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            prepared(**options)

"""The recipe with bf16 and 8-bit moments. Trusted: torch.optim.AdamW, the fp32 recipe. Faked: nothing.

That kernels and recipe give the same bits is in test_kernels_state.py, that roundings are right on average in
test_kernels_rounding.py.
"""

import copy

import pytest
import torch
from torch import nn

from infinity import reference
from infinity.reference import moments as reference_state

STATE_DTYPES = ("fp32", "bf16", "int8", "int4")


def batches(count):
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(16, 1, generator=generator)
    for _ in range(count):
        inputs = torch.randn(32, 16, generator=generator)
        yield inputs, torch.tanh(inputs @ teacher / 4)


def build(state_dtype, **options):
    torch.manual_seed(0)
    model = reference.prepare(nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 1)))
    parameters = model.parameters()
    return model, reference.ReferenceAdamW(parameters, lr=3e-3, state_dtype=state_dtype, **options)


def train(model, optimizer, steps):
    losses = []
    for inputs, targets in steps:
        optimizer.zero_grad()
        loss = (model(inputs.bfloat16()).float() - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_all_three_reach_nearly_the_same_loss():
    last = {}
    for state_dtype in STATE_DTYPES:
        losses = train(*build(state_dtype), batches(300))
        last[state_dtype] = sum(losses[-50:]) / 50
        assert last[state_dtype] < 0.05 * losses[0]
    assert last["bf16"] == pytest.approx(last["fp32"], rel=0.05)
    assert last["int8"] == pytest.approx(last["fp32"], rel=0.1)


@pytest.mark.parametrize(("state_dtype", "bytes_of"), [("fp32", (4, 4)), ("bf16", (2, 2)), ("int8", (1, 1))])
def test_state_has_the_bytes_it_promises(state_dtype, bytes_of):
    model, optimizer = build(state_dtype)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert (state["exp_avg"].element_size(), state["exp_avg_sq"].element_size()) == bytes_of
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape
        blocks = -(-parameter.numel() // reference_state.STATE_BLOCK)
        assert (state["scale"].nbytes if state_dtype == "int8" else 8 * blocks) == 8 * blocks


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_the_seed_decides_the_rounding_and_nothing_else_does(state_dtype):
    def weights_with(seed):
        torch.rand(7)  # torch's own generator has no part in it
        model, optimizer = build(state_dtype, seed=seed)
        train(model, optimizer, batches(5))
        return model[0].weight

    assert torch.equal(weights_with(1), weights_with(1))
    assert not torch.equal(weights_with(1), weights_with(2))


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_a_loaded_run_goes_on_bit_for_bit(state_dtype):
    steps = list(batches(20))
    model, optimizer = build(state_dtype)
    train(model, optimizer, steps[:10])
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = train(model, optimizer, steps[10:])
    other, other_optimizer = build(state_dtype)
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    assert train(other, other_optimizer, steps[10:]) == expected


def test_state_of_another_format_is_refused():
    trained, optimizer = build("bf16")
    train(trained, optimizer, batches(3))
    for state_dtype in ("fp32", "int8"):
        model, other = build(state_dtype)
        before = model[0].weight.detach().clone()
        with pytest.raises(ValueError, match=f"was not saved with state_dtype='{state_dtype}'"):
            other.load_state_dict(optimizer.state_dict())
        assert torch.equal(before, model[0].weight)


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match="state_dtype='fp8'"):
        build("fp8")
    with pytest.raises(ValueError, match="seed=-1"):
        build("int8", seed=-1)


def test_every_code_and_scale_of_the_grid_comes_back_exactly():
    for by in (reference_state.M8, reference_state.V8, reference_state.M4, reference_state.V4):
        count, least = by.codes + 1 << by.signed, 2.0 ** (by.shift - 23)  # the least step, beside 1
        codes = torch.arange(count).to(torch.uint8)
        for scale in (2.0**-90, (1 + least) * 2.0**-20 if least < 1 else 0.5, 1.0, (2 - least) * 2.0**127):
            values = reference_state.decode(codes, torch.tensor([scale]), by)
            assert values.max() == scale
            assert values.isfinite().all()
            again, scales = reference_state.encode_at_random(values, torch.full((count,), 0xFFFF), by)
            assert torch.equal(codes, again)
            assert scales.item() == scale
            magnitudes = values.abs().unique()[1:]
            assert len(magnitudes) == by.codes
            assert (magnitudes.diff() / magnitudes[:-1]).max() <= least

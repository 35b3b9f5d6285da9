"""Update rules on parts longer than what they split at a time. Trusted: the same rules on shorter parts."""

import itertools

import pytest
import torch

from infinity import kernels
from infinity.records.update_rules import ADAGRAD, ADAM, CHUNK_NUMEL, LION, MOMENTUM, SGD, UpdateSpan
from infinity.records.weights import KERNEL_DTYPE

N = CHUNK_NUMEL + 4096
RECIPES = {"Adam": ADAM, "SGD": SGD, "momentum": MOMENTUM, "Adagrad": ADAGRAD, "Lion": LION}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROUP = {
    "lr": 0.1,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "nesterov": False,
    "lr_decay": 0.1,
}


def fields(dtype):
    """Return weights, of a master that is split or not, and moments."""
    master, m, v = torch.randn(N), torch.rand(N), torch.rand(N)
    if dtype == "fp32":
        return {"hi": master, "m": m, "v": v}
    if dtype == "fp16":
        return {"hi": master.half(), "master": master, "m": m, "v": v}
    halves = {name: torch.empty(N, dtype=torch.int16) for name in ("hi", "lo")}
    kernels.split(N, master.data_ptr(), halves["hi"].data_ptr(), halves["lo"].data_ptr())
    return {**halves, "m": m, "v": v}


def stepped(recipe, dtype, before, gradient, cuts):
    """Return the fields after a second step, made from one cut to the next."""
    after = {name: one.clone() for name, one in before.items()}
    momentum = {"momentum": 0.9, "dampening": 0.1} if recipe is MOMENTUM else {"momentum": 0, "dampening": 0}
    scalars = recipe.scalars({**GROUP, **momentum}, 2, 0.5)
    for start, stop in itertools.pairwise(cuts):
        at = {name: one[start:].data_ptr() for name, one in after.items()}
        span = UpdateSpan(stop - start, at, gradient[start:].data_ptr(), KERNEL_DTYPE[gradient.dtype])
        recipe.kernels[dtype, "fp32"](span, scalars)
    return after


@pytest.mark.parametrize("wide", [False, True], ids=["gradients of its type", "fp32 gradients"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_long_part_makes_the_step_that_its_parts_make(seed, name, dtype, wide):
    before, gradient = fields(dtype), torch.randn(N).to(torch.float32 if wide else DTYPES[dtype])
    whole, parts = (
        stepped(RECIPES[name], dtype, before, gradient, cuts) for cuts in ([0, N], [0, CHUNK_NUMEL, N])
    )
    for field, values in whole.items():
        assert torch.equal(values, parts[field]), field
    assert not torch.equal(whole["hi"], before["hi"])


def test_masters_in_24_bits_make_a_step_whatever_other_fields_their_record_has(seed):
    torch.manual_seed(seed)
    before = {**fields("bf16"), "lo": torch.zeros(N, dtype=torch.int8)}
    gradient = torch.randn(N).bfloat16()
    with_errors = {**before, "r0": torch.full((N,), 7.0)}  # of Config(error_feedback=True)
    after = stepped(ADAM, "bf16, fp24", with_errors, gradient, (0, N))
    assert torch.equal(after.pop("r0"), with_errors["r0"])
    expected = stepped(ADAM, "bf16, fp24", before, gradient, (0, N))
    assert all(torch.equal(one, expected[name]) for name, one in after.items())
    assert not torch.equal(after["hi"], before["hi"])

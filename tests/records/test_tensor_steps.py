"""Steps over tensors, on the CPU and on a GPU: their bits are those of the CPU's kernels. Trusted: these
kernels.
"""

import pytest
import torch

from infinity import kernels
from infinity.records import tensor_steps as steps
from infinity.records.update_rules import ADAMW, UpdateSpan
from infinity.records.weights import KERNEL_DTYPE
from steps_of_records import ADAMS, NUMEL, RULES, fields, randoms, same_bits

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("rule", "scalars"), RULES)
def test_a_step_over_tensors_has_the_bits_of_the_kernels(rule, scalars, wide, dtype, device):
    grad = randoms(4) if wide else randoms(4).bfloat16()
    ours, theirs = fields(dtype, rule), fields(dtype, rule)
    addresses = {name: one.data_ptr() for name, one in theirs.items()}
    rule.kernels[dtype, "fp32"](
        UpdateSpan(NUMEL, addresses, grad.data_ptr(), KERNEL_DTYPE[grad.dtype]), scalars
    )
    scratch = steps.Scratch(torch.empty(steps.Scratch.nbytes_of(192), dtype=torch.uint8, device=device))
    ours = {name: one.to(device) for name, one in ours.items()}
    steps.make_step(rule.tensors, ours, grad.to(device), scalars, scratch)
    same_bits(ours, theirs)


def test_a_step_without_a_gradient_is_one_with_zeros():
    zeros, none = fields("bf16", ADAMW), fields("bf16", ADAMW)
    scratch = steps.Scratch(torch.empty(4096, dtype=torch.uint8))
    steps.make_step(ADAMW.tensors, zeros, torch.zeros(NUMEL), ADAMS[0], scratch)
    steps.make_step(ADAMW.tensors, none, None, ADAMS[0], scratch)
    assert all(torch.equal(zeros[name].view(torch.int16), none[name].view(torch.int16)) for name in zeros)


def test_a_square_sum_is_the_kernels_up_to_the_last_places_of_fp64():
    grad = torch.randn(NUMEL).bfloat16()
    scratch = steps.Scratch(torch.empty(4096, dtype=torch.uint8))
    expected, finite = kernels.sum_squares(NUMEL, grad.data_ptr(), "bf16")
    found = torch.empty((), dtype=torch.float64)
    steps.square_sum(grad, scratch, found)
    assert finite
    assert (found.dtype, found.item()) == (torch.float64, pytest.approx(expected, rel=1e-14))
    grad[7] = torch.inf
    steps.square_sum(grad, scratch, found)
    assert not found.isfinite()


def test_memory_for_less_than_a_few_elements_is_refused():
    with pytest.raises(ValueError, match="expected 1408 at least"):
        steps.Scratch(torch.empty(1407, dtype=torch.uint8))

"""Steps in one kernel on a GPU: their bits are those of the CPU's kernels; and what is done without it.
Trusted: the CPU's kernels. Without a GPU the kernel itself is tried in tests/kernels/test_adamw_cu.py.
"""

import logging

import pytest
import torch

from infinity.records import tensor_steps as steps
from infinity.records.update_rules import ADAM, ADAMW, SGD, UpdateSpan
from infinity.records.weights import KERNEL_DTYPE
from infinity.units import fused_updates
from steps_of_records import ADAMS, NUMEL, RULES, fields, randoms, same_bits

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def scratch(device="cpu"):
    return steps.Scratch(torch.empty(4096, dtype=torch.uint8, device=device))


def on_cuda(at):
    return {name: one.to("cuda") for name, one in at.items()}


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("gradient", ["bf16", "fp32", "zeros"])
@pytest.mark.parametrize("scalars", ADAMS)
@pytest.mark.parametrize("rule", [ADAMW, ADAM], ids=["AdamW", "Adam"])
def test_a_step_in_one_kernel_has_the_bits_of_the_kernels(rule, scalars, gradient, dtype):
    assert fused_updates.kernel_of(torch.device("cuda", 0)) is not None
    grad = {"bf16": randoms(4).bfloat16(), "fp32": randoms(4), "zeros": torch.zeros(NUMEL)}[gradient]
    ours, theirs = on_cuda(fields(dtype, rule)), fields(dtype, rule)
    addresses = {name: one.data_ptr() for name, one in theirs.items()}
    rule.kernels[dtype, "fp32"](
        UpdateSpan(NUMEL, addresses, grad.data_ptr(), KERNEL_DTYPE[grad.dtype]), scalars
    )
    given = None if gradient == "zeros" else grad.to("cuda")
    fused_updates.make_step(rule.tensors, ours, given, scalars, scratch("cuda"))
    same_bits(ours, theirs)


@pytest.mark.gpu
@no_gpu
def test_a_step_in_one_kernel_runs_on_the_stream_of_the_caller():
    ours, theirs = on_cuda(fields("bf16", ADAMW)), fields("bf16", ADAMW)
    grad = torch.zeros(NUMEL, device="cuda")
    steps.make_step(ADAMW.tensors, theirs, randoms(4), ADAMS[0], scratch())
    value, stream = randoms(4).to("cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        grad.copy_(value)
        fused_updates.make_step(ADAMW.tensors, ours, grad, ADAMS[0], scratch("cuda"))
    stream.synchronize()
    same_bits(ours, theirs)


@pytest.mark.parametrize(("rule", "scalars"), [RULES[0], next(one for one in RULES if one[0] is SGD)])
def test_elsewhere_a_step_is_that_of_torchs_operations(rule, scalars):
    ours, theirs = fields("bf16", rule), fields("bf16", rule)
    fused_updates.make_step(rule.tensors, ours, randoms(4), scalars, scratch())
    steps.make_step(rule.tensors, theirs, randoms(4), scalars, scratch())
    same_bits(ours, theirs)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_where_the_kernel_cannot_be_had_it_is_said_why(caplog):
    fused_updates.kernel_of.cache_clear()
    with caplog.at_level(logging.WARNING, logger="infinity"):
        assert fused_updates.kernel_of(torch.device("cuda", 0)) is None
    assert "could not be had: this torch is not built for CUDA" in caplog.text

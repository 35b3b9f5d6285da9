"""Trusted: torch.optim.AdamW, in fp32 and in fp64. Faked: nothing.

Differences are given in ULPs of 0.02, the standard deviation of the weights drawn: 2 ** -29. (A weight that
crosses zero has an ULP as small as one likes, but not the errors of the steps that took it there.)
Measured, kernel against torch's fp32: at most 4 of them after 1 and 10 steps, 8 after 100, 20 after 1000.
"""

import pytest
import torch

from infinity import kernels

N, STD, ULP = 100_000, 0.02, 2.0**-29


def draw(steps):
    """Draw gradients of a different size for each weight and step, over six orders of magnitude."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield torch.randn(N, generator=generator) * 10.0 ** torch.randint(-6, 1, (N,), generator=generator)


def trained_by_torch(start, steps):
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, foreach=False, fused=False)
    for gradient in draw(steps):
        parameter.grad = gradient.to(start.dtype)
        optimizer.step()
    return parameter.detach().double()


def trained_by_kernel(start, steps):
    hi, lo = (torch.empty(N, dtype=torch.int16) for _ in range(2))
    m, v, master = torch.zeros(N), torch.zeros(N), torch.empty(N)
    kernels.split(N, start.data_ptr(), hi.data_ptr(), lo.data_ptr())
    for step, gradient in enumerate(draw(steps), start=1):
        scalars = kernels.AdamWScalars(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=step)
        fields = (hi, lo, m, v, gradient)
        kernels.adamw(N, *(field.data_ptr() for field in fields), "f32", scalars)
    kernels.join(N, hi.data_ptr(), lo.data_ptr(), master.data_ptr())
    return master.double()


@pytest.mark.parametrize(("steps", "ulps"), [(1, 4), (10, 8), (100, 16)])
def test_masters_stay_within_the_stated_ulps_of_torchs(steps, ulps):
    start = torch.randn(N, generator=torch.Generator().manual_seed(4)) * STD
    ours, theirs = trained_by_kernel(start, steps), trained_by_torch(start, steps)
    assert (ours - theirs).abs().max() <= ulps * ULP


def test_masters_are_as_close_to_exact_arithmetic_as_torchs():
    start = torch.randn(N, generator=torch.Generator().manual_seed(4)) * STD
    exact = trained_by_torch(start.double(), 30)
    ours, theirs = ((train(start, 30) - exact).abs() for train in (trained_by_kernel, trained_by_torch))
    assert ours.mean() <= 1.01 * theirs.mean()
    assert ours.max() <= 1.1 * theirs.max()

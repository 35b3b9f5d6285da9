"""Infinity's split masters and AdamW kernel in a plain training loop, without the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from infinity import kernels


def adamw(
    model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Callable[[], None]:
    """Split a model's fp32 weights into bf16 ones and remainders, in memory; return AdamW's step.

    The step rounds as Infinity does: losses equal those of exact state, bit for bit.
    """
    weights = list(model.parameters())
    remainders = [torch.empty(weight.shape, dtype=torch.int16) for weight in weights]
    for weight, lo in zip(weights, remainders, strict=True):
        hi = torch.empty(weight.shape, dtype=torch.bfloat16)
        kernels.split(weight.numel(), weight.data_ptr(), hi.data_ptr(), lo.data_ptr())
        weight.data = hi
    moments = [(torch.zeros(weight.shape), torch.zeros(weight.shape)) for weight in weights]
    count_of_steps = itertools.count(1)

    @torch.no_grad()
    def step() -> None:
        scalars = kernels.AdamWScalars(lr, *betas, eps, weight_decay, next(count_of_steps))
        for hi, lo, (m, v) in zip(weights, remainders, moments, strict=True):
            if hi.grad is None:
                continue
            grad = hi.grad.contiguous()
            weight_and_moments = hi.data_ptr(), lo.data_ptr(), m.data_ptr(), v.data_ptr()
            kernels.adamw(hi.numel(), *weight_and_moments, grad.data_ptr(), "bf16", scalars)
            hi.grad = None

    return step

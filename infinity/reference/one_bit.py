"""1-bit Adam in plain torch (Tang et al., arXiv 2102.02888), in one process that has the gradients of all.

[Note: 1-bit Adam]
Up to step `freeze_step` it is AdamW of the mean of all gradients. Then the variance v stays as it is, and
each *worker*, a rank, or a machine of several, has a momentum w of its own gradients, which begins as the
common m, and an error e, which begins as zeros. In a step
    w = beta1 w + (1 - beta1) g;  u = w + e;  sent = sign(u) scale;  e = u - sent
where the scale of each 256 elements of a parameter, counted from its first, is the mean of |u|, and the sign
of zero is plus. The momentum m of the step is the mean of what all workers have sent; weights move by
    p = p (1 - lr weight_decay) - lr / (1 - beta1^step) m / (sqrt(v) / sqrt(1 - beta2^freeze_step) + eps)
where v is not zero. Where it is, no gradient has come until it was frozen, as of a token that was not seen:
the scale of the block, which has a sign there, too, would be divided by eps alone. Such weights decay, and
move no more.
The paper codes the mean once more, on its way back to the workers. Here each rank applies its share of the
mean itself, and the weights are assembled from these: nothing goes back, and has an error there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infinity.reference.recipe import f32, root

BLOCK = 256


def scales_of(blocks: Tensor, counts: Tensor) -> Tensor:
    """Return the mean magnitude of each row of BLOCK elements, `counts` of which count, the others zeros:
    sums of pairs, of pairs of these, and so on.
    """
    sums = blocks.abs()
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0] / counts


def as_sent(u: Tensor) -> Tensor:
    """Return what comes of a parameter's values when they are sent in one bit each."""
    numel = u.numel()
    blocks = u.new_zeros(-(-numel // BLOCK) * BLOCK)
    blocks[:numel] = u.flatten()
    counts = torch.tensor(
        [float(min(BLOCK, numel - start)) for start in range(0, numel, BLOCK)], dtype=torch.float32
    )
    scales = scales_of(blocks.view(-1, BLOCK), counts).repeat_interleave(BLOCK)[:numel].view(u.shape)
    return torch.where(u < 0, -scales, scales)


def send(w: Tensor, e: Tensor, gradient: Tensor, beta1: float) -> Tensor:
    """Update a worker's momentum and error in place; return what it sends. All are fp32."""
    w.mul_(f32(beta1)).add_(gradient * f32(1 - beta1))
    u = w + e
    sent = as_sent(u)
    e.copy_(u - sent)
    return sent


def mean_of(sent: Sequence[Tensor]) -> Tensor:
    """Return the mean of what workers send, added in their order."""
    total = sent[0].clone()
    for one in sent[1:]:
        total += one
    return total / f32(len(sent))


def frozen_step(p: Tensor, m: Tensor, v: Tensor, step: int, group: dict[str, Any]) -> None:
    """Move fp32 weights by the momentum `m` of this step, with the variance `v` of step freeze_step; those
    without one stay.
    """
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    p.mul_(f32(1 - lr * group["weight_decay"]))
    denominator = root(v) / f32((1 - beta2 ** group["freeze_step"]) ** 0.5) + f32(group["eps"])
    moved = (f32(-(lr / (1 - beta1**step))) * m) / denominator
    p.add_(torch.where(v == 0, torch.zeros_like(moved), moved))

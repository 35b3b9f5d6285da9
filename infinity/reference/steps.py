"""The steps of the optimizers other than AdamW, in plain torch.

All work in place on fp32 masters and moments, in the order of [Note: other recipes] in kernels.h, each
operation rounded by itself; the kernels give the same bits. `grad` has any floating dtype, `clip` is an fp32
scalar tensor, `step` is this step's count, and `group` a param group with torch.optim's names. Every NaN is
stored as 0x7FC00000. torch.optim's own steps fuse multiplications with additions, so they round differently.
"""

import math
from typing import Any

import torch
from torch import Tensor

from infinity.reference.recipe import adamw_step, canonical_, f32, root


def _gradient(p: Tensor, grad: Tensor, clip: Tensor, weight_decay: float) -> Tensor:
    """Return the fp32 gradient, scaled by `clip`, with L2 decay."""
    g = grad.float() * clip
    return g + f32(weight_decay) * p if weight_decay else g


def adam_step(
    p: Tensor, m: Tensor, v: Tensor, grad: Tensor, clip: Tensor, step: int, group: dict[str, Any]
) -> None:
    """Apply a step of Adam; the weight decay is part of the gradient."""
    g = _gradient(p, grad, clip, group["weight_decay"])
    adamw_step(p, m, v, g, f32(1.0), step, {**group, "weight_decay": 0.0})


def sgd_step(p: Tensor, m: Tensor, grad: Tensor, clip: Tensor, step: int, group: dict[str, Any]) -> None:
    """Apply a step of SGD; `m` is the momentum, which the first step does not read."""
    momentum = f32(group["momentum"])
    g = _gradient(p, grad, clip, group["weight_decay"])
    m.copy_(g if step == 1 else m * momentum + f32(1 - group["dampening"]) * g)
    direction = g + momentum * m if group["nesterov"] else m
    p.add_(f32(-group["lr"]) * direction)
    canonical_(p)
    canonical_(m)


def adagrad_step(p: Tensor, v: Tensor, grad: Tensor, clip: Tensor, step: int, group: dict[str, Any]) -> None:
    """Apply a step of Adagrad; `v` is the sum of squared gradients."""
    g = _gradient(p, grad, clip, group["weight_decay"])
    v.add_(g * g)
    lr = group["lr"] / (1 + (step - 1) * group["lr_decay"])
    p.add_((f32(-lr) * g) / (root(v) + f32(group["eps"])))
    canonical_(p)
    canonical_(v)


def lion_step(p: Tensor, m: Tensor, grad: Tensor, clip: Tensor, group: dict[str, Any]) -> None:
    """Apply a step of Lion (Chen et al., arXiv 2302.06675); `group` holds lr, betas and weight_decay."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    g = grad.float() * clip
    p.mul_(f32(1 - lr * group["weight_decay"]))
    direction = m * f32(beta1) + f32(1 - beta1) * g
    p.add_(f32(-lr) * torch.sign(direction))  # of a NaN, torch's sign is 0
    m.copy_(m * f32(beta2) + f32(1 - beta2) * g)
    canonical_(p)
    canonical_(m)


def muon_step(p: Tensor, m: Tensor, grad: Tensor, clip: Tensor, group: dict[str, Any]) -> None:
    """Apply a step of Muon to a matrix, or to each of a stack of them [..., rows, columns], with the very
    operations of torch.optim.Muon: here the bits are torch's own, on the same number of threads.
    """
    if p.dim() > 2:
        for one in zip(p, m, grad, strict=True):
            muon_step(*one, clip, group)
        return
    lr, momentum, (rows, columns) = float(group["lr"]), group["momentum"], p.shape
    g = grad.float() * clip
    m.lerp_(g, 1 - momentum)
    direction = _newton_schulz(g.lerp(m, momentum) if group["nesterov"] else m, group)
    ratio = math.sqrt(max(1, rows / columns))
    if group["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, columns))
    p.mul_(1 - lr * group["weight_decay"])
    p.add_(direction, alpha=-(lr * ratio))


def _newton_schulz(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """Orthogonalize a matrix, roughly, in bf16 (Jordan et al., "Muon", 2024)."""
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(torch.bfloat16, copy=True)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=group["eps"]))
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x

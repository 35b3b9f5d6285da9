"""Steps of the optimizers over tensors, on any device: for records that live on an accelerator.

[Note: steps without kernels of our own]
A step here is a sequence of torch's own operations, each of which rounds once: in the order of [Note: the
adamw step] and [Note: other recipes] in kernels.h, so that its bits are those of the CPU's kernels. Assumed
is IEEE arithmetic in fp32 and fp64 without flushing of subnormals, as torch's kernels for CUDA and ROCm are
built, and nothing beyond it: no operation both multiplies and adds (addcmul, addcdiv, lerp, add with alpha),
since a compiler may contract these to an FMA; a division is by a tensor of the device, since torch's CUDA
kernels multiply by the reciprocal of a number; square roots are taken in fp64, in which the rounding to fp32
is that of the exact root.

Intermediate values lie in memory that the caller gives once, in chunks: so a step takes no other memory, not
of a scalar, whatever the size of the record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.kernels.operations import rounded

_WORDS = 3
_NBYTES = 8 + 4 * _WORDS + 1
"""Of an element: an fp64 value, three of 32 bits, and a mask."""
_SCALARS_NBYTES = 64
"""Behind the elements: an fp64 value, and one in fp32."""
_ALIGN_NUMEL = 64


class Scratch:
    """Memory for the intermediate values of a step over `numel` elements at once."""

    def __init__(self, memory: Tensor) -> None:
        """Use `memory`, bytes, as far as it goes.

        Raises: ValueError where it holds fewer than 64 elements.
        """
        self.numel = self.numel_of(memory.numel())
        if not self.numel:
            raise ValueError(f"{memory.numel()} bytes: expected {self.nbytes_of(_ALIGN_NUMEL)} at least")
        words = memory[8 * self.numel : (8 + 4 * _WORDS) * self.numel].view(torch.float32)
        self._wide = memory[: 8 * self.numel].view(torch.float64)
        self._words = words.view(_WORDS, self.numel)
        self._mask = memory[(8 + 4 * _WORDS) * self.numel :][: self.numel].view(torch.bool)
        scalars = memory[_NBYTES * self.numel :][:_SCALARS_NBYTES]
        self.sum = scalars[:8].view(torch.float64)[0]
        """A scalar in fp64."""
        self._divisor = scalars[8:12].view(torch.float32)[0]

    @staticmethod
    def numel_of(nbytes: int) -> int:
        """Return how many elements so many bytes are for."""
        return max(0, nbytes - _SCALARS_NBYTES) // _NBYTES // _ALIGN_NUMEL * _ALIGN_NUMEL

    @staticmethod
    def nbytes_of(numel: int) -> int:
        """Return the bytes for `numel` elements at once."""
        return _NBYTES * -(-numel // _ALIGN_NUMEL) * _ALIGN_NUMEL + _SCALARS_NBYTES

    def first(self, numel: int) -> Values:
        """Return memory for `numel` elements."""
        master, grad, other = (word[:numel] for word in self._words)
        return Values(master, grad, other, self._wide[:numel], self._mask[:numel], self._divisor)


class Values:
    """Intermediate values of a chunk, each [numel]: the fp32 master and gradient, another, one in fp64; and a
    scalar in fp32, `divisor`.
    """

    __slots__ = ("divisor", "grad", "mask", "master", "other", "wide")

    def __init__(
        self, master: Tensor, grad: Tensor, other: Tensor, wide: Tensor, mask: Tensor, divisor: Tensor
    ) -> None:
        """Take them."""
        self.master, self.grad, self.other, self.wide, self.mask = master, grad, other, wide, mask
        self.divisor = divisor

    def root(self, values: Tensor) -> Tensor:
        """Return correctly rounded fp32 square roots, in `other`."""
        self.wide.copy_(values).sqrt_()
        return self.other.copy_(self.wide)

    def divide(self, values: Tensor, by: float) -> Tensor:
        """Divide in place, by a number that is rounded to fp32."""
        return values.div_(self.divisor.fill_(by))

    def canonical(self, *values: Tensor) -> None:
        """Replace every NaN by 0x7FC00000, in place."""
        for one in values:
            torch.ne(one, one, out=self.mask)
            one.masked_fill_(self.mask, math.nan)


TensorStep = Callable[[Tensor, Mapping[str, Tensor], Values, Any], None]
"""Makes a step of a chunk in place, given the fp32 master, the moments by field, the intermediate values,
whose `grad` is the gradient, and the recipe's scalars. All but the master and the moments may be overwritten.
"""


@torch.no_grad()
def make_step(
    step: TensorStep, at: Mapping[str, Tensor], grad: Tensor | None, scalars: Any, scratch: Scratch
) -> None:
    """Make a step of a part of a record, in place.

    at: its fields by name, each [numel] on one device: `hi`, in fp32 or, beside `lo` in int16, in bf16, and
    the moments in fp32. grad: the gradient, contiguous, any floating type; None for one of zeros.
    """
    numel = at["hi"].numel()
    for start in range(0, numel, scratch.numel):
        stop = min(start + scratch.numel, numel)
        part = {name: one[start:stop] for name, one in at.items()}
        values = scratch.first(stop - start)
        if grad is None:
            values.grad.zero_()
        else:
            values.grad.copy_(grad.view(-1)[start:stop])
        if "lo" not in part:
            step(part["hi"], part, values, scalars)
            continue
        _join(part["hi"], part["lo"], values)
        step(values.master, part, values, scalars)
        _split(part["hi"], part["lo"], values)


def _join(hi: Tensor, lo: Tensor, values: Values) -> None:
    """Put the masters of split ones into `values`."""
    bits, other = values.master.view(torch.int32), values.other.view(torch.int32)
    bits.copy_(hi.view(torch.int16)).mul_(1 << 16)
    bits.add_(other.copy_(lo))


def _split(hi: Tensor, lo: Tensor, values: Values) -> None:
    """Undo `_join`: [Note: the split master] in reference/recipe.py."""
    bits, other = values.master.view(torch.int32), values.other.view(torch.int32)
    other.copy_(bits).add_(0x8000).bitwise_right_shift_(16)
    hi.view(torch.int16).copy_(other)
    lo.copy_(bits)  # its lower half


def _f32(value: float) -> float:
    return float(np.float32(value))


def adamw(p: Tensor, at: Mapping[str, Tensor], values: Values, scalars: Any) -> None:
    """AdamW: [Note: the adamw step]."""
    struct = rounded(scalars)
    values.grad.mul_(struct.clip)
    p.mul_(struct.decay)
    _adam(p, at["m"], at["v"], values, struct)


def adam(p: Tensor, at: Mapping[str, Tensor], values: Values, scalars: Any) -> None:
    """Adam, whose weight decay is part of the gradient."""
    struct = rounded(scalars)
    _scale_gradient(p, values, struct.clip, struct.l2)
    _adam(p, at["m"], at["v"], values, struct)


def _adam(p: Tensor, m: Tensor, v: Tensor, values: Values, struct: Any) -> None:
    g, other = values.grad, values.other
    torch.sub(g, m, out=other).mul_(struct.lerp_weight)
    torch.add(g if struct.lerp_from_grad else m, other, out=m)
    v.mul_(struct.beta2)
    v.add_(torch.mul(g, struct.grad_weight, out=other).mul_(g))
    denominator = values.divide(values.root(v), struct.denom_divisor).add_(struct.eps)
    p.add_(torch.mul(m, struct.step_factor, out=g).div_(denominator))
    values.canonical(p, m, v)


def _scale_gradient(p: Tensor, values: Values, clip: float, weight_decay: float) -> None:
    values.grad.mul_(_f32(clip))
    if weight_decay:
        values.grad.add_(torch.mul(p, _f32(weight_decay), out=values.other))


def sgd(p: Tensor, at: Mapping[str, Tensor], values: Values, scalars: Any) -> None:
    """SGD, with momentum where the record has room for it."""
    _scale_gradient(p, values, scalars.clip, scalars.weight_decay)
    g, m = values.grad, at.get("m")
    if m is None:
        direction = g
    else:
        if scalars.step == 1:
            m.copy_(g)
        else:
            m.mul_(_f32(scalars.momentum))
            m.add_(torch.mul(g, _f32(1 - scalars.dampening), out=values.other))
        direction = m
        if scalars.nesterov:
            direction = g.add_(torch.mul(m, _f32(scalars.momentum), out=values.other))
    p.add_(torch.mul(direction, _f32(-scalars.lr), out=values.other))
    values.canonical(p, *(() if m is None else (m,)))


def adagrad(p: Tensor, at: Mapping[str, Tensor], values: Values, scalars: Any) -> None:
    """Adagrad."""
    _scale_gradient(p, values, scalars.clip, scalars.weight_decay)
    g, v = values.grad, at["v"]
    v.add_(torch.mul(g, g, out=values.other))
    denominator = values.root(v).add_(_f32(scalars.eps))
    factor = -(scalars.lr / (1 + (scalars.step - 1) * scalars.lr_decay))
    p.add_(g.mul_(_f32(factor)).div_(denominator))
    values.canonical(p, v)


def lion(p: Tensor, at: Mapping[str, Tensor], values: Values, scalars: Any) -> None:
    """Lion."""
    g, m, other = values.grad.mul_(_f32(scalars.clip)), at["m"], values.other
    p.mul_(_f32(1 - scalars.lr * scalars.weight_decay))
    torch.mul(m, _f32(scalars.beta1), out=other)
    wide = values.wide.copy_(g)  # kept: the moment needs the gradient once more
    other.add_(g.mul_(_f32(1 - scalars.beta1)))
    p.add_(other.sign_().mul_(_f32(-scalars.lr)))
    g.copy_(wide).mul_(_f32(1 - scalars.beta2))
    m.mul_(_f32(scalars.beta2)).add_(g)
    values.canonical(p, m)


@torch.no_grad()
def square_sum(grad: Tensor, scratch: Scratch, total: Tensor) -> None:
    """Put the fp64 sum of the fp64 squares of a contiguous gradient into `total`, a scalar on its device.

    Each square is exact. Chunks are summed by torch, in an order of its own, and added in order: the sum may
    differ from the CPU's kernels' in its last places, as theirs does from the reference recipe's, far below
    what is left when the norm is rounded to fp32.
    """
    total.zero_()
    flat = grad.view(-1)
    for start in range(0, flat.numel(), scratch.numel):
        chunk = flat[start : start + scratch.numel]
        wide = scratch.first(chunk.numel()).wide.copy_(chunk)
        total.add_(torch.sum(wide.mul_(wide), 0, out=scratch.sum))

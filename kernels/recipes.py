"""The steps of other records and other optimizers, with checks: [Note: other recipes] in kernels.h.

All work in place on n elements; every moment is fp32. `dtype` is that of the gradient, which is only read.
`scalars.clip` is an fp32 factor on it: of clipping, the inverse of a loss scale, or their product.
`sums` as in `adamw`.
"""

from functools import lru_cache
from typing import Any

from infinity.kernels.checksums import Checksums
from infinity.kernels.library import ffi, library
from infinity.kernels.operations import AnyGradientDtype, as_f32, as_i16, as_u16, check, rounded, summed
from infinity.kernels.scalars import AdagradScalars, AdamWScalars, LionScalars, SGDScalars

_TYPES = {"bf16": 0, "f32": 1, "f16": 2}  # as in kernels.h


def type_of(dtype: str) -> int:
    """Return the number that stands for the type of an argument in kernels.h."""
    if dtype not in _TYPES:
        message = f"dtype={dtype!r}: expected 'bf16', 'f32' or 'f16'"
        raise ValueError(message)
    return _TYPES[dtype]


def _any(address: int) -> Any:
    return ffi.cast("void *", address)


@lru_cache(maxsize=64)
def rounded_sgd(scalars: SGDScalars) -> Any:
    """Return the C struct: each scalar computed in fp64, then rounded to fp32 by the assignment."""
    struct = ffi.new("struct infinity_sgd *")
    struct.clip = scalars.clip
    struct.l2 = scalars.weight_decay
    struct.momentum = scalars.momentum
    struct.grad_weight = 1 - scalars.dampening
    struct.step_factor = -scalars.lr
    struct.is_first = scalars.step == 1
    struct.is_nesterov = scalars.nesterov
    return struct


@lru_cache(maxsize=64)
def rounded_adagrad(scalars: AdagradScalars) -> Any:
    """Return the C struct, each scalar as in `rounded_sgd`."""
    struct = ffi.new("struct infinity_adagrad *")
    struct.clip = scalars.clip
    struct.l2 = scalars.weight_decay
    struct.eps = scalars.eps
    struct.step_factor = -(scalars.lr / (1 + (scalars.step - 1) * scalars.lr_decay))
    return struct


@lru_cache(maxsize=64)
def rounded_lion(scalars: LionScalars) -> Any:
    """Return the C struct, each scalar as in `rounded_sgd`."""
    struct = ffi.new("struct infinity_lion *")
    struct.clip = scalars.clip
    struct.decay = 1 - scalars.lr * scalars.weight_decay
    struct.beta1 = scalars.beta1
    struct.grad_weight1 = 1 - scalars.beta1
    struct.beta2 = scalars.beta2
    struct.grad_weight2 = 1 - scalars.beta2
    struct.step_factor = -scalars.lr
    return struct


def adamw_fp16(
    n: int,
    weight: int,
    master: int,
    m: int,
    v: int,
    grad: int,
    dtype: AnyGradientDtype,
    scalars: AdamWScalars,
    sums: Checksums | None = None,
) -> None:
    """Apply the step of `adamw` to the fp16 record: fp32 masters, and weights that get their values in fp16.

    A master of 65520 or more rounds to infinity, as in torch's .half(). The weight is only written.
    """
    check(n, weight=weight, master=master, m=m, v=v, grad=grad)
    fields = (as_u16(weight), as_f32(master), as_f32(m), as_f32(v), _any(grad), type_of(dtype))
    library.infinity_adamw_half(n, *fields, rounded(scalars), *summed(sums))


def adamw_fp32(
    n: int,
    weight: int,
    m: int,
    v: int,
    grad: int,
    dtype: AnyGradientDtype,
    scalars: AdamWScalars,
    sums: Checksums | None = None,
) -> None:
    """Apply the step of `adamw` to the fp32 record, whose weights are their own masters."""
    check(n, weight=weight, m=m, v=v, grad=grad)
    fields = (as_f32(weight), as_f32(m), as_f32(v), _any(grad), type_of(dtype))
    library.infinity_adamw_full(n, *fields, rounded(scalars), *summed(sums))


def adam(
    n: int,
    hi: int,
    lo: int,
    m: int,
    v: int,
    grad: int,
    dtype: AnyGradientDtype,
    scalars: AdamWScalars,
    sums: Checksums | None = None,
) -> None:
    """Apply one Adam step to split masters: the weight decay is added to the gradient (L2)."""
    check(n, hi=hi, lo=lo, m=m, v=v, grad=grad)
    fields = (as_u16(hi), as_i16(lo), as_f32(m), as_f32(v), _any(grad), type_of(dtype))
    library.infinity_adam(n, *fields, rounded(scalars), *summed(sums))


def sgd(
    n: int,
    hi: int,
    lo: int,
    m: int,
    grad: int,
    dtype: AnyGradientDtype,
    scalars: SGDScalars,
    sums: Checksums | None = None,
) -> None:
    """Apply one step of SGD to split masters; m is the momentum, which the first step only writes."""
    check(n, hi=hi, lo=lo, m=m, grad=grad)
    fields = (as_u16(hi), as_i16(lo), as_f32(m), _any(grad), type_of(dtype))
    library.infinity_sgd(n, *fields, rounded_sgd(scalars), *summed(sums))


def adagrad(
    n: int,
    hi: int,
    lo: int,
    v: int,
    grad: int,
    dtype: AnyGradientDtype,
    scalars: AdagradScalars,
    sums: Checksums | None = None,
) -> None:
    """Apply one Adagrad step to split masters; v is the sum of squares, initialised by the caller."""
    check(n, hi=hi, lo=lo, v=v, grad=grad)
    fields = (as_u16(hi), as_i16(lo), as_f32(v), _any(grad), type_of(dtype))
    library.infinity_adagrad(n, *fields, rounded_adagrad(scalars), *summed(sums))


def lion(
    n: int,
    hi: int,
    lo: int,
    m: int,
    grad: int,
    dtype: AnyGradientDtype,
    scalars: LionScalars,
    sums: Checksums | None = None,
) -> None:
    """Apply one Lion step to split masters: each weight moves by lr in the direction of its momentum."""
    check(n, hi=hi, lo=lo, m=m, grad=grad)
    fields = (as_u16(hi), as_i16(lo), as_f32(m), _any(grad), type_of(dtype))
    library.infinity_lion(n, *fields, rounded_lion(scalars), *summed(sums))

"""The weights of each record: how the fp32 master and what computes are kept, and turned into each other.

[Note: three records]
bf16   hi, lo       the halves of the master: every bit of it comes back; see kernels
fp16   hi, master   16 more bits cannot rebuild an fp32 master from an fp16: hi is its rounding, ties to even
fp32   hi           is its own master
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from infinity import kernels
from infinity.storage.memory import view

At = Mapping[str, int]
"""Addresses of a record's fields, by their names."""

KERNEL_DTYPE: dict[torch.dtype, kernels.AnyGradientDtype] = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
}
"""Types of gradients, as kernels call them."""

ACCUMULATE: dict[torch.dtype, Callable[[int, int, int], None]] = {
    torch.bfloat16: kernels.accumulate,
    torch.float16: kernels.accumulate_f16,
    torch.float32: kernels.accumulate_f32,
}
"""fp32 += a gradient: (n, acc, grad)."""


def _copy_f32(n: int, source: int, target: int) -> None:
    kernels.copy(4 * n, target, source)


WIDEN: dict[torch.dtype, Callable[[int, int, int], None]] = {
    torch.bfloat16: kernels.widen,
    torch.float16: kernels.widen_f16,
    torch.float32: _copy_f32,
}
"""A gradient to fp32: (n, source, target)."""

NARROW: dict[torch.dtype, Callable[[int, int, int], None]] = {
    torch.bfloat16: kernels.narrow,
    torch.float16: kernels.narrow_f16,
    torch.float32: _copy_f32,
}
"""fp32 to a gradient's type, ties to even: (n, source, target)."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What is done with n elements of a record's weights; see [Note: three records]."""

    dtype: torch.dtype
    """Of `hi`, which computes."""
    overflows: bool
    """Whether gradients of this type need a scaled loss."""
    read_master: Callable[[int, At, int], None]
    """Put the fp32 master at an address."""
    write_master: Callable[[int, int, At], None]
    """Take the fp32 master from an address."""
    take: Callable[[int, int, At], None]
    """Take weights, of the type that computes, which are their own masters."""
    rewrite: Callable[[int, int, At], None]
    """The same, but what did not change keeps its master."""
    rounded: Callable[[int, int, int], None]
    """Round fp32 masters to weights: (n, source, target)."""


def _take_bf16(n: int, source: int, at: At) -> None:
    kernels.copy(2 * n, at["hi"], source)
    ctypes.memset(at["lo"], 0, 2 * n)


def _round_bf16(n: int, source: int, target: int) -> None:
    lo = torch.empty(n, dtype=torch.int16)
    kernels.split(n, source, target, lo.data_ptr())


def _write_fp16(n: int, source: int, at: At) -> None:
    _copy_f32(n, source, at["master"])
    kernels.narrow_f16(n, at["master"], at["hi"])


def _take_fp16(n: int, source: int, at: At) -> None:
    kernels.copy(2 * n, at["hi"], source)
    kernels.widen_f16(n, at["hi"], at["master"])


def _rewrite_fp16(n: int, source: int, at: At) -> None:
    if not n:
        return
    new, hi = (torch.frombuffer(view(one, 2 * n), dtype=torch.int16) for one in (source, at["hi"]))
    master = torch.frombuffer(view(at["master"], 4 * n), dtype=torch.float32)
    changed = new != hi
    master[changed] = new[changed].view(torch.float16).float()
    hi.copy_(new)


def _take_fp32(n: int, source: int, at: At) -> None:
    _copy_f32(n, source, at["hi"])


WEIGHTS = {
    "bf16": Weights(
        torch.bfloat16,
        overflows=False,
        read_master=lambda n, at, to: kernels.join(n, at["hi"], at["lo"], to),
        write_master=lambda n, source, at: kernels.split(n, source, at["hi"], at["lo"]),
        take=_take_bf16,
        rewrite=lambda n, source, at: kernels.rewrite(n, source, at["hi"], at["lo"]),
        rounded=_round_bf16,
    ),
    "fp16": Weights(
        torch.float16,
        overflows=True,
        read_master=lambda n, at, to: _copy_f32(n, at["master"], to),
        write_master=_write_fp16,
        take=_take_fp16,
        rewrite=_rewrite_fp16,
        rounded=kernels.narrow_f16,
    ),
    "fp32": Weights(
        torch.float32,
        overflows=False,
        read_master=lambda n, at, to: _copy_f32(n, at["hi"], to),
        write_master=_take_fp32,
        take=_take_fp32,
        rewrite=_take_fp32,
        rounded=_copy_f32,
    ),
}
"""By the name of the type that computes, as Config and Format have it."""

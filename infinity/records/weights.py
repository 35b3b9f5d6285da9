"""The weights of each schema of a record: how the fp32 master and the compute weight are kept and converted.

[Note: three records]
bf16   hi, lo       the halves of the master, which join to its exact bits; see kernels
       hi, lo       with masters in 24 bits, lo in 8: an approximation, rounded at random where a step makes
                    it (records/update_rules.py), and to the nearest where values are given
fp16   hi, master   hi is the master rounded, ties to even; 16 more bits cannot restore an fp32 from an fp16
fp32   hi           its own master
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from infinity import kernels
from infinity.planning.layout import RecordSchema
from infinity.storage.memory import view

At = Mapping[str, int]
"""Addresses of a record's fields by name."""

KERNEL_DTYPE: dict[torch.dtype, kernels.AnyGradientDtype] = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
}
"""The kernels' names of gradient dtypes."""

ACCUMULATE: dict[torch.dtype, Callable[[int, int, int], None]] = {
    torch.bfloat16: kernels.accumulate,
    torch.float16: kernels.accumulate_f16,
    torch.float32: kernels.accumulate_f32,
}
"""Add a gradient to an fp32 sum: (n, sum, gradient)."""


def _copy_f32(n: int, source: int, target: int) -> None:
    kernels.copy(4 * n, target, source)


WIDEN: dict[torch.dtype, Callable[[int, int, int], None]] = {
    torch.bfloat16: kernels.widen,
    torch.float16: kernels.widen_f16,
    torch.float32: _copy_f32,
}
"""Convert a gradient to fp32: (n, source, target)."""

NARROW: dict[torch.dtype, Callable[[int, int, int], None]] = {
    torch.bfloat16: kernels.narrow,
    torch.float16: kernels.narrow_f16,
    torch.float32: _copy_f32,
}
"""Round fp32 to a gradient's dtype, ties to even: (n, source, target)."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Operations on n elements of a record's weights; see [Note: three records]."""

    dtype: torch.dtype
    """Of `hi`, the compute weight."""
    overflows: bool
    """Whether gradients of this dtype need loss scaling."""
    read_master: Callable[[int, At, int], None]
    """Copy the fp32 master to an address: (n, fields, target)."""
    write_master: Callable[[int, int, At], None]
    """Set the master, and with it the weights, from fp32 values: (n, source, fields)."""
    take: Callable[[int, int, At], None]
    """Set weights of the compute dtype, which become their own masters: (n, source, fields)."""
    rewrite: Callable[[int, int, At], None]
    """The same, but a weight that did not change keeps its master: (n, source, fields)."""
    rounded: Callable[[int, int, int], None]
    """Round fp32 masters to weights: (n, source, target)."""


def _take_bf16(n: int, source: int, at: At) -> None:
    kernels.copy(2 * n, at["hi"], source)
    ctypes.memset(at["lo"], 0, 2 * n)


def _round_bf16(n: int, source: int, target: int) -> None:
    lo = torch.empty(n, dtype=torch.int16, device="cpu")
    kernels.split(n, source, target, lo.data_ptr())


def _read_fp24(n: int, at: At, to: int) -> None:
    lo = torch.empty(n, dtype=torch.int16, device="cpu")
    kernels.widen_lo(n, at["lo"], lo.data_ptr())
    kernels.join(n, at["hi"], lo.data_ptr(), to)


def _write_fp24(n: int, source: int, at: At) -> None:
    lo = torch.empty(n, dtype=torch.int16, device="cpu")
    kernels.split(n, source, at["hi"], lo.data_ptr())
    kernels.round_lo(n, lo.data_ptr(), at["lo"])


def _take_fp24(n: int, source: int, at: At) -> None:
    kernels.copy(2 * n, at["hi"], source)
    ctypes.memset(at["lo"], 0, n)


def _rewrite_fp24(n: int, source: int, at: At) -> None:
    if not n:
        return
    new, hi = (torch.frombuffer(view(one, 2 * n), dtype=torch.int16) for one in (source, at["hi"]))
    torch.frombuffer(view(at["lo"], n), dtype=torch.int8)[new != hi] = 0
    hi.copy_(new)


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
"""By the name of the compute dtype in Config and RecordSchema, where masters are fp32."""

FP24 = Weights(
    torch.bfloat16,
    overflows=False,
    read_master=_read_fp24,
    write_master=_write_fp24,
    take=_take_fp24,
    rewrite=_rewrite_fp24,
    rounded=_round_bf16,
)

KEPT = {**WEIGHTS, "bf16, fp24": FP24}
"""By RecordSchema.kept."""


def compute_dtype(schema: RecordSchema) -> torch.dtype:
    """Return the type in which parameters compute that are in records of this schema: that of `hi`."""
    return WEIGHTS[schema.dtype].dtype

"""Matrix products of 16-bit tensors, also on CPUs without instructions for them.

[Note: products in fp32]
A CPU without bf16 instructions multiplies 16-bit matrices at a third to a fifth of its fp32 speed (measured:
27 to 45 against 130 Gflop/s). On such a CPU 16-bit operands are widened to fp32, a piece at a time, and the
results rounded: these are sums of the same products, in fp32 as before. Pieces are cut along the longest side
of a product, so that widened pieces, and a piece of the result, are small beside the operands. All pieces use
the same memory.

[Note: products by a kernel]
On a CPU with bf16 instructions torch computes the products, with two exceptions. A product that is added to
an fp32 sum: our kernel adds it in place, unrounded, in the time that torch needs for the product alone. And a
weight's gradient over few tokens, for which torch takes 5 % longer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from infinity import kernels
from infinity.kernels import MOST_ROWS, Rows
from infinity.tiling import mapped

WIDENED_NBYTES = 1 << 20
FEWEST_ROWS = 128
"""At most so many bytes are widened at a time, but at least so many elements of a product's longest side."""
Piece = tuple[slice, slice, torch.Tensor, torch.Tensor]


@functools.cache
def _multiplies_16_bit() -> bool:
    """Whether this CPU has instructions for 16-bit products."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # torch has no public names for them
    return any(getattr(torch.cpu, name)() for name in asked if hasattr(torch.cpu, name))


@functools.cache
def _has_amx() -> bool:
    """Whether torch multiplies 16-bit matrices with AMX, which is faster than our kernels."""
    found: Callable[[], bool] = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return found()


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are kept: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def in_fp32(one: torch.Tensor) -> bool:
    """Whether products with this tensor are faster in fp32: see [Note: products in fp32]."""
    return one.device.type == "cpu" and one.dtype.itemsize < 4 and not _multiplies_16_bit()


def product(left: torch.Tensor, right: torch.Tensor, memory: mapped.Allocator | None = None) -> torch.Tensor:
    """Return left @ right, [m, n] of [m, k] and [k, n], in their dtype. memory: for the result."""
    empty = mapped.empty if memory is None else memory.empty
    out = empty((left.shape[0], right.shape[1]), left.dtype, left.device)
    if left.stride(0) == 1 and left.shape[1] <= MOST_ROWS and _is_ours(out, left, right):
        kernels.product_bf16(*_operands(out, left, right))
        return out
    if not in_fp32(left):
        return torch.mm(left, right, out=out)
    if left.shape[1] == max(*left.shape, right.shape[1]):
        total = mapped.zeros(out.shape, torch.float32, out.device)
        add_product(total, left, right)
        return out.copy_(total)
    spare = Spare()
    for rows, columns, one, other in _pieces(left, right):
        found = spare.of((one.shape[0], other.shape[1]))
        out[rows, columns].copy_(torch.mm(one, other, out=found))
    return out


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to `total`, in the dtype of sums."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif in_fp32(left):
        for rows, columns, factor, another in _pieces(left, right):
            total[rows, columns].addmm_(factor, another)
    elif left.device.type != "cpu":
        total.add_(left.mm(right))
    elif _is_ours(total, left, right):
        kernels.add_product_bf16(*_operands(total, left, right))
    else:  # a piece at a time, which is still in the caches when it is added
        step = max(WIDENED_NBYTES // (right.shape[1] * left.dtype.itemsize or 1), FEWEST_ROWS)
        for first in range(0, len(left), step):
            part = slice(first, first + step)
            accumulate(total[part], left[part].mm(right))


def _is_ours(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether our kernel can compute this product and pays for packing: see [Note: products by a kernel]."""
    in_rows = 1 in left.stride() and right.stride(1) == out.stride(1) == 1
    large = min(*left.shape, *right.shape) >= FEWEST_ROWS
    ours = left.dtype == torch.bfloat16 and out.device.type == "cpu" and in_rows and large
    return ours and kernels.multiplies_bf16() and not _has_amx()


def _operands(
    out: torch.Tensor, left: torch.Tensor, right: torch.Tensor
) -> tuple[int, int, int, Rows, Rows, Rows, int]:
    """Return the arguments of the product kernels."""
    (m, k), n = left.shape, right.shape[1]
    one, other, there = (Rows(each.data_ptr(), *each.stride()) for each in (left.t(), right, out))
    return k, m, n, one, other, there, torch.get_num_threads()


_KERNELS = {torch.bfloat16: kernels.accumulate, torch.float16: kernels.accumulate_f16}


def accumulate(total: torch.Tensor, more: torch.Tensor) -> None:
    """Add `more` to a sum, in the sum's dtype.

    On the CPU a kernel adds 16 bits to fp32: torch's addition of two dtypes takes several times as long.
    """
    add = _KERNELS.get(more.dtype)
    on_cpu = total.device.type == more.device.type == "cpu"
    if add and on_cpu and total.dtype == torch.float32 and total.is_contiguous() and more.is_contiguous():
        add(total.numel(), total.data_ptr(), more.data_ptr())
    else:
        total.add_(more)


class Spare:
    """Reused fp32 CPU memory for matrices, one at a time."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def of(self, shape: Sequence[int]) -> torch.Tensor:
        """Return an uninitialised matrix."""
        numel = math.prod(shape)
        if self._memory is None or self._memory.numel() < numel:
            self._memory = mapped.empty((numel,), torch.float32, torch.device("cpu"))
        return self._memory[:numel].view(*shape)

    def widened(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a matrix in fp32, row-major or column-major as it was: transposing would take time."""
        if matrix.stride(0) < matrix.stride(1):
            return self.of(matrix.shape[::-1]).t().copy_(matrix)
        return self.of(matrix.shape).copy_(matrix)


def _pieces(left: torch.Tensor, right: torch.Tensor) -> Iterator[Piece]:
    """Yield rows and columns of the result, and the fp32 factors whose product is added there.

    The factors are valid until the next ones.
    """
    m, k, n = *left.shape, right.shape[1]
    longest = max(m, k, n)
    step = max(WIDENED_NBYTES // (4 * (m + k + n - longest) or 1), FEWEST_ROWS)
    parts = [slice(first, first + step) for first in range(0, longest, step)]
    every = slice(None)
    one, other = Spare(), Spare()
    if longest == k:
        yield from ((every, every, one.widened(left[:, part]), other.widened(right[part])) for part in parts)
    elif longest == n:
        whole = one.widened(left)
        yield from ((every, part, whole, other.widened(right[:, part])) for part in parts)
    else:
        whole = other.widened(right)
        yield from ((part, every, one.widened(left[part]), whole) for part in parts)

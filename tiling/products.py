"""Matrix products of 16-bit tensors, on a CPU that may have no instructions for them.

[Note: products in fp32]
A CPU without instructions for bf16 takes three to five times as long for products of 16-bit matrices as for
fp32 ones (measured: 27 to 45 against 130 Gflop/s). There 16-bit operands are widened, a piece at a time, and
results are rounded as before: sums of the same products, in fp32 as always. Pieces are cut along the longest
side of a product, so that what is widened, and a piece of the result, are small beside the operands.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

WIDENED_NBYTES = 1 << 20
FEWEST_ROWS = 128
"""Of a product's longest side, in one piece: at most so many bytes are widened, but so many rows at least."""
Piece = tuple[slice, slice, torch.Tensor, torch.Tensor]


@functools.cache
def _multiplies_16_bit() -> bool:
    """Whether this CPU has instructions for it."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # torch has no public names for them
    return any(getattr(torch.cpu, name)() for name in asked if hasattr(torch.cpu, name))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are kept in: fp32, fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def in_fp32(one: torch.Tensor) -> bool:
    """Whether products with this tensor are better made in fp32: see [Note: products in fp32]."""
    return one.device.type == "cpu" and one.dtype.itemsize < 4 and not _multiplies_16_bit()


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right, [m, n] of [m, k] and [k, n], in their dtype."""
    if not in_fp32(left):
        return left.mm(right)
    out = left.new_empty(left.shape[0], right.shape[1])
    if left.shape[1] == max(*left.shape, right.shape[1]):
        total = torch.zeros_like(out, dtype=torch.float32)
        add_product(total, left, right)
        return out.copy_(total)
    for rows, columns, one, other in _pieces(left, right):
        out[rows, columns].copy_(one.mm(other))
    return out


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to `total`, in the dtype of sums."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif in_fp32(left):
        for rows, columns, one, other in _pieces(left, right):
            total[rows, columns].addmm_(one, other)
    else:
        total.add_(left.mm(right))


def _pieces(left: torch.Tensor, right: torch.Tensor) -> Iterator[Piece]:
    """Yield rows and columns of the result, and factors in fp32 whose products add up to it."""
    m, k, n = *left.shape, right.shape[1]
    longest = max(m, k, n)
    step = max(WIDENED_NBYTES // (4 * (m + k + n - longest) or 1), FEWEST_ROWS)
    parts = [slice(first, first + step) for first in range(0, longest, step)]
    every = slice(None)
    if longest == k:
        yield from ((every, every, left[:, part].float(), right[part].float()) for part in parts)
    elif longest == n:
        whole = left.float()
        yield from ((every, part, whole, right[:, part].float()) for part in parts)
    else:
        whole = right.float()
        yield from ((part, every, left[part].float(), whole) for part in parts)

"""What ranks send in few bits, in plain torch: values as codes of 8 or 4 bits with a scale for each block of
256, and what ranks make of them, in one process. [Note: coded blocks] in kernels.h has the same rules, and
the kernels give the same bits. After ZeRO++ (Wang et al., arXiv 2306.10209): qwZ and qgZ.

[Note: what is coded]
Each parameter's values, and its gradient's, are coded by themselves, their blocks counted from the first
element: so weights do not depend on the number of ranks, nor on what goes together. A rank's own part is
coded as what it sends: all ranks compute with the same weights, and a sum does not depend on who makes it. Of
several machines, the sums of each are made first, in fp32, and coded, unrounded, for the second hop.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CODE_BLOCK = 256
LARGEST = {8: 127.0, 4: 7.0}
"""The largest code, by bits."""
LEAST_SCALE = 2.0**-100


def encode(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes, int8 each, and the fp32 scales of the blocks of values of one dimension."""
    numel = values.numel()
    blocks = values.new_zeros(-(-numel // CODE_BLOCK) * CODE_BLOCK, dtype=torch.float32)
    blocks[:numel] = values
    blocks = blocks.view(-1, CODE_BLOCK)
    largest = blocks.abs().amax(1) if numel else blocks.new_zeros(0)  # a NaN, where there is one
    scales = torch.clamp(largest / torch.full_like(largest, LARGEST[bits]), min=LEAST_SCALE)
    quotients = torch.round(blocks / scales[:, None])
    codes = torch.where(scales.isfinite()[:, None], quotients, torch.ones_like(quotients))
    return codes.flatten()[:numel].to(torch.int8), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Return fp32 values."""
    return codes.float() * scales.repeat_interleave(CODE_BLOCK)[: codes.numel()]


def as_sent(values: Tensor, bits: int) -> Tensor:
    """Return, in fp32 and their shape, what comes of values that are coded."""
    return decode(*encode(values.flatten(), bits)).view(values.shape)


def mean_over_ranks(
    rows: Sequence[Tensor], bits: int, machines: int = 1, errors: Sequence[Tensor] = ()
) -> Tensor:
    """Return the mean over all ranks of a parameter's gradients, of the same type; of so many machines, which
    the ranks fill one after the other. errors: what was left out of each rank's gradients before, and behind
    these, of several machines, of the sums of each, in fp32, which is added to them and replaced by what is
    left out now; none: it is lost.
    """
    near = len(rows) // machines
    came = _as_sent_with(rows, bits, errors[: len(rows)])
    sums = [_sum(came[first : first + near]) for first in range(0, len(rows), near)]
    total = _sum(_as_sent_with(sums, bits, errors[len(rows) :])) if machines > 1 else sums[0]
    return (total / torch.full_like(total, float(len(rows)))).to(rows[0].dtype)


def _as_sent_with(rows: Sequence[Tensor], bits: int, errors: Sequence[Tensor]) -> list[Tensor]:
    """Return what comes of values and their errors, if there are some, which become what is left out now."""
    if not errors:
        return [as_sent(one, bits) for one in rows]
    given = [row.float() + error for row, error in zip(rows, errors, strict=True)]
    came = [as_sent(one, bits) for one in given]
    for one, sent, error in zip(given, came, errors, strict=True):
        left = one - sent
        error.copy_(torch.where(left.isfinite(), left, error))
    return came


def _sum(rows: Sequence[Tensor]) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total

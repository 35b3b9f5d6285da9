"""What ranks send in few bits, in plain torch: values as codes of 8 or 4 bits with a scale for each block of
256, and what ranks make of them, in one process. [Note: coded blocks] in kernels.h has the same rules, and
the kernels give the same bits. After ZeRO++ (Wang et al., arXiv 2306.10209): qwZ and qgZ.

[Note: what is coded at once]
Each rank's share of a unit is coded by itself, its blocks counted from its first element: so the bits do not
depend on which units go in one collective. A rank's own share is coded as those that it sends: all ranks
compute with the same weights, and a sum does not depend on who makes it. Of several machines, the sums of
each are made first, in fp32, and coded, unrounded, for the second hop.
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
    """Return, in fp32, what comes of values that are coded."""
    return decode(*encode(values, bits))


def gathered(whole: Tensor, ranks: int) -> Tensor:
    """Return the values of a unit, cut evenly over `ranks`, that all of them compute with: int8."""
    return torch.cat([as_sent(share, 8).to(whole.dtype) for share in whole.chunk(ranks)])


def mean_of(rows: Sequence[Tensor], bits: int, machines: int = 1) -> Tensor:
    """Return the mean over ranks of a share of their gradients: all of a type, which the mean has too."""
    near, sums = len(rows) // machines, []
    for first in range(0, len(rows), near):
        came = [as_sent(row, bits) for row in rows[first : first + near]]
        sums.append(_sum(came))
    if machines > 1:
        sums = [as_sent(one, bits) for one in sums]
    total = _sum(sums)
    return (total / torch.full_like(total, float(len(rows)))).to(rows[0].dtype)


def _sum(rows: Sequence[Tensor]) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total

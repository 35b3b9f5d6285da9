"""The mean loss of a sequence whose tokens are on several ranks.

[Note: gradients of the mean]
The mean over a group's N ranks is the sum of their sums, divided by the number
of their labels; each rank sees that value. Its gradient, through what this rank computes, is this rank's
sum's, and the engine takes the mean of the gradients of all ranks: those of D groups with N ranks each. So
each rank's gradient is made N times as large: then the mean over D x N ranks is the mean over D groups of the
gradient of the group's mean, which is what D ranks with whole sequences would have.
"""

from __future__ import annotations

from typing import Any

import torch

from infinity.sequences.group import SequenceGroup


class MeanOverSequence(torch.autograd.Function):
    """The sums of all ranks, added in fp64 in the order of ranks, divided by the number of labels; rounded
    once.
    """

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """total: this rank's sum, a scalar. count: the number of labels of the group, fp64."""
        ctx.group, ctx.count = group, count
        ctx.dtype = total.dtype
        whole = torch.zeros((), dtype=torch.float64, device="cpu")
        for row in group.gather(total, "sum the losses of a sequence"):
            whole = whole + row[0]
        return (whole / count).to(total.device, total.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """See [Note: gradients of the mean]."""
        scale = (ctx.group.size / ctx.count).to(gradient.device, ctx.dtype)
        return None, gradient * scale, None

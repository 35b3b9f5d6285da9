"""Ulysses' two exchanges (arXiv 2309.14509), as functions of autograd: from parts of the tokens with all
heads to all tokens with a part of the heads, and back.

[Note: key heads on several ranks]
Where there are fewer key heads than ranks, each key head goes to several
ranks, whose query heads share it. In the backward each of these ranks has a gradient for it. The rank whose
tokens they are sums these in fp32, in the order of ranks, and rounds once: the bits depend on the number of
ranks alone.
"""

from __future__ import annotations

from typing import Any

import torch

from infinity.sequences.group import SequenceGroup

TO_HEADS, TO_TOKENS = "tokens to heads", "heads to tokens"


class ToHeads(torch.autograd.Function):
    """[batch, heads, tokens / N, width] of queries, keys and values, to [batch, heads / N, tokens, width].

    All three travel in one all-to-all, forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any, group: SequenceGroup, copies: int, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """parts: queries, keys, values. copies: the ranks that share one key head; see the module's note."""
        ctx.group, ctx.copies = group, copies
        sent = [parts[0], *(one.repeat_interleave(copies, 1) if copies > 1 else one for one in parts[1:])]
        ctx.shapes = [one.shape for one in sent]
        rows = [one.unflatten(1, (group.size, -1)).movedim(1, 0) for one in sent]
        received = _exchange(group, rows, TO_HEADS)
        return tuple(one.movedim(0, 2).flatten(2, 3) for one in received)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Bring the gradients back to the tokens' ranks."""
        rows = [one.unflatten(2, (ctx.group.size, -1)).movedim(2, 0) for one in gradients]
        received = _exchange(ctx.group, rows, TO_TOKENS)
        whole = [one.movedim(0, 1).reshape(shape) for one, shape in zip(received, ctx.shapes, strict=True)]
        if ctx.copies > 1:
            whole[1:] = [_sum_of_copies(one, ctx.copies) for one in whole[1:]]
        return None, None, *whole


class ToTokens(torch.autograd.Function):
    """[batch, tokens, heads / N, width] of what was attended to, to [batch, tokens / N, heads, width]."""

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, attended: torch.Tensor) -> torch.Tensor:
        """Bring the tokens back to their ranks."""
        ctx.group = group
        rows = attended.unflatten(1, (group.size, -1)).movedim(1, 0)
        (received,) = _exchange(group, [rows], TO_TOKENS)
        return received.movedim(0, 2).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Bring the gradients to the heads' ranks."""
        rows = gradient.unflatten(2, (ctx.group.size, -1)).movedim(2, 0)
        (received,) = _exchange(ctx.group, [rows], TO_HEADS)
        return None, received.movedim(0, 1).flatten(1, 2)


def _exchange(group: SequenceGroup, parts: list[torch.Tensor], what: str) -> list[torch.Tensor]:
    """Exchange the rows (the first dimension) of several tensors at once."""
    sent = torch.cat([one.reshape(group.size, -1) for one in parts], dim=1)
    received = group.exchange(sent, what).split([one[0].numel() for one in parts], dim=1)
    return [one.reshape(part.shape) for one, part in zip(received, parts, strict=True)]


def _sum_of_copies(gradient: torch.Tensor, copies: int) -> torch.Tensor:
    """Sum [batch, heads x copies, tokens, width] over the copies; see the module's note."""
    each = gradient.unflatten(1, (-1, copies)).unbind(2)
    total: torch.Tensor = each[0].float() if gradient.dtype != torch.float64 else each[0].clone()
    for one in each[1:]:
        total = total + one
    return total.to(gradient.dtype)

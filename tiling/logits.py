"""Cross entropy and its gradients over blocks of logits.

[Note: the loss of one token]
With logits z over V classes, label y, smoothing e and z-loss weight c:

    loss = lse - (1 - e) z_y - e/V sum(z) + c lse^2,   lse = log sum exp(z)

The loss depends on the logits of a token only through the three numbers lse, z_y and sum(z) (`LogitSums`),
and these can be accumulated over slices of the vocabulary. With the loss's derivatives a, b, d with respect
to the three, d loss / d z = a exp(z - lse) + b [at y] + d.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from infinity.tiling import mapped
from infinity.tiling.products import add_product, in_fp32, wide
from infinity.tiling.tile import GradientChannel, Kept

SMALLEST_NBYTES = 1 << 20
LARGEST_NBYTES = 128 << 20
BLOCKS = 20
"""Number of blocks in which fp32 logits are made: 16 are promised, the rest leaves room for small tensors."""
IN_CACHE_NBYTES = 2 << 20
"""Bytes of logits that several operations in a row read from the caches."""
_LIKELY = 1e-30
"""A probability that still has all its digits in fp32."""
WIDENED_NBYTES = 3 << 20
FEWEST_ROWS = 128
"""A 16-bit weight is widened at most so many bytes at a time, but at least so many rows."""
FEWEST_TOKENS = 128
"""In a block that reads the whole weight and its gradient: fewer tokens would wait for memory."""


class LogitSums(NamedTuple):
    """The three numbers per token on which the loss depends, [tokens] each."""

    lse: torch.Tensor  # log of the sum of exponentials
    at_label: torch.Tensor  # the label's logit; 0 if the label is in another slice of the vocabulary
    total: torch.Tensor  # sum of the logits; 0 without label smoothing


@dataclass(frozen=True, slots=True)
class Formula:
    """The loss: weight * the sum over tokens; see [Note: the loss of one token]."""

    classes: int
    label_smoothing: float
    z_loss: float

    def value(self, sums: LogitSums, weight: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        loss = sums.lse - (1 - self.label_smoothing) * sums.at_label
        if self.label_smoothing:
            loss = loss - self.label_smoothing / self.classes * sums.total
        if self.z_loss:
            loss = loss + self.z_loss * sums.lse.square()
        return loss.sum() * weight

    def derivatives(self, sums: LogitSums, weight: torch.Tensor) -> LogitSums:
        """Return the derivatives of the loss with respect to the three sums."""
        of_lse = weight.expand_as(sums.lse)
        return LogitSums(
            of_lse + 2 * self.z_loss * sums.lse * weight if self.z_loss else of_lse,
            -(1 - self.label_smoothing) * of_lse,
            -self.label_smoothing / self.classes * of_lse,
        )


def logits_of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return logits [tokens, classes] in fp32 (fp64 for fp64), bit for bit like a linear layer, then cast."""
    if in_fp32(hidden):
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    product = hidden.mm(weight.t()) if bias is None else torch.addmm(bias, hidden, weight.t())
    return product.to(wide(product.dtype))


def sums_of(logits: torch.Tensor, labels: torch.Tensor, start: int, *, smoothed: bool) -> LogitSums:
    """Return the sums over the logits of the classes from `start` on; the logits are overwritten."""
    total = logits.sum(-1) if smoothed else logits.new_zeros(len(logits))
    local, inside = _local(labels, start, logits.shape[-1])
    at_label = logits.gather(-1, local[:, None])[:, 0].where(inside, 0)
    top = logits.amax(-1)
    finite = top.where(top.isfinite(), 0)  # so that a slice of -inf only sums to 0 instead of NaN
    lse = logits.sub_(finite[:, None]).exp_().sum(-1).log_().add_(finite)
    return LogitSums(lse, at_label, total)


def derivative_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    start: int,
    lse: torch.Tensor,
    by: LogitSums,
    *,
    smoothed: bool,
) -> torch.Tensor:
    """Overwrite logits with the loss's derivative, given its derivatives `by` the three sums."""
    grad = logits.sub_(lse[:, None]).exp_().mul_(by.lse[:, None])
    local, inside = _local(labels, start, logits.shape[-1])
    grad.scatter_add_(-1, local[:, None], by.at_label.where(inside, 0)[:, None])
    return grad.add_(by.total[:, None]) if smoothed else grad


def derived(
    logits: torch.Tensor, labels: torch.Tensor, formula: Formula, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a block of tokens and its derivative, given their logits over the whole vocabulary.

    Both have the dtype of `weight`.
    """
    z = logits.to(weight.dtype)
    probabilities = torch.softmax(z, -1)
    smoothed = bool(formula.label_smoothing)
    total = z.sum(-1) if smoothed else z.new_zeros(len(z))
    at_label = z.gather(-1, labels[:, None])[:, 0]
    # softmax makes a single pass over the logits; a maximum and a sum of exponentials would be two.
    likely = probabilities.gather(-1, labels[:, None])[:, 0]
    lse = at_label - likely.log()
    if not bool((likely > _LIKELY).all()):
        lse = torch.where(likely > _LIKELY, lse, z.logsumexp(-1))
    sums = LogitSums(lse, at_label, total)
    by = formula.derivatives(sums, weight)
    grad = probabilities.mul_(by.lse[:, None])
    grad.scatter_add_(-1, labels[:, None], by.at_label[:, None])
    return formula.value(sums, weight), grad.add_(by.total[:, None]) if smoothed else grad


def _local(labels: torch.Tensor, start: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    local = labels - start
    inside = (local >= 0) & (local < classes)
    return local.where(inside, 0), inside


def block_of(length: int, width: int, blocks: int, fewest: int = 16) -> int:
    """Return how many of `length` rows of `width` logits to make at a time.

    About 1 in `blocks`, but 1 to 128 MiB of fp32 logits, and at least `fewest` rows, so that a matrix product
    is worth reading its operands.
    """
    nbytes = min(max(4 * length * width // blocks, SMALLEST_NBYTES), LARGEST_NBYTES)
    return min(max(nbytes // (4 * max(width, 1)), fewest), max(length, 1))


class OfTile(torch.autograd.Function):
    """The sums of the logits of one slice of the vocabulary; its backward computes the logits again.

    The weight's values are not saved: see [Note: what a tile saves] in tile.py. Forward and backward go over
    blocks of classes with all tokens, so a row of the weight's gradient is one sum over the tokens, rounded
    once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        start: int,
        smoothed: bool,  # noqa: FBT001
        channel: GradientChannel | None,
        link: torch.Tensor | None,  # noqa: ARG004 - of the channel
    ) -> tuple[torch.Tensor, ...]:
        """Return the three sums over classes start ... start + len(weight) - 1."""
        found: LogitSums | None = None
        step = block_of(len(weight), len(hidden), 64)  # small, as each block has copies in another dtype
        for first in range(0, len(weight), step):
            rows = slice(first, first + step)
            logits = logits_of(hidden, weight[rows], None if bias is None else bias[rows])
            more = sums_of(logits, labels, start + first, smoothed=smoothed)
            found = more if found is None else together([found, more])
        if found is None:
            raise ValueError("a vocabulary without classes has no loss")
        ctx.save_for_backward(hidden, labels, found.lse)
        ctx.weight, ctx.bias = Kept(weight), None if bias is None else Kept(bias)
        ctx.start, ctx.step, ctx.smoothed, ctx.channel = start, step, smoothed, channel
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of hidden, weight and bias."""
        hidden, labels, lse = ctx.saved_tensors
        weight, bias = ctx.weight.take(), None if ctx.bias is None else ctx.bias.take()
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        by_channel = ctx.needs_input_grad[7]
        total = torch.zeros_like(hidden, dtype=wide(hidden.dtype)) if for_hidden and not by_channel else None
        if by_channel:
            total = ctx.channel.total()
        grad_weight = mapped.empty(weight.shape, weight.dtype, weight.device) if for_weight else None
        grad_bias = torch.empty_like(bias) if for_bias and bias is not None else None
        for first in range(0, len(weight), ctx.step):
            rows = slice(first, first + ctx.step)
            part = weight[rows]
            logits = logits_of(hidden, part, None if bias is None else bias[rows])
            wide_grad = derivative_(
                logits, labels, ctx.start + first, lse, LogitSums(*grads), smoothed=ctx.smoothed
            )
            if grad_bias is not None:
                grad_bias[rows].copy_(wide_grad.sum(0))
            grad = wide_grad if in_fp32(hidden) else wide_grad.to(hidden.dtype)
            del logits, wide_grad
            if grad_weight is not None and in_fp32(hidden):
                grad_weight[rows].copy_(grad.t().mm(hidden.float()))
            elif grad_weight is not None:
                torch.mm(grad.t(), hidden, out=grad_weight[rows])
            part = part.to(grad.dtype)
            if total is not None:
                add_product(total, grad, part)
        grad_hidden = None if total is None or by_channel else total.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, ctx.channel and ctx.channel.sent()


def together(sums: list[LogitSums]) -> LogitSums:
    """Combine the sums over slices of the vocabulary."""
    if len(sums) == 1:
        return sums[0]
    lse = torch.logsumexp(torch.stack([one.lse for one in sums]), 0)
    at_label = torch.stack([one.at_label for one in sums]).sum(0)
    return LogitSums(lse, at_label, torch.stack([one.total for one in sums]).sum(0))


def _steps(tokens: int, classes: int, narrow: float) -> tuple[int, int]:
    """Return for how many tokens to make logits at a time, and how many of these to widen at a time.

    narrow: the size of an element as a fraction of its size in the wide dtype: 16-bit logits allow twice the
    tokens.
    """
    step = block_of(tokens, int(classes * narrow), int(BLOCKS * narrow), FEWEST_TOKENS)
    most = max(min(step * 4 * classes // (2 * BLOCKS), IN_CACHE_NBYTES), SMALLEST_NBYTES // 16)
    return step, max(most // (4 * max(classes, 1)), 1)


class Products:
    """The three matrix products of the loss and its gradients, for a block of tokens."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` [tokens, classes] with the logits of `hidden` [tokens, features], without a bias."""
        torch.mm(hidden, self._weight.t(), out=out)

    def gradients(
        self,
        hidden: torch.Tensor,
        grad: torch.Tensor,
        of_hidden: torch.Tensor | None,
        of_weight: torch.Tensor | None,
        *,
        begin: bool,
    ) -> None:
        """Given the logits' gradient, compute hidden's and add to the weight's (`begin`: write it)."""
        if of_hidden is not None:
            torch.mm(grad, self._weight, out=of_hidden)
        if of_weight is not None and not begin:
            of_weight.addmm_(grad.t(), hidden)
        elif of_weight is not None:
            torch.mm(grad.t(), hidden, out=of_weight)


class InFloat32(Products):
    """Products for 16-bit tensors on a CPU: see [Note: products in fp32] in products.py."""

    def _rows(self, tokens: int) -> Iterator[slice]:
        """Yield slices of the classes, small enough that their fp32 copies are small beside the logits."""
        classes, features = self._weight.shape
        nbytes = min(2 * tokens * classes // 6, WIDENED_NBYTES)
        step = max(nbytes // (8 * (tokens + features)), FEWEST_ROWS)
        for first in range(0, classes, step):
            yield slice(first, first + step)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """As Products."""
        hidden = hidden.float()
        for rows in self._rows(len(hidden)):
            out[:, rows].copy_(hidden.mm(self._weight[rows].float().t()))

    def gradients(
        self,
        hidden: torch.Tensor,
        grad: torch.Tensor,
        of_hidden: torch.Tensor | None,
        of_weight: torch.Tensor | None,
        *,
        begin: bool,
    ) -> None:
        """As Products."""
        hidden = hidden.float()
        total = torch.zeros_like(hidden)
        for rows in self._rows(len(hidden)):
            part = grad[:, rows].float()
            if of_hidden is not None:
                total.addmm_(part, self._weight[rows].float())
            if of_weight is not None and begin:
                of_weight[rows].copy_(part.t().mm(hidden))
            elif of_weight is not None:
                of_weight[rows].copy_(of_weight[rows].float().addmm_(part.t(), hidden))
        if of_hidden is not None:
            of_hidden.copy_(total)


class InForward(torch.autograd.Function):
    """The loss and its gradients, computed together over blocks of tokens with the whole vocabulary.

    This takes three matrix products, as the plain loss does, where `OfTile` needs four. But the gradients
    exist from the forward on, and the weight's is added to, and rounded, once per block. The idea is Liger
    Kernel's fused linear cross entropy (arXiv 2410.10989).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        formula: Formula,
        token_weight: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss, a scalar."""
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_hidden = mapped.empty(hidden.shape, hidden.dtype, hidden.device) if for_hidden else None
        grad_weight = mapped.empty(weight.shape, weight.dtype, weight.device) if for_weight else None
        grad_bias = (
            torch.zeros_like(bias, dtype=token_weight.dtype) if for_bias and bias is not None else None
        )
        loss = 0 * token_weight  # NaN for the mean over no tokens, as in torch
        step, few = _steps(len(hidden), len(weight), hidden.element_size() / token_weight.element_size())
        scratch = mapped.empty((min(step, len(hidden)), len(weight)), hidden.dtype, hidden.device)
        products = (InFloat32 if in_fp32(hidden) else Products)(weight)
        if grad_weight is not None and not len(hidden):
            grad_weight.zero_()
        for first in range(0, len(hidden), step):
            part = hidden[first : first + step]
            logits = scratch[: len(part)]
            products.logits(part, logits)
            if bias is not None:
                logits += bias
            for start in range(0, len(part), few):
                rows = slice(first + start, first + min(start + few, len(part)))
                of_rows, grad = derived(logits[start : start + few], labels[rows], formula, token_weight)
                loss += of_rows
                logits[start : start + few].copy_(grad)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
            of_part = None if grad_hidden is None else grad_hidden[first : first + step]
            products.gradients(part, logits, of_part, grad_weight, begin=first == 0)
        ctx.grads = (
            grad_hidden,
            grad_weight,
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Scale the gradients and return them; they are not kept."""
        if ctx.grads is None:
            raise RuntimeError(
                "a second backward through a tiled cross entropy, whose gradients the first one took: "
                "compute the loss again (retain_graph has no effect on it)"
            )
        (scale,) = grads
        found, ctx.grads = ctx.grads, None
        if scale.device.type != "cpu" or scale != 1:
            found = [None if one is None else one.mul_(scale) for one in found]
        return *found, None, None, None

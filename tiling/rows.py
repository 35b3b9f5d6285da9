"""Embeddings over micro-batches, with gradients only for the rows that are used.

[Note: rows in use]
A dense gradient per micro-batch and its fp32 sum would take four times an embedding's own size, nearly all of
it zeros. So the rows that the batch uses are numbered. The gradient of a micro-batch covers only the rows
that it uses; these are summed by row number, and the sums are placed in the dense gradient at the end. The
result equals the sum of dense gradients: in fp32 for 16-bit weights, rounded once. The backward does not need
the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from infinity.tiling.products import wide
from infinity.tiling.sliced import InSlices


@dataclass(slots=True)
class RowSlices(InSlices):
    """Forward of an embedding whose gradient is summed over micro-batches of `micro_batch` samples."""

    embedding: nn.Embedding
    micro_batch: int

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up the rows of `ids`."""
        one = self.embedding
        rows: torch.Tensor = RowLookup.apply(  # type: ignore[no-untyped-call]
            ids, one.weight, one.padding_idx, one.scale_grad_by_freq, self.micro_batch
        )
        return rows


def is_plain_embedding(module: nn.Module) -> bool:
    """Whether a module is nn.Embedding with its own forward, a dense gradient and no max_norm."""
    plain = type(module) is nn.Embedding and "forward" not in vars(module)
    return plain and not module.sparse and module.max_norm is None


def slice_rows(embedding: nn.Embedding, micro_batch: int) -> None:
    """Make an embedding sum its gradient over micro-batches; `untile_` undoes it."""
    embedding.forward = RowSlices(embedding, embedding.forward, embedding, micro_batch)  # type: ignore[method-assign, assignment]


class RowLookup(torch.autograd.Function):
    """An embedding lookup with the gradient of [Note: rows in use]."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: torch.Tensor,
        weight: torch.Tensor,
        padding: int | None,
        by_frequency: bool,  # noqa: FBT001
        micro_batch: int | list[int],
    ) -> torch.Tensor:
        """Look up the rows of all micro-batches. micro_batch: how many of `ids` are one, or each of them."""
        ctx.save_for_backward(ids)
        ctx.like, ctx.shape = weight.new_empty(0), weight.shape
        ctx.padding, ctx.by_frequency, ctx.micro_batch = padding, by_frequency, micro_batch
        return F.embedding(ids, weight, padding)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the weight's dense gradient."""
        (ids,) = ctx.saved_tensors
        used, numbered = torch.unique(ids, return_inverse=True)
        total = grad.new_zeros((len(used), ctx.shape[1]), dtype=wide(ctx.like.dtype))
        parts = zip(numbered.split(ctx.micro_batch), grad.split(ctx.micro_batch), strict=True)
        for part, of_part in parts:
            if not part.numel():
                continue
            own, places = torch.unique(part, return_inverse=True)
            found = torch.ops.aten.embedding_dense_backward(
                of_part.contiguous(), places, len(own), -1, ctx.by_frequency
            )
            total.index_add_(0, own, found.to(total.dtype))
        whole = ctx.like.new_zeros(ctx.shape)
        whole.index_copy_(0, used, total.to(whole.dtype))
        if ctx.padding is not None:
            whole[ctx.padding] = 0
        return None, whole, None, None, None

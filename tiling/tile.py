"""One tile: a module with parameters of its own, so that whoever fetches and releases modules' parameters
sees an ordinary module.

[Note: what a tile saves]
Of its weight a tile saves no values for backward, only the Parameter, and takes the values from it again. So
a recomputation (activation checkpointing) that has run through all tiles pins none of them. What autograd
would have checked is checked here: a weight that was changed in place in between is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Tile(nn.Module):
    """A slice of a big operator, with its own parameters; its owner puts the results together.

    A tile's backward needs its parameters again, but nothing that its forward saved of them: an engine may
    release them right after the forward, also where the forward is a recomputation.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load what the owner cut for this tile; what is missing was reported by the owner, as a whole."""
        metadata, strict, missing, unexpected, errors = args
        own: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, own, unexpected, errors)
        missing.extend(key for key in own if key not in (f"{prefix}weight", f"{prefix}bias"))


class LinearTile(Tile):
    """Outputs [tokens, out] of inputs [tokens, in] by a weight [out, in]."""

    def forward(self, x: torch.Tensor, channel: torch.Tensor | None = None, use: Any = None) -> torch.Tensor:
        """Return x @ weight.T + bias; with `use`, what `use(x, weight, bias)` returns: so another operation
        (the loss) can use the parameters while they are here.
        """
        if use is not None:
            result: torch.Tensor = use(x, self.weight, self.bias)
            return result
        product: torch.Tensor = Product.apply(x, self.weight, self.bias, False, channel)  # type: ignore[no-untyped-call]
        return product


class Conv1DTile(Tile):
    """The same by a weight [in, out], as Hugging Face's Conv1D has it."""

    def forward(self, x: torch.Tensor, channel: torch.Tensor | None = None) -> torch.Tensor:
        """Return x @ weight + bias."""
        product: torch.Tensor = Product.apply(x, self.weight, self.bias, True, channel)  # type: ignore[no-untyped-call]
        return product


class EmbeddingTile(Tile):
    """Rows [tokens, features] of a weight [rows, features]."""

    def forward(
        self,
        ids: torch.Tensor,
        padding_idx: int | None,
        scale_grad_by_freq: bool,  # noqa: FBT001
        sparse: bool,  # noqa: FBT001
    ) -> torch.Tensor:
        """Look up ids, which count within this tile."""
        return F.embedding(
            ids, self.weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
        )


class Kept:
    """A parameter that a node of the graph will need again; see [Note: what a tile saves]."""

    __slots__ = ("_parameter", "_version")

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        self._version = parameter._version

    def take(self) -> torch.Tensor:
        """Return the parameter.

        Raises:
            RuntimeError: it was changed in place since.
        """
        if self._parameter._version != self._version:
            raise RuntimeError(
                f"a tile of shape {tuple(self._parameter.shape)} needed for backward was changed in place "
                "after its forward (by optimizer.step()?). Run forward and backward again after a change."
            )
        return self._parameter


class Channel(torch.autograd.Function):
    """A way for gradients of 16-bit inputs to add up in fp32.

    [Note: channels]
    Autograd adds the gradients that the tiles give their common input in that input's dtype: with 16 bits,
    one more rounding per tile. So the tiles get, beside the input, a tensor of its shape in fp32 that takes
    no memory, send the gradient there, and the sum is rounded once. None where there is nothing to gain.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return something of x's shape in fp32, without values."""
        ctx.dtype = x.dtype
        return x.new_zeros((1,) * x.dim(), dtype=torch.float32).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Round the sum."""
        return grads[0].to(ctx.dtype)


def channel_of(x: torch.Tensor, tiles: int) -> torch.Tensor | None:
    """Return a channel for the gradients that `tiles` tiles send to x; see [Note: channels]."""
    if tiles == 1 or not x.requires_grad or torch.promote_types(x.dtype, torch.float32) == x.dtype:
        return None
    channel: torch.Tensor = Channel.apply(x)  # type: ignore[no-untyped-call]
    return channel


class Product(torch.autograd.Function):
    """x @ weight.T + bias, or x @ weight + bias, that saves x and keeps the weight by reference.

    The operations and their order are those of torch's own backward of a linear layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,  # noqa: FBT001
        channel: torch.Tensor | None,  # noqa: ARG004 - where the gradient goes
    ) -> torch.Tensor:
        """Return [tokens, out]."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.transposed = Kept(weight), transposed
        factor = _in_dtype_of(x, weight)
        factor = factor if transposed else factor.t()
        return x.mm(factor) if bias is None else torch.addmm(_in_dtype_of(x, bias), x, factor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of x (or of the channel instead), weight and bias."""
        (grad,) = grads
        (x,) = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = grad_channel = None
        if ctx.needs_input_grad[4]:
            grad_channel = _grad_x(ctx, grad, x).float()
        elif ctx.needs_input_grad[0]:
            grad_x = _grad_x(ctx, grad, x)
        if ctx.needs_input_grad[1]:
            grad_weight = x.t().mm(grad) if ctx.transposed else grad.t().mm(x)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None, grad_channel


def _grad_x(ctx: Any, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    weight = _in_dtype_of(x, ctx.weight.take())
    return grad.mm(weight.t() if ctx.transposed else weight)


def _in_dtype_of(x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Cast for autocast, whose own cache of casts would keep every tile."""
    return parameter if parameter.dtype == x.dtype else parameter.to(x.dtype)


class Place(torch.autograd.Function):
    """Write a tile's result into its columns of the common output, in place.

    torch's own slice assignment copies the whole gradient once per tile, torch.cat needs all results twice.
    Here the gradient passes through untouched: nobody before this tile looks at its columns.
    """

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, result: torch.Tensor, start: int) -> torch.Tensor:
        """Return `out`, with `result` from column `start` on."""
        ctx.mark_dirty(out)
        ctx.start, ctx.width = start, result.shape[-1]
        out.narrow(-1, start, ctx.width).copy_(result)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradient for what was there before, and the tile's."""
        (grad,) = grads
        return grad, grad.narrow(-1, ctx.start, ctx.width), None


class PlaceRows(torch.autograd.Function):
    """Write a tile's rows to their positions in the common output, in place; as `Place`."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return `out`, with `rows` at `positions`."""
        ctx.mark_dirty(out)
        ctx.save_for_backward(positions)
        return out.index_copy_(0, positions, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradient for what was there before, and the tile's."""
        (grad,) = grads
        return grad, grad.index_select(0, *ctx.saved_tensors), None

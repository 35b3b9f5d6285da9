"""One tile: a module with parameters of its own, so that whoever fetches and releases modules' parameters
sees an ordinary module.

[Note: what a tile saves]
Of its weight a tile saves no values for backward, only the Parameter, and takes the values from it again. So
a recomputation (activation checkpointing) that has run through all tiles pins none of them. What autograd
would have checked is checked here: a weight that was changed in place in between is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from infinity.tiling import mapped
from infinity.tiling.products import add_product, product, wide


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

    def forward(
        self,
        x: torch.Tensor,
        channel: GradientChannel | None = None,
        room: mapped.Lender | None = None,
        use: Any = None,
    ) -> torch.Tensor:
        """Return x @ weight.T + bias, in `room`; with `use`, what `use(x, weight, bias)` returns: so another
        operation (the loss) can use the parameters while they are here.
        """
        if use is not None:
            result: torch.Tensor = use(x, self.weight, self.bias)
            return result
        return _product(x, self, channel, room, transposed=False)


class Conv1DTile(Tile):
    """The same by a weight [in, out], as Hugging Face's Conv1D has it."""

    def forward(
        self, x: torch.Tensor, channel: GradientChannel | None = None, room: mapped.Lender | None = None
    ) -> torch.Tensor:
        """Return x @ weight + bias, in `room`."""
        return _product(x, self, channel, room, transposed=True)


def _product(
    x: torch.Tensor,
    tile: Tile,
    channel: GradientChannel | None,
    room: mapped.Lender | None,
    *,
    transposed: bool,
) -> torch.Tensor:
    link = None if channel is None else channel.link
    room = room or mapped.ReusableBuffer()
    found: torch.Tensor = Product.apply(x, tile.weight, tile.bias, transposed, room, channel, link)  # type: ignore[no-untyped-call]
    return found


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


@dataclass(slots=True)
class Sum:
    """What tiles have sent to their common input in one backward."""

    shape: torch.Size  # of the input
    dtype: torch.dtype
    device: torch.device
    task: int = -1
    """The backward that is under way: what one that failed has left counts for nothing."""
    value: torch.Tensor | None = None  # of the input's shape, in the dtype of sums
    room: mapped.ReusableBuffer = field(default_factory=mapped.ReusableBuffer)
    """For the tiles' own gradients, which whoever takes them lets go of one by one."""


class GradientChannel(NamedTuple):
    """A way for the gradients of a common input to add up.

    [Note: channels]
    Autograd adds the gradients that the tiles give their common input in that input's dtype: with 16 bits,
    one more rounding per tile; and each takes room of its own first. So the tiles add theirs to one sum, in
    fp32 for 16 bits, which is rounded once, where all have done so: the link, a scalar that they take beside
    the input, tells autograd when that is. Gradients that are to have gradients go autograd's way.
    """

    link: torch.Tensor
    sum: Sum
    columns: slice = slice(None)

    def narrowed(self, columns: slice) -> GradientChannel:
        """Return the same for a tile that takes some columns of the input."""
        return GradientChannel(self.link, self.sum, columns)

    def total(self) -> torch.Tensor:
        """Return the sum so far, [tokens, columns], to add to."""
        if self._begins():
            self.sum.value = mapped.zeros(self.sum.shape, wide(self.sum.dtype), self.sum.device)
        return self.sum.value[:, self.columns]  # type: ignore[index]

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left @ right, [tokens, columns], to the sum; a backward's first is the sum, if it can be."""
        whole = right.shape[1] == self.sum.shape[1] and left.dtype == wide(self.sum.dtype)
        if whole and self._begins():
            self.sum.value = product(left, right)
        else:
            add_product(self.total(), left, right)

    def _begins(self) -> bool:
        """Note which backward this is; whether it has no sum yet."""
        before, self.sum.task = self.sum.task, torch._C._current_graph_task_id()
        return self.sum.value is None or before != self.sum.task

    def sent(self) -> torch.Tensor:
        """Return the gradient of the link: that something was added."""
        return torch.zeros_like(self.link)


class ChannelLink(torch.autograd.Function):
    """The node that rounds a channel's sum, and hands it to the input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, total: Sum) -> torch.Tensor:
        """Return the link."""
        ctx.sum = total
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Round the sum, if this backward has made one."""
        found, ctx.sum.value = ctx.sum.value, None
        ctx.sum.room.clear()
        if found is None or ctx.sum.task != torch._C._current_graph_task_id():
            return None, None
        if found.dtype == ctx.sum.dtype:
            return found, None
        return mapped.empty(found.shape, ctx.sum.dtype, found.device).copy_(found), None


def channel_of(x: torch.Tensor, tiles: int) -> GradientChannel | None:
    """Return a channel for the gradients that `tiles` tiles send to x [tokens, in]; see [Note: channels]."""
    if tiles == 1 or not x.requires_grad:
        return None
    total = Sum(x.shape, x.dtype, x.device)
    return GradientChannel(ChannelLink.apply(x, total), total)  # type: ignore[no-untyped-call]


class Product(torch.autograd.Function):
    """x @ weight.T + bias, or x @ weight + bias, that saves x and keeps the weight by reference.

    The operations and their order are those of torch's own backward of a linear layer, but where products are
    faster otherwise (see the notes in products.py), and for what goes through a channel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,  # noqa: FBT001
        room: mapped.Lender,
        channel: GradientChannel | None,
        link: torch.Tensor | None,  # noqa: ARG004 - of the channel
    ) -> torch.Tensor:
        """Return [tokens, out]. room: for it."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.transposed, ctx.channel = Kept(weight), transposed, channel
        factor = _in_dtype_of(x, weight)
        factor = factor if transposed else factor.t()
        out = room.empty((len(x), factor.shape[1]), x.dtype, x.device)
        if bias is None:
            return torch.mm(x, factor, out=out)
        return torch.addmm(_in_dtype_of(x, bias), x, factor, out=out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of x (or of the channel's link instead), weight and bias."""
        (grad,) = grads
        (x,) = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = sent = None
        multiply = torch.mm if torch.is_grad_enabled() else product
        if ctx.needs_input_grad[6] and not torch.is_grad_enabled():
            ctx.channel.add_product(grad, _factor(ctx, x))
            sent = ctx.channel.sent()
        elif ctx.needs_input_grad[0]:
            grad_x = multiply(grad, _factor(ctx, x))
        if ctx.needs_input_grad[1]:
            grad_weight = _of_weight(ctx, x, grad)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None, sent


def _of_weight(ctx: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    left, right = (x.t(), grad) if ctx.transposed else (grad.t(), x)
    if torch.is_grad_enabled():
        return torch.mm(left, right)
    return product(left, right, ctx.channel and ctx.channel.sum.room)


def _factor(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what a gradient [tokens, out] is multiplied by for that of x."""
    weight = _in_dtype_of(x, ctx.weight.take())
    return weight.t() if ctx.transposed else weight


def _in_dtype_of(x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Cast for autocast, whose own cache of casts would keep every tile."""
    return parameter if parameter.dtype == x.dtype else parameter.to(x.dtype)


class Columns:
    """Room for one result: columns of the common output, from `start` on."""

    def __init__(self, out: torch.Tensor, start: int) -> None:
        self._out = out.detach()
        self._start = start

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return them; memory elsewhere for what has another dtype."""
        columns = self._out[:, self._start : self._start + shape[1]]
        return columns if dtype == columns.dtype else torch.empty(shape, dtype=dtype, device=device)


class WriteColumns(torch.autograd.Function):
    """Write a tile's result into its columns of the common output, in place.

    torch's own slice assignment copies the whole gradient once per tile, torch.cat needs all results twice.
    Here the gradient passes through untouched: nobody before this tile looks at its columns. What lies there
    already, made in `Columns`, is not copied.
    """

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, result: torch.Tensor, start: int) -> torch.Tensor:
        """Return `out`, with `result` from column `start` on."""
        ctx.mark_dirty(out)
        ctx.start, ctx.width = start, result.shape[-1]
        columns = out.narrow(-1, start, ctx.width)
        if columns.data_ptr() != result.data_ptr():
            columns.copy_(result)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradient for what was there before, and the tile's."""
        (grad,) = grads
        return grad, grad.narrow(-1, ctx.start, ctx.width), None


class PlaceRows(torch.autograd.Function):
    """Write a tile's rows to their positions in the common output, in place; as `WriteColumns`."""

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

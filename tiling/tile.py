"""One tile: an ordinary module with its own parameters, which an engine fetches and releases as usual.

[Note: what a tile saves]
A tile saves no values of its weight for backward, only the Parameter, and reads the values from it again. A
recomputation (activation checkpointing) that has run through all tiles therefore keeps none of them in
memory. The check that autograd makes for saved tensors is made here: it is an error if the weight was changed
in place between forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from infinity.tiling import mapped
from infinity.tiling.products import add_product, product, wide


class Piece(nn.Module):
    """A slice of a large layer, with its own parameters; the tiled module assembles the results."""

    is_used_again: ClassVar[bool] = True
    """Whether a backward needs the parameters again."""

    def make(self) -> None:
        """See that the parameters have memory: of a tile that is begun early they get it here."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the pieces cut by the tiled module, which has reported missing keys of the whole already."""
        metadata, strict, missing, unexpected, errors = args
        own: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, own, unexpected, errors)
        missing.extend(key for key in own if key.removeprefix(prefix) not in self._parameters)


class Tile(Piece):
    """A slice whose backward needs the parameters again, but no values that its forward saved. An engine may
    therefore release them right after any forward, also after a recomputation.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)


class LinearTile(Tile):
    """Maps inputs [tokens, in] to outputs [tokens, out] by a weight [out, in]."""

    def forward(
        self,
        x: torch.Tensor,
        channel: GradientChannel | None = None,
        memory: mapped.Allocator | None = None,
        use: Any = None,
    ) -> torch.Tensor:
        """Return x @ weight.T + bias, in memory from `memory`.

        use: if given, return `use(x, weight, bias)` instead. Another operation (the loss) can so use the
        parameters while hooks of this module keep them fetched.
        """
        if use is not None:
            result: torch.Tensor = use(x, self.weight, self.bias)
            return result
        return _product(x, self, channel, memory, transposed=False)


class Conv1DTile(Tile):
    """Maps inputs [tokens, in] to outputs [tokens, out] by a weight [in, out], like Hugging Face's Conv1D."""

    def forward(
        self, x: torch.Tensor, channel: GradientChannel | None = None, memory: mapped.Allocator | None = None
    ) -> torch.Tensor:
        """Return x @ weight + bias, in memory from `memory`."""
        return _product(x, self, channel, memory, transposed=True)


def _product(
    x: torch.Tensor,
    tile: Tile,
    channel: GradientChannel | None,
    memory: mapped.Allocator | None,
    *,
    transposed: bool,
) -> torch.Tensor:
    link = None if channel is None else channel.link
    memory = memory or mapped.ReusableBuffer()
    found: torch.Tensor = Product.apply(x, tile.weight, tile.bias, transposed, memory, channel, link)  # type: ignore[no-untyped-call]
    return found


class EmbeddingTile(Tile):
    """Looks up rows [tokens, features] of a weight [rows, features]."""

    is_used_again: ClassVar[bool] = False

    def forward(
        self,
        ids: torch.Tensor,
        padding_idx: int | None,
        scale_grad_by_freq: bool,  # noqa: FBT001
        sparse: bool,  # noqa: FBT001
        lookup: Any = None,
    ) -> torch.Tensor:
        """Look up ids, counted from this tile's first row; by `lookup(ids, weight, padding_idx)` if given."""
        if lookup is not None:
            rows: torch.Tensor = lookup(ids, self.weight, padding_idx)
            return rows
        return F.embedding(
            ids, self.weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
        )


class Kept:
    """A parameter that a node of the graph will read again; see [Note: what a tile saves]."""

    __slots__ = ("_parameter", "_version")

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        self._version = parameter._version

    def take(self) -> torch.Tensor:
        """Return the parameter.

        Raises:
            RuntimeError: the parameter has been changed in place since.
        """
        if self._parameter._version != self._version:
            raise RuntimeError(
                f"a tile of shape {tuple(self._parameter.shape)} needed for backward was changed in place "
                "after its forward (by optimizer.step()?). Run forward and backward again after a change."
            )
        return self._parameter


@dataclass(slots=True)
class Sum:
    """The gradients that tiles have added for their common input in one backward."""

    shape: torch.Size  # of the input
    dtype: torch.dtype
    device: torch.device
    task: int = -1
    """The graph task (backward) of `value`: a sum that an earlier, failed backward left is ignored."""
    value: torch.Tensor | None = None  # of the input's shape, in the dtype of sums
    memory: mapped.ReusableBuffer = field(default_factory=mapped.ReusableBuffer)
    """For the tiles' weight gradients, of which usually one exists at a time."""


class GradientChannel(NamedTuple):
    """Sums the gradients that tiles compute for their common input.

    [Note: channels]
    Autograd would sum these gradients in the input's dtype, which for 16 bits rounds once more per tile, and
    each gradient would first take memory of its own. Instead the tiles add theirs to one sum (in fp32 for 16
    bits) that is rounded once, after the last tile. The link tells autograd when that is: a scalar that every
    tile takes as a second input, and whose node delivers the sum. With create_graph=True gradients go through
    autograd as usual.
    """

    link: torch.Tensor
    sum: Sum
    columns: slice = slice(None)

    def narrowed(self, columns: slice) -> GradientChannel:
        """Return this channel for a tile that takes some columns of the input."""
        return GradientChannel(self.link, self.sum, columns)

    def total(self) -> torch.Tensor:
        """Return the sum so far, [tokens, columns], for a tile to add to."""
        if self._begins():
            self.sum.value = mapped.zeros(self.sum.shape, wide(self.sum.dtype), self.sum.device)
        return self.sum.value[:, self.columns]  # type: ignore[index]

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left @ right, [tokens, columns], to the sum. If possible the first product becomes the sum."""
        whole = right.shape[1] == self.sum.shape[1] and left.dtype == wide(self.sum.dtype)
        if whole and self._begins():
            self.sum.value = product(left, right)
        else:
            add_product(self.total(), left, right)

    def _begins(self) -> bool:
        """Record the current backward; returns whether it has no sum yet."""
        before, self.sum.task = self.sum.task, torch._C._current_graph_task_id()
        return self.sum.value is None or before != self.sum.task

    def sent(self) -> torch.Tensor:
        """Return the gradient of the link, which makes autograd run the link's node."""
        return torch.zeros_like(self.link)


class ChannelLink(torch.autograd.Function):
    """The node that rounds a channel's sum and delivers it as the input's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, total: Sum) -> torch.Tensor:
        """Return the link."""
        ctx.sum = total
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Round the sum, if this backward has made one."""
        found, ctx.sum.value = ctx.sum.value, None
        ctx.sum.memory.clear()
        if found is None or ctx.sum.task != torch._C._current_graph_task_id():
            return None, None
        if found.dtype == ctx.sum.dtype:
            return found, None
        return mapped.empty(found.shape, ctx.sum.dtype, found.device).copy_(found), None


def channel_of(x: torch.Tensor, tiles: int) -> GradientChannel | None:
    """Return a channel for the gradients of x [tokens, in] from `tiles` tiles; None if it needs none."""
    if tiles == 1 or not x.requires_grad:
        return None
    total = Sum(x.shape, x.dtype, x.device)
    return GradientChannel(ChannelLink.apply(x, total), total)  # type: ignore[no-untyped-call]


class Product(torch.autograd.Function):
    """x @ weight.T + bias, or x @ weight + bias; saves x, and the weight by reference only.

    Operations and their order are those of torch's linear layer, except where products are faster another way
    (see the notes in products.py) and where gradients go through a channel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,  # noqa: FBT001
        memory: mapped.Allocator,
        channel: GradientChannel | None,
        link: torch.Tensor | None,  # noqa: ARG004 - of the channel
    ) -> torch.Tensor:
        """Return [tokens, out], in memory from `memory`."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.transposed, ctx.channel = Kept(weight), transposed, channel
        factor = _in_dtype_of(x, weight)
        factor = factor if transposed else factor.t()
        out = memory.empty((len(x), factor.shape[1]), x.dtype, x.device)
        if bias is None:
            return torch.mm(x, factor, out=out)
        return torch.addmm(_in_dtype_of(x, bias), x, factor, out=out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of x (or instead of the channel's link), weight and bias."""
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
    return product(left, right, ctx.channel and ctx.channel.sum.memory)


def _factor(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the matrix by which a gradient [tokens, out] is multiplied to get that of x."""
    weight = _in_dtype_of(x, ctx.weight.take())
    return weight.t() if ctx.transposed else weight


def _in_dtype_of(x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Cast here under autocast, because autocast's own cache of casts would keep every tile."""
    return parameter if parameter.dtype == x.dtype else parameter.to(x.dtype)


class Columns:
    """Allocates one result in its columns of the common output, from `start` on."""

    def __init__(self, out: torch.Tensor, start: int) -> None:
        self._out = out.detach()
        self._start = start

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the columns; for another dtype, a new tensor."""
        columns = self._out[:, self._start : self._start + shape[1]]
        return columns if dtype == columns.dtype else torch.empty(shape, dtype=dtype, device=device)


class WriteColumns(torch.autograd.Function):
    """Write a tile's result into its columns of the common output, in place.

    torch's slice assignment copies the whole gradient once per tile, and torch.cat needs all results twice.
    Here the gradient passes through unchanged, since no earlier tile reads these columns. A result that was
    allocated there (`Columns`) is not copied.
    """

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, result: torch.Tensor, start: int) -> torch.Tensor:
        """Return `out` with `result` from column `start` on."""
        ctx.mark_dirty(out)
        ctx.start, ctx.width = start, result.shape[-1]
        columns = out.narrow(-1, start, ctx.width)
        if columns.data_ptr() != result.data_ptr():
            columns.copy_(result)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of the earlier output and of the tile's result."""
        (grad,) = grads
        return grad, grad.narrow(-1, ctx.start, ctx.width), None


class PlaceRows(torch.autograd.Function):
    """Write a tile's rows to their positions in the common output, in place, like `WriteColumns`."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return `out` with `rows` at `positions`."""
        ctx.mark_dirty(out)
        ctx.save_for_backward(positions)
        return out.index_copy_(0, positions, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of the earlier output and of the tile's rows."""
        (grad,) = grads
        return grad, grad.index_select(0, *ctx.saved_tensors), None

"""Cross entropy over a large vocabulary, without the logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from infinity.tiling.linear import TiledLinear
from infinity.tiling.logits import Formula, InForward, LogitSums, OfTile, together
from infinity.tiling.products import wide
from infinity.tiling.tile import GradientChannel, LinearTile, channel_of

_LARGEST_FACTOR = 256.0
Head = torch.Tensor | TiledLinear | Sequence[torch.Tensor]


def cross_entropy(
    hidden: torch.Tensor,
    weight: Head,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    shift: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    count: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Return F.cross_entropy(hidden @ weight.T + bias, labels), a scalar in fp32 (fp64 for fp64).

    Only blocks of the logits exist at a time. Value and gradients are exact up to rounding: softmax and sums
    are computed in fp32, and products are rounded like the linear layer's.

    hidden: [..., features]; labels: [...], one per row of hidden.
    weight: [classes, features]; or its rows in pieces, as a TiledLinear (with its bias) or a list of tensors:
        each piece is then used on its own, in forward and again in backward.
    shift: the target of row t is label t + 1, as in causal language models; the last row has none.
    z_loss: adds z_loss * lse² per token (PaLM, arXiv 2204.02311), which keeps the logits' scale bounded.
    reduction: "mean" over the labels other than ignore_index, or "sum".
    count: divides the sum instead of the number of labels, such as the number in the global batch over all
        ranks and micro-batches.

    Raises:
        ValueError: shapes or options that do not fit.
        IndexError: a label is outside the classes.
    """
    if reduction not in ("mean", "sum") or (reduction == "sum" and count is not None):
        raise ValueError(
            f"reduction={reduction!r}, count={count}: give 'mean' or 'sum', and a count only with 'mean'"
        )
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} needs labels {tuple(hidden.shape[:-1])}, not {tuple(labels.shape)}"
        )
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).to(hidden.device)
    counted = targets != ignore_index
    if not bool(counted.all()):
        rows, targets = rows[counted], targets[counted]
    classes = _classes(weight)
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise IndexError(
            f"labels range from {int(targets.min())} to {int(targets.max())}, but there are {classes} classes"
        )
    scale = torch.ones((), dtype=wide(hidden.dtype), device=hidden.device)
    if reduction == "mean":
        scale = scale / (len(targets) if count is None else torch.as_tensor(count, device=hidden.device))
    formula = Formula(classes, label_smoothing, z_loss)
    return _loss(rows, weight, bias, targets, formula, scale)


def _classes(weight: Head) -> int:
    if isinstance(weight, TiledLinear):
        return weight.out_features
    return len(weight) if isinstance(weight, torch.Tensor) else sum(len(one) for one in weight)


def _loss(
    rows: torch.Tensor,
    weight: Head,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    formula: Formula,
    scale: torch.Tensor,
) -> torch.Tensor:
    if torch.is_autocast_enabled(rows.device.type):
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        if isinstance(weight, torch.Tensor):
            weight, bias = weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)
    if isinstance(weight, torch.Tensor):
        factor = _factor(rows, scale)
        loss: torch.Tensor = InForward.apply(rows, weight, bias, targets, formula, scale * factor)  # type: ignore[no-untyped-call]
        return loss / factor if factor != 1 else loss
    found: list[LogitSums] = []
    start = 0
    pieces = list(_pieces(weight, bias))
    channel = channel_of(rows, len(pieces))
    for piece, piece_bias in pieces:
        found.append(_sums(piece, rows, piece_bias, targets, start, bool(formula.label_smoothing), channel))
        start += len(piece.weight) if isinstance(piece, LinearTile) else len(piece)
    return formula.value(together(found), scale)


def _factor(rows: torch.Tensor, scale: torch.Tensor) -> float:
    """Return a power of two that keeps the gradients which the forward makes within fp16's range.

    They exist before the backward multiplies by a GradScaler's factor, and would vanish without one: 1 over
    the number of tokens is small. A sum over many tokens must not overflow either.
    """
    if rows.dtype != torch.float16:
        return 1.0
    least = float(scale)
    return 2.0 ** math.floor(math.log2(min(1 / least, _LARGEST_FACTOR))) if 0 < least < 1 else 1.0


def _pieces(
    weight: Head, bias: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor | LinearTile, torch.Tensor | None]]:
    """Yield slices of the vocabulary: pieces of the weight with their bias, or the modules that hold them."""
    if isinstance(weight, TiledLinear):
        if bias is not None or len(weight.grid.columns) > 1:
            raise ValueError(
                "a TiledLinear has its own bias (leave bias=None), and must be cut along out_features only: "
                f"it has {len(weight.grid.columns)} tiles along in_features"
            )
        for tile in weight.tiles:
            if isinstance(tile, LinearTile):
                yield tile, None
        return
    pieces = [weight] if isinstance(weight, torch.Tensor) else list(weight)
    biases = [None] * len(pieces) if bias is None else bias.split([len(one) for one in pieces])
    yield from zip(pieces, biases, strict=True)


def _sums(
    piece: torch.Tensor | LinearTile,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    start: int,
    smoothed: bool,  # noqa: FBT001
    channel: GradientChannel | None,
) -> LogitSums:
    link = None if channel is None else channel.link

    def use(x: torch.Tensor, weight: torch.Tensor, tile_bias: torch.Tensor | None) -> Any:
        return OfTile.apply(x, weight, tile_bias, targets, start, smoothed, channel, link)  # type: ignore[no-untyped-call]

    # A module call, so that hooks can fetch the tile's parameters.
    return LogitSums(*(piece(rows, use=use) if isinstance(piece, LinearTile) else use(rows, piece, bias)))

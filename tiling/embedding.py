"""An embedding in tiles of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn

from infinity.tiling.grid import Grid, cut
from infinity.tiling.linear import _empty
from infinity.tiling.owner import Routed
from infinity.tiling.rows import RowLookup, is_plain_embedding
from infinity.tiling.sliced import InSlices
from infinity.tiling.tile import EmbeddingTile, PlaceRows, Tile
from infinity.tiling.whole import Whole


class TiledEmbedding(Routed, nn.Embedding):
    """nn.Embedding as tiles of rows, each a module of its own; results and gradients have the same bits.

    Every tile takes part in every forward, even when none of its rows is looked up: its gradient is then zero
    instead of None, and an optimizer treats it as it would treat those rows of the whole weight. Where an
    engine does as much by itself, those tiles are left out. `max_norm` is refused, because it changes weights
    during the forward.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,  # noqa: FBT001, FBT002 - nn.Embedding's own signature
        sparse: bool = False,  # noqa: FBT001, FBT002
        device: Any = None,
        dtype: Any = None,
        *,
        row_tiles: int | Sequence[int] = 1,
    ) -> None:
        if max_norm is not None:
            raise ValueError(
                "TiledEmbedding: max_norm changes weights inside the forward; clip them after a step"
            )
        grid = Grid(cut(num_embeddings, row_tiles), (embedding_dim,))
        tiles = [EmbeddingTile(_empty((rows, embedding_dim), device, dtype)) for rows in grid.rows]
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(f"padding_idx={padding_idx}: the embedding has {num_embeddings} rows")
            padding_idx %= num_embeddings
        self._assemble(tiles, grid, padding_idx, scale_grad_by_freq, sparse)
        self.reset_parameters()

    @classmethod
    def of(cls, tiles: Sequence[Tile], grid: Grid, like: nn.Embedding) -> TiledEmbedding:
        """Make an embedding of existing tiles, with the settings of `like`."""
        embedding = cls.__new__(cls)
        embedding._assemble(tiles, grid, like.padding_idx, like.scale_grad_by_freq, like.sparse)  # noqa: SLF001 - its own class's
        return embedding

    @classmethod
    def convert(
        cls, embedding: nn.Embedding, tiles: Sequence[Tile], grid: Grid, error: type[Exception]
    ) -> TiledEmbedding:
        """Turn an embedding into one of existing tiles, in place. Code that uses its weight as a whole gets
        one that is put together for it, or `error`: see [Note: whole weights].
        """
        del embedding._parameters["weight"]
        embedding.__class__ = cls
        if not isinstance(embedding, TiledEmbedding):
            raise TypeError(f"a {type(embedding).__name__} cannot be tiled")
        embedding._hold(tiles, grid, None)  # noqa: SLF001 - its own class's
        embedding.weight.join(error, "an embedding")
        return embedding

    def _assemble(
        self,
        tiles: Sequence[Tile],
        grid: Grid,
        padding_idx: int | None,
        scale_grad_by_freq: bool,  # noqa: FBT001
        sparse: bool,  # noqa: FBT001
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = grid.shape
        self.padding_idx = padding_idx
        self.max_norm, self.norm_type = None, 2.0
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self._hold(tiles, grid, None)

    @property
    def weight(self) -> Whole:  # type: ignore[override]
        """Stands for the weight [num_embeddings, embedding_dim]."""
        return self._whole("weight")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Embedding's own name
        """Return the rows [..., embedding_dim] of ids [...].

        Raises:
            IndexError: an id is negative, or not smaller than the number of rows.
        """
        return self.look_up(input, None)

    def look_up(self, input: torch.Tensor, micro_batch: int | None) -> torch.Tensor:  # noqa: A002
        """Do so. micro_batch: samples of which the gradients are summed in fp32; see [Note: rows in use] in
        rows.py. None: they are torch's.
        """
        ids = input.reshape(-1).contiguous()
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if low < 0 or high >= self.num_embeddings:
            raise IndexError(
                f"ids range from {low} to {high}, but the embedding has {self.num_embeddings} rows"
            )
        first: Any = self.tiles[0].weight
        out = torch.empty(ids.numel(), self.embedding_dim, dtype=first.dtype, device=first.device)
        begins = self._begins()
        tile_of = torch.bucketize(ids, torch.from_numpy(begins).to(ids.device, ids.dtype), right=True) - 1
        in_order, order = torch.sort(tile_of, stable=True)
        hit, counts = (one.tolist() for one in torch.unique_consecutive(in_order, return_counts=True))
        places = {
            number: slice(stop - count, stop)
            for number, count, stop in zip(hit, counts, accumulate(counts), strict=True)
        }
        needed: Sequence[int] = range(len(self.tiles))
        if self.is_followed:
            # One of them stands for all where nothing is looked up: then, too, there are gradients.
            needed = self.agreed(hit, len(self.tiles)) or [0]
        self.announce(needed)
        for number in needed:
            positions, start = order[places.get(number, _NONE)], int(begins[number])
            padding = self.padding_idx
            if padding is not None:
                padding -= start
                padding = padding if 0 <= padding < self.grid.rows[number] else None
            looked_up, lookup = ids[positions] - start, None
            if micro_batch is not None:
                together = micro_batch * (ids.numel() // max(1, len(input)))
                counts_of = torch.bincount(positions // max(1, together)).tolist()
                lookup = partial(_in_micro_batches, counts_of, self.scale_grad_by_freq)
            rows = self.tiles[number](looked_up, padding, self.scale_grad_by_freq, self.sparse, lookup)
            out = PlaceRows.apply(out, rows, positions)  # type: ignore[no-untyped-call]
        return out.view(*input.shape, self.embedding_dim)

    def _begins(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the first row of each tile: they are many, and adding them up takes long."""
        known = self.__dict__.get("_known_begins")
        if known is None or known[0] is not self.grid:
            rows = np.array(self.grid.rows, np.int64)
            known = self.__dict__["_known_begins"] = self.grid, np.cumsum(rows) - rows
        begins: np.ndarray[Any, np.dtype[np.int64]] = known[1]
        return begins


_NONE = slice(0)
"""The places of what a tile without any id is looked up for."""


def _in_micro_batches(
    counts: list[int],
    by_frequency: bool,  # noqa: FBT001
    ids: torch.Tensor,
    weight: torch.Tensor,
    padding: int | None,
) -> torch.Tensor:
    found: torch.Tensor = RowLookup.apply(ids, weight, padding, by_frequency, counts)  # type: ignore[no-untyped-call]
    return found


@dataclass(slots=True)
class TiledRowSlices(InSlices):
    """Forward of an embedding in tiles whose gradient is summed over micro-batches of so many samples."""

    embedding: TiledEmbedding
    micro_batch: int

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up the rows of `ids`."""
        return self.embedding.look_up(ids, self.micro_batch)


def slice_tiled_rows(embedding: TiledEmbedding, micro_batch: int) -> None:
    """Make an embedding in tiles sum its gradient over micro-batches; `untile_` undoes it."""
    sliced = TiledRowSlices(embedding, embedding.forward, embedding, micro_batch)
    embedding.forward = sliced  # type: ignore[method-assign, assignment]


def may_be_cut(module: nn.Module) -> bool:
    """Whether an embedding gives the same results cut by its rows, in place: nobody else's code or hooks are
    part of it.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = any(getattr(module, name) for name in names)
    if not is_plain_embedding(module) or hooked or list(module._parameters) != ["weight"]:
        return False
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return not any(getattr(module.weight, name, None) for name in hooks)

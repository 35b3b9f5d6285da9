"""Linear layers in tiles."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from infinity.tiling import mapped
from infinity.tiling.grid import Grid, cut, spans
from infinity.tiling.owner import Tiled
from infinity.tiling.products import wide
from infinity.tiling.tile import Columns, Conv1DTile, LinearTile, Tile, WriteColumns, channel_of
from infinity.tiling.whole import Whole


def _empty(shape: Sequence[int], device: Any, dtype: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))


def _split(x: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    return x.split(list(sizes), -1) if len(sizes) > 1 else (x,)


def _placed(out: torch.Tensor, result: torch.Tensor, start: int) -> torch.Tensor:
    if out.shape == result.shape:
        return result.to(out.dtype)
    placed: torch.Tensor = WriteColumns.apply(out, result, start)  # type: ignore[no-untyped-call]
    return placed


def _run(
    x: torch.Tensor, rows: Sequence[Sequence[nn.Module]], in_sizes: Sequence[int], out_sizes: Sequence[int]
) -> torch.Tensor:
    """Return the outputs [..., out] of x [..., in].

    rows: for each slice of the outputs its tiles, in the order of the input slices that they take. Their
    products are summed in fp32 (fp64 for fp64), first to last, and rounded once.
    """
    weight = rows[0][0].weight
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    elif x.dtype != weight.dtype:
        raise RuntimeError(f"inputs are {x.dtype}, weight tiles {weight.dtype}: cast one of them")
    if x.shape[-1] != sum(in_sizes):
        raise RuntimeError(
            f"inputs of shape {tuple(x.shape)} have {x.shape[-1]} features, not {sum(in_sizes)}"
        )
    flat = x.reshape(-1, x.shape[-1])
    channel = channel_of(flat, len(rows))
    slices = _split(flat, in_sizes)
    channels = [None if channel is None else channel.narrowed(columns) for columns in spans(in_sizes)]
    out = mapped.empty((len(flat), sum(out_sizes)), flat.dtype, flat.device)
    memory = mapped.ReusableBuffer()
    for row, span in zip(rows, spans(out_sizes), strict=True):
        alone = len(row) == 1 and len(rows) > 1
        result = row[0](slices[0], channels[0], Columns(out, span.start) if alone else memory)
        if len(row) > 1:
            result = result.to(wide(result.dtype))
            for tile, part, part_channel in zip(row[1:], slices[1:], channels[1:], strict=True):
                result = result + tile(part, part_channel, memory)
        out = _placed(out, result, span.start)
        del result  # frees it before the next is computed
    return out.view(*x.shape[:-1], out.shape[-1])


class TiledLinear(Tiled, nn.Linear):
    """nn.Linear as tiles of its weight [out_features, in_features], each a module of its own.

    Forward and backward run tile by tile, and need the parameters and make the gradients of one tile at a
    time. Cuts along out_features leave every sum whole; cuts along in_features add partial sums (see `_run`).
    Initial values on the CPU are those that nn.Linear draws with the same seed.

    out_tiles, in_tiles: the number of tiles, or their sizes in elements.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,  # noqa: FBT001, FBT002 - nn.Linear's own signature
        device: Any = None,
        dtype: Any = None,
        *,
        out_tiles: int | Sequence[int] = 1,
        in_tiles: int | Sequence[int] = 1,
    ) -> None:
        grid = Grid(cut(out_features, out_tiles), cut(in_features, in_tiles))
        tiles = [
            LinearTile(
                _empty((rows.stop - rows.start, columns.stop - columns.start), device, dtype),
                _empty((rows.stop - rows.start,), device, dtype) if bias and columns.start == 0 else None,
            )
            for rows, columns in grid.slices()
        ]
        self._assemble(tiles, grid)
        self.reset_parameters()

    @classmethod
    def of(cls, tiles: Sequence[Tile], grid: Grid) -> TiledLinear:
        """Make a layer of existing tiles, in row-major order; the first tile of each row holds the bias."""
        linear = cls.__new__(cls)
        linear._assemble(tiles, grid)  # noqa: SLF001 - its own class's
        return linear

    def _assemble(self, tiles: Sequence[Tile], grid: Grid) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = grid.shape
        biased = tiles[0].bias is not None
        self._hold(tiles, grid, tiles[:: len(grid.columns)] if biased else None)

    @property
    def weight(self) -> Whole:  # type: ignore[override]
        """Stands for the weight [out_features, in_features]."""
        return self._whole("weight")

    @property
    def bias(self) -> Whole | None:  # type: ignore[override]
        """Stands for the bias [out_features]."""
        return self._whole("bias") if "bias" in self.__dict__["_wholes"] else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's own name
        """Return [..., out_features] for [..., in_features]."""
        return _run(input, self.grid.by_row(list(self.tiles)), self.grid.columns, self.grid.rows)


class TiledConv1D(Tiled):
    """Hugging Face's Conv1D (GPT-2) as tiles of its weight [nx, nf]; otherwise like TiledLinear.

    nf: number of outputs. nx: number of inputs.
    """

    def __init__(
        self, nf: int, nx: int, *, out_tiles: int | Sequence[int] = 1, in_tiles: int | Sequence[int] = 1
    ) -> None:
        grid = Grid(cut(nx, in_tiles), cut(nf, out_tiles))
        tiles = [
            Conv1DTile(
                _empty((rows.stop - rows.start, columns.stop - columns.start), None, None),
                _empty((columns.stop - columns.start,), None, None) if rows.start == 0 else None,
            )
            for rows, columns in grid.slices()
        ]
        self._assemble(tiles, grid)
        nn.init.zeros_(self.bias)
        nn.init.normal_(self.weight, std=0.02)

    @classmethod
    def of(cls, tiles: Sequence[Tile], grid: Grid, like: type[nn.Module]) -> TiledConv1D:
        """Make a layer of existing tiles, in row-major order; the tiles of the first row hold the bias.

        The result is also an instance of `like`, transformers' class, for which its initialisation checks.
        """
        conv = _revived(like)
        conv._assemble(tiles, grid)  # noqa: SLF001 - its own class's
        return conv

    def _assemble(self, tiles: Sequence[Tile], grid: Grid) -> None:
        nn.Module.__init__(self)
        self.nx, self.nf = grid.shape
        self._hold(tiles, grid, tiles[: len(grid.columns)])

    @property
    def weight(self) -> Whole:
        """Stands for the weight [nx, nf]."""
        return self._whole("weight")

    @property
    def bias(self) -> Whole:
        """Stands for the bias [nf]."""
        return self._whole("bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., nf] for [..., nx]."""
        rows = list(zip(*self.grid.by_row(list(self.tiles)), strict=True))  # the weight is transposed
        return _run(x, rows, self.grid.rows, self.grid.columns)


@functools.cache
def _both(like: type[nn.Module]) -> type[TiledConv1D]:
    def reduce(self: TiledConv1D, _protocol: object) -> Any:
        return _revived, (like,), self.__dict__

    return type("TiledConv1D", (TiledConv1D, like), {"__reduce_ex__": reduce})


def _revived(like: type[nn.Module]) -> TiledConv1D:
    both = _both(like)  # type: ignore[arg-type]
    return both.__new__(both)

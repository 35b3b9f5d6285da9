"""Tiles for a model that is being built: the whole weight never exists.

Two steps, each for one of torch's public registration hooks (`register_module_parameter_registration_hook`,
`register_module_module_registration_hook`). A layer registers its weight, allocated and untouched: `stand_in`
gives it a `Whole` instead, into whose tiles the layer then draws its initial values. The layer is put into
its
parent: `assembled` returns the tiled module for its place.
"""

from __future__ import annotations

import torch
from torch import nn

from infinity.tiling.replace import choice, kind, tiled
from infinity.tiling.tile import Conv1DTile, EmbeddingTile, LinearTile, Tile
from infinity.tiling.whole import Whole

_TILES: dict[str, type[Tile]] = {"linear": LinearTile, "conv1d": Conv1DTile, "embedding": EmbeddingTile}


def stand_in(module: nn.Module, name: str, parameter: nn.Parameter | None, above: int) -> Whole | None:
    """Return what a layer that is to be tiled should register in the place of `parameter`; None for every
    other parameter.

    above: bytes of the largest weight that stays whole, and of a tile.
    """
    of = kind(module)
    if name != "weight" or of is None or parameter is None or isinstance(parameter, Whole):
        return None
    if parameter.dim() != 2 or parameter.nbytes <= above or getattr(module, "max_norm", None) is not None:
        return None
    grid = choice(parameter, {of}, above)
    tiles = []
    for high, wide in grid.slices():
        shape = (high.stop - high.start, wide.stop - wide.start)
        empty = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        tiles.append(_TILES[of](nn.Parameter(empty, parameter.requires_grad)))
    return Whole.of(tiles, grid, "weight")


def assembled(module: nn.Module | None) -> nn.Module | None:
    """Return the tiled module for the place of a layer whose weight is a stand-in; None for any other.

    Raises:
        TypeError: the stand-in is in a module that is not the layer it was made for.
    """
    weight = module._parameters.get("weight") if module is not None else None
    if module is None or not isinstance(weight, Whole):
        return None
    if kind(module) is None:
        raise TypeError(f"a {type(module).__name__} uses the weight of a tiled layer: leave that layer whole")
    return tiled(module, weight.grid, weight.pieces()).train(module.training)

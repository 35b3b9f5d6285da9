"""Tiles for a model under construction: the whole weight is never written to memory.

There are two steps, each called by one of torch's public registration hooks.
1. `register_module_parameter_registration_hook`: a layer registers its weight, allocated but not written yet.
   `stand_in` replaces it by a `Whole`, and the layer draws its initial values into the tiles of that.
2. `register_module_module_registration_hook`: the layer is put into its parent. `assembled` returns the tiled
   module that takes the layer's place.

For stacks of experts `stand_in_for_stack` does the first; their slices have no memory before the second step.
"""

from __future__ import annotations

import torch
from torch import nn

from infinity.tiling.experts import TiledExperts
from infinity.tiling.replace import choice, kind, tiled
from infinity.tiling.tile import Conv1DTile, EmbeddingTile, LinearTile, Tile
from infinity.tiling.whole import Whole

_TILES: dict[str, type[Tile]] = {"linear": LinearTile, "conv1d": Conv1DTile, "embedding": EmbeddingTile}


def stand_in(module: nn.Module, name: str, parameter: nn.Parameter | None, above: int) -> Whole | None:
    """Return the stand-in that a layer to be tiled registers instead of `parameter`; None: register it as is.

    above: the size in bytes above which a weight is tiled; also the largest size of a tile.
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
    """Return the tiled module that replaces a layer whose weight is a stand-in; None for any other layer.

    Raises:
        TypeError: a module other than the layer that the stand-in was made for holds it.
    """
    weight = module._parameters.get("weight") if module is not None else None
    if module is None or not stands_in(module):
        return None
    if not isinstance(weight, Whole):
        return TiledExperts.of(module)
    if kind(module) is None:
        raise TypeError(
            f"a {type(module).__name__} uses the weight of a tiled layer, and cannot be tiled: leave that "
            "layer whole"
        )
    return tiled(module, weight.grid, weight.pieces()).train(module.training)


def stands_in(module: nn.Module) -> bool:
    """Whether a module has a stand-in for a parameter, and is still to be `assembled`."""
    return any(isinstance(one, Whole) for one in module._parameters.values())

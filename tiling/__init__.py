"""Big operators as sequences of tiles: weight, sequence, batch and vocabulary axes.

Plain modules and functions that know nothing of the engine. The engine treats a tile like any other module.
"""

from infinity.tiling.batch import tile_batch_
from infinity.tiling.build import assembled, stand_in, stands_in
from infinity.tiling.causal_lm import LogitsUsedError, postpones, tile_loss_, untile_loss_
from infinity.tiling.embedding import TiledEmbedding, may_be_cut
from infinity.tiling.experts import ExpertTile, TiledExperts, stand_in_for_stack
from infinity.tiling.grid import Grid, tiles_of
from infinity.tiling.linear import TiledConv1D, TiledLinear
from infinity.tiling.loss import cross_entropy
from infinity.tiling.owner import Routed, RoutingFollower, Tiled
from infinity.tiling.replace import Cut, tile_
from infinity.tiling.sliced import TiledMLP, runs_in_slices, tile_batch, tile_sequence, untile_
from infinity.tiling.tile import EmbeddingTile, Piece, Tile
from infinity.tiling.whole import Whole

__all__ = [
    "Cut",
    "EmbeddingTile",
    "ExpertTile",
    "Grid",
    "LogitsUsedError",
    "Piece",
    "Routed",
    "RoutingFollower",
    "Tile",
    "Tiled",
    "TiledConv1D",
    "TiledEmbedding",
    "TiledExperts",
    "TiledLinear",
    "TiledMLP",
    "Whole",
    "assembled",
    "cross_entropy",
    "may_be_cut",
    "postpones",
    "runs_in_slices",
    "stand_in",
    "stand_in_for_stack",
    "stands_in",
    "tile_",
    "tile_batch",
    "tile_batch_",
    "tile_loss_",
    "tile_sequence",
    "tiles_of",
    "untile_",
    "untile_loss_",
]

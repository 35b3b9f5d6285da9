"""Big operators as sequences of tiles: weight, sequence, batch and vocabulary axes.

Plain modules and functions that know nothing of the engine. The engine treats a tile like any other module.

A name is imported when it is first used: how weights are cut (grid) is asked without torch, too.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.tiling.batch import tile_batch_ as tile_batch_
    from infinity.tiling.build import assembled as assembled
    from infinity.tiling.build import stand_in as stand_in
    from infinity.tiling.build import stands_in as stands_in
    from infinity.tiling.causal_lm import LogitsUsedError as LogitsUsedError
    from infinity.tiling.causal_lm import count_update as count_update
    from infinity.tiling.causal_lm import postpones as postpones
    from infinity.tiling.causal_lm import tile_loss_ as tile_loss_
    from infinity.tiling.causal_lm import tile_loss_where as tile_loss_where
    from infinity.tiling.causal_lm import untile_loss_ as untile_loss_
    from infinity.tiling.embedding import TiledEmbedding as TiledEmbedding
    from infinity.tiling.embedding import may_be_cut as may_be_cut
    from infinity.tiling.experts import ExpertTile as ExpertTile
    from infinity.tiling.experts import TiledExperts as TiledExperts
    from infinity.tiling.experts import stand_in_for_stack as stand_in_for_stack
    from infinity.tiling.grid import Grid as Grid
    from infinity.tiling.grid import tiles_of as tiles_of
    from infinity.tiling.linear import TiledConv1D as TiledConv1D
    from infinity.tiling.linear import TiledLinear as TiledLinear
    from infinity.tiling.loss import cross_entropy as cross_entropy
    from infinity.tiling.owner import Routed as Routed
    from infinity.tiling.owner import RoutingFollower as RoutingFollower
    from infinity.tiling.owner import Tiled as Tiled
    from infinity.tiling.replace import Cut as Cut
    from infinity.tiling.replace import tile_ as tile_
    from infinity.tiling.sliced import TiledMLP as TiledMLP
    from infinity.tiling.sliced import runs_in_slices as runs_in_slices
    from infinity.tiling.sliced import tile_batch as tile_batch
    from infinity.tiling.sliced import tile_sequence as tile_sequence
    from infinity.tiling.sliced import tile_sequence_where as tile_sequence_where
    from infinity.tiling.sliced import untile_ as untile_
    from infinity.tiling.slices import takes_slices_back as takes_slices_back
    from infinity.tiling.tile import EmbeddingTile as EmbeddingTile
    from infinity.tiling.tile import Piece as Piece
    from infinity.tiling.tile import Tile as Tile
    from infinity.tiling.whole import Whole as Whole

_MODULES = {
    "infinity.tiling.batch": ("tile_batch_",),
    "infinity.tiling.build": ("assembled", "stand_in", "stands_in"),
    "infinity.tiling.causal_lm": (
        *("LogitsUsedError", "count_update", "postpones"),
        *("tile_loss_", "tile_loss_where", "untile_loss_"),
    ),
    "infinity.tiling.embedding": ("TiledEmbedding", "may_be_cut"),
    "infinity.tiling.experts": ("ExpertTile", "TiledExperts", "stand_in_for_stack"),
    "infinity.tiling.grid": ("Grid", "tiles_of"),
    "infinity.tiling.linear": ("TiledConv1D", "TiledLinear"),
    "infinity.tiling.loss": ("cross_entropy",),
    "infinity.tiling.owner": ("Routed", "RoutingFollower", "Tiled"),
    "infinity.tiling.replace": ("Cut", "tile_"),
    "infinity.tiling.sliced": (
        *("TiledMLP", "runs_in_slices", "tile_batch"),
        *("tile_sequence", "tile_sequence_where", "untile_"),
    ),
    "infinity.tiling.slices": ("takes_slices_back",),
    "infinity.tiling.tile": ("EmbeddingTile", "Piece", "Tile"),
    "infinity.tiling.whole": ("Whole",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [name for name in _HOME if name != "count_update"]


def __getattr__(name: str) -> Any:
    """Import the module of a name, and keep the name here."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

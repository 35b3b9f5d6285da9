"""Which embeddings of a finished model are cut by their rows, so that a step moves those it looks up.

Whether the rest of a model uses an embedding's weight as a whole, as a tied output layer does, is known only
when it stands. So an embedding is built, initialised, loaded, resized and tied as ever, and is cut at the end
of Init.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from infinity.planning.tile_size import rows_of_block
from infinity.tiling import Grid, may_be_cut


def in_blocks(named: Sequence[tuple[str, nn.Module]], width: int) -> Iterator[tuple[str, nn.Embedding, Grid]]:
    """Yield the embeddings that are to be cut, with their names and blocks of rows. Those stay whole whose
    weight another module has, too, that have code, hooks, sparse gradients or a max_norm of their own, and
    the small ones.

    named: all modules, each once. width: bytes of an element, as it computes.
    """
    users = Counter(id(one) for _, module in named for one in module._parameters.values() if one is not None)
    for name, module in named:
        if not isinstance(module, nn.Embedding) or not may_be_cut(module) or users[id(module.weight)] > 1:
            continue
        rows, columns = module.weight.shape
        together = rows_of_block(rows, columns * width)
        if together is not None:
            whole, rest = divmod(rows, together)
            yield name, module, Grid((*[together] * whole, *([rest] if rest else [])), (columns,))

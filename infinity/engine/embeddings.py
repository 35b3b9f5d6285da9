"""Which embeddings of a finished model are cut by their rows, so that a step moves those it looks up.

Whether the rest of a model uses an embedding's weight as a whole, as a tied output layer does, is known only
when it stands. So an embedding is built, initialised, loaded, resized and tied as ever, and is cut at the end
of Init.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from infinity.planning.tile_size import rows_of_block
from infinity.ranks.group import Ranks
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


def in_groups(blocks: Sequence[slice], rows: int) -> Iterator[list[slice]]:
    """Yield neighbouring blocks in groups of at least so many rows; the last may have fewer."""
    group: list[slice] = []
    for block in blocks:
        group.append(block)
        if block.stop - group[0].start >= rows:
            yield group
            group = []
    if group:
        yield group


def held_elsewhere(embeddings: Sequence[nn.Embedding], ranks: Ranks) -> list[int]:
    """Return the numbers of those embeddings whose weight something else, on any rank, refers to than the
    module: a list of parameters, a closure, an attribute that is no parameter. What it does there is not
    known, and it would have no part in what the blocks become.
    """
    held = [number for number, one in enumerate(embeddings) if _references(one) > _ALONE]
    if held:  # or it is garbage that has not been collected
        gc.collect()
    held = [number for number in held if _references(embeddings[number]) > _ALONE]
    return ranks.union(held, len(embeddings), "leave embeddings whole")


def _references(embedding: nn.Embedding) -> int:
    return sys.getrefcount(embedding._parameters["weight"])


# Of a weight on which nothing was computed: initial values draw random numbers, and leave garbage that refers
# to it, which may not have been collected.
_ALONE = _references(nn.Embedding(1, 1, _weight=torch.empty(1, 1, device="meta")))

"""Batch tiles for a whole model: each block runs over micro-batches while its parameters stay resident."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from infinity.tiling.embedding import TiledEmbedding, slice_tiled_rows
from infinity.tiling.rows import is_plain_embedding, slice_rows
from infinity.tiling.sliced import runs_in_slices, tile_batch, untile_

_BLOCK = ("transformers.modeling_layers", "GradientCheckpointingLayer")
_NORMS = ("LayerNorm", "RMSNorm")


def tile_batch_(
    model: nn.Module, micro_batch: int, blocks: type[nn.Module] | tuple[type[nn.Module], ...] | None = None
) -> list[str]:
    """Make every block of a model run on `micro_batch` samples at a time, in place. `untile_` undoes it.

    One forward and one backward of the whole batch then use each parameter as often as those of a single
    micro-batch would, and give the gradients of accumulation over all micro-batches. Memory holds the
    activations of one micro-batch inside one block, and every block's input. Norms and embeddings outside the
    blocks are cut as well: a norm saves several times its input for the backward, and torch sums the gradient
    rows of a 16-bit embedding in 16 bits. The output layer is not cut: see `tile_loss_`.

    blocks: the classes whose instances are blocks; each block is recomputed as a whole in the backward. None
        selects the classes for which transformers offers gradient checkpointing. Gradient checkpointing must
        be off; like transformers' own, this switches the model's caches off.

    Returns the names of the modules that now run in slices.

    Raises:
        ValueError: fewer than one sample; no block found; a block inside another one.
    """
    named = _blocks(model, blocks)
    around = {name: one for name, one in _around(model, named) if _is_cut(one)}
    for module in (*named.values(), *around.values()):
        if isinstance(module, TiledEmbedding):
            untile_(module)
            slice_tiled_rows(module, micro_batch)
        elif isinstance(module, nn.Embedding) and is_plain_embedding(untile_(module)):
            slice_rows(module, micro_batch)
        else:
            tile_batch(module, micro_batch)
    config = getattr(model, "config", None)
    if blocks is None and getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
    return [name for name, module in model.named_modules() if runs_in_slices(module)]


def blocks_and_norms(
    model: nn.Module, blocks: type[nn.Module] | tuple[type[nn.Module], ...] | None
) -> dict[str, nn.Module]:
    """Return a model's blocks, and the norms outside them, by name. Arguments and errors: tile_batch_'s."""
    named = _blocks(model, blocks)
    norms = {name: one for name, one in _around(model, named) if type(one).__name__.endswith(_NORMS)}
    return named | norms


def _blocks(
    model: nn.Module, blocks: type[nn.Module] | tuple[type[nn.Module], ...] | None
) -> dict[str, nn.Module]:
    named = {name: module for name, module in model.named_modules() if _is_block(module, blocks)}
    if not named:
        raise ValueError(
            f"{type(model).__name__} has no blocks of a known class: name their class, as in "
            "tile_batch_(model, 2, blocks=Block), or slice them one by one with tile_batch"
        )
    for name in named:
        outer = next(
            (one for one in named if name.startswith(f"{one}." if one else "") and name != one), None
        )
        if outer is not None:
            raise ValueError(f"{name} is a block inside the block {outer or '(the model)'}: name one class")
    return named


def _is_block(module: nn.Module, blocks: type[nn.Module] | tuple[type[nn.Module], ...] | None) -> bool:
    if blocks is not None:
        return isinstance(module, blocks)
    return any((one.__module__, one.__name__) == _BLOCK for one in type(module).__mro__)


def _around(model: nn.Module, blocks: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are neither blocks nor within one."""
    for name, module in model.named_modules():
        if not any(name == block or name.startswith(f"{block}.") for block in blocks):
            yield name, module


def _is_cut(module: nn.Module) -> bool:
    """Whether a module outside the blocks treats each sample independently and is used only by calling it."""
    if isinstance(module, TiledEmbedding):
        return True
    if next(module.children(), None) is not None:
        return False
    return type(module) is nn.Embedding or type(module).__name__.endswith(_NORMS)

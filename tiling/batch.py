"""Batch tiles for a whole model: every block over micro-batches, while its parameters stay in place."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from infinity.tiling.rows import is_plain_embedding, slice_rows
from infinity.tiling.sliced import runs_in_slices, tile_batch, untile_

_BLOCK = ("transformers.modeling_layers", "GradientCheckpointingLayer")
_NORMS = ("LayerNorm", "RMSNorm")


def tile_batch_(
    model: nn.Module, micro_batch: int, blocks: type[nn.Module] | tuple[type[nn.Module], ...] | None = None
) -> list[str]:
    """Let every block of a model run on `micro_batch` samples at a time, in place; returns the names of the
    modules that do so now. `untile_` undoes it.

    One forward and one backward of the whole batch then use each parameter as often as those of one
    micro-batch, with the gradients of accumulating over all of them; the memory is that of one micro-batch
    inside a block, and the blocks' inputs. The norms and embeddings around the blocks are cut as well: what
    they keep for the backward is several times their input, and torch adds up rows of 16-bit embeddings in 16
    bits. The output layer is not: see `tile_loss_`.

    blocks: the classes whose instances are blocks, each recomputed as a whole in the backward. None: those
        for which transformers offers gradient checkpointing, which has to be off; caches are switched off, as
        it does.

    Raises:
        ValueError: fewer than one sample; no block; a block inside another one.
    """
    named = {name: module for name, module in model.named_modules() if _is_block(module, blocks)}
    if not named:
        raise ValueError(
            f"{type(model).__name__} has no block that is known as such: name their class, as in "
            "tile_batch_(model, 2, blocks=Block), or slice them one by one with tile_batch"
        )
    for name in named:
        outer = next(
            (one for one in named if name.startswith(f"{one}." if one else "") and name != one), None
        )
        if outer is not None:
            raise ValueError(f"{name} is a block inside the block {outer or '(the model)'}: name one class")
    around = {name: one for name, one in _around(model, named) if _is_cut(one)}
    for module in (*named.values(), *around.values()):
        if isinstance(module, nn.Embedding) and is_plain_embedding(untile_(module)):
            slice_rows(module, micro_batch)
        else:
            tile_batch(module, micro_batch)
    config = getattr(model, "config", None)
    if blocks is None and getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
    return [name for name, module in model.named_modules() if runs_in_slices(module)]


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
    """Whether a module outside the blocks treats each sample by itself, and is used by its call alone."""
    if next(module.children(), None) is not None:
        return False
    return type(module) is nn.Embedding or type(module).__name__.endswith(_NORMS)

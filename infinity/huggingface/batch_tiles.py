"""Batch tiles for generation: each block computes some sequences at a time, on weights fetched once.

[Note: tiles of a batch]
A forward without gradients reads the weights once, whatever the batch; but what a block needs of memory
beside them grows with it: its activations, and the keys and values that its attention works with. So a block
runs over tiles of a few sequences, one after another, while its weights stay resident, and the cache keeps
the keys and values of each tile apart: those of the whole batch never become one tensor. A block's input and
result, and the logits of the last tokens, are whole. Each sequence gets the bits that it has in a batch of
its tile alone.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from infinity.errors import UnsupportedError
from infinity.huggingface.kv_cache import StoredLayer, in_a_ring
from infinity.planning.generation import LayerWidths
from infinity.tiling.batch import blocks_and_norms
from infinity.tiling.sliced import InSlices, heads_in_front

logger = logging.getLogger("infinity")

_PLAIN = (torch.Tensor, Cache, bool, int, float, str, torch.dtype, torch.device, type(None))
"""Types of arguments that one tile cannot change for the next one; Caches are cut."""


def tile_generation_(
    model: nn.Module, sequences: int, blocks: type[nn.Module] | tuple[type[nn.Module], ...] | None = None
) -> list[str]:
    """Make every block of a model run on `sequences` sequences at a time in forwards without gradients, with
    or without a cache, in place. `infinity.tiling.untile_` undoes it.

    ::

        infinity.tile_generation_(model, sequences=8)
        model.generate(**inputs_of_64_prompts, cache=infinity.KVCache(model, host_memory="1GiB"))

    A pass over the weights then serves the whole batch, with the memory that one tile's activations, keys and
    values need. Norms outside the blocks are cut as well; forwards with gradients are as they were. With
    beams, `sequences` is a multiple of their number. Where the weights stream, those of a whole block are
    resident while it runs.

    blocks: the classes whose instances are blocks; None selects the classes for which transformers offers
        gradient checkpointing. A second call changes the number.

    Returns the names of the modules that now run in tiles.

    Raises:
        ValueError: fewer than one sequence; no block found; a block inside another one.
        UnsupportedError: when generating, for a cache that cannot be cut by sequences, and for beams of
            which one tile would have to see another; for arguments of blocks that cannot be cut.
    """
    tiled = _to_tile(model, sequences, blocks)
    for module, forward in tiled.values():
        module.forward = SequenceTiles(module, forward, sequences)
    return list(tiled)


def tile_where_possible_(model: nn.Module, sequences: int) -> list[str]:
    """Do as `tile_generation_`, but run blocks whole, and say why once, whose arguments cannot be cut.

    Returns a list that gets the reason then: empty while all blocks run in tiles.
    """
    why: list[str] = []
    for module, forward in _to_tile(model, sequences, None).values():
        module.forward = TilesWherePossible(module, forward, sequences, why)
    return why


def _to_tile(
    model: nn.Module, sequences: int, blocks: type[nn.Module] | tuple[type[nn.Module], ...] | None
) -> dict[str, tuple[nn.Module, Callable[..., Any]]]:
    """Return the modules to tile, by their names, each with the forward that it has without tiles."""
    if sequences < 1:
        raise ValueError(f"sequences={sequences}: expected 1 or more")
    tiled = {}
    for name, module in blocks_and_norms(model, blocks).items():
        before = module.__dict__.get("forward", module.forward)
        tiled[name] = module, before.forward if isinstance(before, SequenceTiles) else before
    return tiled


def _why_whole(leaves: Iterable[Any], named: Mapping[str, Any]) -> str | None:
    """Return why a block's arguments cannot be cut by sequences; None where they can."""
    for one in leaves:
        if isinstance(one, EncoderDecoderCache) or not isinstance(one, _PLAIN):
            return f"a block is given a {type(one).__name__}, which tiles would share or change"
        if isinstance(one, Cache) and not all(_can_be_cut(layer) for layer in one.layers):
            kinds = sorted({type(layer).__name__ for layer in one.layers if not _can_be_cut(layer)})
            return f"a cache's {', '.join(kinds)} cannot be cut by sequences"
        if isinstance(one, Cache) and not one.layers:
            return f"a {type(one).__name__} without layers cannot be cut: make it with config=model.config"
    bias = heads_in_front(named)
    return None if bias is None else f"a block is given {bias}"


class SequenceTiles(InSlices):
    """Replaces `module.forward`, on that one instance, to run some sequences at a time."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], sequences: int) -> None:
        """forward: what it replaces, and calls where gradients are on."""
        super().__init__(module, forward)
        self._sequences = sequences

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, in tiles where no gradients follow and the batch has more than one."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        batch = tensors[0].shape[0] if tensors and tensors[0].dim() > 1 else 0
        if torch.is_grad_enabled() or batch <= self._sequences:
            return self.forward(*args, **kwargs)
        why = _why_whole(leaves, kwargs)
        if why is not None:
            return self._whole(why, args, kwargs)
        sizes = [min(self._sequences, batch - start) for start in range(0, batch, self._sequences)]
        caches = [one for one in leaves if isinstance(one, Cache)]
        whole = _WholeBatch(batch)
        with self.unrecorded():
            for start, stop in _tiles(sizes, caches):
                part = [_cut(one, batch, start, stop) for one in leaves]
                given, named = pytree.tree_unflatten(part, spec)
                whole.put(self.untiled(*given, **named), start, stop)
        return whole.result()

    def _whole(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuse arguments that cannot be cut. Raises: UnsupportedError."""
        raise UnsupportedError(
            f"tile_generation_: {why}. DynamicCache(config=model.config) and KVCache can be cut, with full "
            "and with sliding attention; else leave tiles out."
        )

    @property
    def untiled(self) -> Callable[..., Any]:
        """The module's own forward."""
        forward: Any = self.forward
        while isinstance(forward, InSlices):
            forward = forward.forward
        own: Callable[..., Any] = forward
        return own


class TilesWherePossible(SequenceTiles):
    """Runs the block whole where its arguments cannot be cut."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], sequences: int, reasons: list[str]
    ) -> None:
        """reasons: of all blocks of the model; gets the first one."""
        super().__init__(module, forward, sequences)
        self._reasons = reasons

    def _whole(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it whole, and say so once for the model."""
        if not self._reasons:
            self._reasons.append(why)
            logger.warning("batches of this model run whole, not in tiles: %s", why)
        return self.forward(*args, **kwargs)


def _cut(leaf: Any, batch: int, start: int, stop: int) -> Any:
    """Return the rows of a tensor that has one per sequence; all else as it is."""
    if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[0] == batch:
        return leaf[start:stop]
    return leaf


def _tiles(sizes: list[int], caches: Iterable[Cache]) -> Iterator[tuple[int, int]]:
    """Yield where each tile begins and ends, while the caches keep its keys and values."""
    kept = [_tiled(cache, sizes) for cache in caches]
    start = 0
    for number, size in enumerate(sizes):
        for one in kept:
            one.begin(number)
        yield start, start + size
        start += size


class _WholeBatch:
    """The result of all tiles, put together."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._spec: pytree.TreeSpec | None = None
        self._leaves: list[Any] = []

    def put(self, result: Any, start: int, stop: int) -> None:
        """Copy the result of one tile to its place."""
        leaves, spec = pytree.tree_flatten(result)
        if self._spec is None:
            self._spec, self._leaves = spec, [self._made(one, stop - start) for one in leaves]
        for whole, one in zip(self._leaves, leaves, strict=True):
            if isinstance(one, torch.Tensor):
                whole[start:stop].copy_(one)

    def _made(self, one: Any, size: int) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        if not one.dim() or one.shape[0] != size:
            raise UnsupportedError(
                f"a block returned a tensor of shape {tuple(one.shape)} for a tile of {size} sequences: a "
                "result without one row per sequence cannot be put together. Name other classes as `blocks`."
            )
        return one.new_empty((self._batch, *one.shape[1:]))

    def result(self) -> Any:
        """Return it."""
        if self._spec is None:
            raise UnsupportedError("a batch without sequences has no tiles")
        return pytree.tree_unflatten(self._leaves, self._spec)


class CacheTiles:
    """The tiles in which a cache keeps its batch, and which of them computes: shared by its layers."""

    def __init__(self, sizes: list[int]) -> None:
        """sizes: sequences of each."""
        self.sizes = sizes
        self.now = 0
        """The tile that computes, or was the last to."""

    def begin(self, number: int) -> None:
        """Note the tile that computes from here on."""
        self.now = number


class TiledLayer(CacheLayerMixin):  # type: ignore[no-untyped-call] # transformers has few types
    """Keys and values of one layer, those of each tile in a layer of their own."""

    def __init__(self, parts: list[Any], tiles: CacheTiles) -> None:
        """parts: layers without tokens, one for each tile."""
        super().__init__()  # type: ignore[no-untyped-call] # the same
        self.parts, self.tiles = parts, tiles
        self.is_sliding = parts[0].is_sliding
        self.is_croppable = parts[0].is_croppable

    @property
    def _now(self) -> Any:
        return self.parts[self.tiles.now]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Begin with the type and place of the first keys, in the tile that computes."""
        self._now.lazy_initialization(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of a tile's tokens; return those of all its tokens.

        Raises: UnsupportedError where another number of sequences comes than the tile has.
        """
        expected = self.tiles.sizes[self.tiles.now]
        if key_states.shape[0] != expected:
            raise UnsupportedError(
                f"a cache in tiles of {self.tiles.sizes} sequences was given keys of {key_states.shape[0]}, "
                f"where {expected} compute. Use one cache for one batch, by tile_generation_ alone."
            )
        self.is_initialized = True
        found: tuple[torch.Tensor, torch.Tensor] = self._now.update(key_states, value_states, *args, **kwargs)
        return found

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return int(self._now.get_seq_length())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of the mask, and where it begins."""
        sizes: tuple[int, int] = self._now.get_mask_sizes(query_length)
        return sizes

    def get_max_length(self) -> int:
        """Return the most tokens that a tile keeps; -1 without a limit."""
        return int(self.parts[0].get_max_length())

    def activate_past_recording(self) -> None:
        """Keep what a `crop` may need, where a tile has a window."""
        for part in self.parts:
            if hasattr(part, "activate_past_recording"):
                part.activate_past_recording()

    def prefetch(self) -> None:
        """Have what the first tile needs on its way."""
        self.parts[0].prefetch()

    def offload(self) -> None:
        """Do nothing: each tile's layer keeps its keys and values where they belong."""

    def reset(self) -> None:
        """Forget all tokens."""
        for part in self.parts:
            part.reset()
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens."""
        for part in self.parts:
            part.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Go on with the sequences of these beams.

        Raises: UnsupportedError for a beam that another tile keeps.
        """
        start = 0
        for part, size, rows in zip(
            self.parts, self.tiles.sizes, torch.split(beam_idx, self.tiles.sizes), strict=True
        ):
            if int(rows.min()) < start or int(rows.max()) >= start + size:
                raise UnsupportedError(
                    f"tiles of {self.tiles.sizes} sequences cut through the beams of a prompt: give "
                    "tile_generation_ a multiple of num_beams"
                )
            part.reorder_cache(rows - start)
            start += size

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse it. Raises: UnsupportedError."""
        raise UnsupportedError(f"a cache in tiles cannot repeat each sequence {repeats} times")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refuse it. Raises: UnsupportedError."""
        raise UnsupportedError(f"a cache in tiles cannot go on with {len(indices)} of its sequences")


def _tiled(cache: Cache, sizes: list[int]) -> CacheTiles:
    """Return the tiles of a cache, which it gets at its first use.

    Raises: UnsupportedError for one that has others, holds tokens already, or has layers of another kind.
    """
    for layer in cache.layers:
        if isinstance(layer, TiledLayer):
            if layer.tiles.sizes != sizes:
                raise UnsupportedError(
                    f"a cache in tiles of {layer.tiles.sizes} sequences cannot be used in tiles of {sizes}"
                )
            return layer.tiles
    tiles = CacheTiles(sizes)
    cache.layers[:] = [_layer_in_tiles(layer, tiles) for layer in cache.layers]
    parts = [part for layer in cache.layers if isinstance(layer, TiledLayer) for part in layer.parts]
    in_a_ring([part for part in parts if isinstance(part, StoredLayer)])
    return tiles


def _can_be_cut(layer: Any) -> bool:
    kinds = (DynamicLayer, DynamicSlidingWindowLayer, StoredLayer, TiledLayer, DummyLayer)
    return type(layer) in kinds


def _layer_in_tiles(layer: Any, tiles: CacheTiles) -> Any:
    if isinstance(layer, DummyLayer):
        return layer
    if layer.is_initialized:
        raise UnsupportedError(
            "tile_generation_: the cache holds keys and values of a whole batch already. Begin with a new "
            "one."
        )
    count = len(tiles.sizes)
    own = isinstance(layer, StoredLayer)
    return TiledLayer([layer.another() if own else copy.deepcopy(layer) for _ in range(count)], tiles)


def widths_of(model: nn.Module) -> LayerWidths:
    """Return what a model of transformers makes of a token in its widest block."""
    config: Any = model.config
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    routed = getattr(text, "num_experts_per_tok", None) or 1
    blocks = [one for one in blocks_and_norms(model, None).values() if next(one.children(), None) is not None]
    products = max(_made(block, routed) for block in blocks)
    itemsize = max(one.dtype.itemsize for one in model.parameters() if one.is_floating_point())
    return LayerWidths(products, 2 * heads * width, max(2, itemsize))


def _made(block: nn.Module, routed: int) -> int:
    """Elements that a block's linear layers and experts make of a token. routed: experts of a token."""
    linear = sum(getattr(one, "out_features", 0) or getattr(one, "nf", 0) for one in block.modules())
    stacks = sum(routed * one.shape[1] for one in block.parameters() if one.dim() == 3)
    return max(1, linear + stacks)

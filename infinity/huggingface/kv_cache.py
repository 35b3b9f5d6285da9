"""Keys and values of a generation in host memory, within the budget, and beyond that on NVMe: a cache of
transformers.

[Note: where keys and values lie]
What a layer has computed last is its *tail*, in memory where it computes. When the tail has grown to a
segment it is sealed: it stays in host memory while the cache's share of the budget has room, and else is
written to NVMe, by the lane, as saved activations are (activations/boundaries.py), with a checksum. A token
reads what its layer has there, once, and while a layer computes the segments of the next one are on their
way, as far as the budget's share for bytes on their way has room. Nothing is rounded: the model sees the
bits that it computed.

The share is taken from what keeps weights in host memory. A byte of keys and values is read as often as a
byte of weights, once for each token, so neither is better kept; but keys and values would have to be written
first.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from infinity.activations.boundaries import Boundaries, Boundary
from infinity.engine.engine import Engine, engine_of_model
from infinity.errors import ConfigError, HostMemoryError
from infinity.sizes import format_size, parse_size
from infinity.storage.memory import Ledger

_SEGMENT_NBYTES_MOST = 4 << 20


class KVCache(DynamicCache):
    """The keys and values of one generation, in host memory as far as `host_memory` goes, else on NVMe.

    ::

        cache = infinity.KVCache(model, host_memory="1GiB")
        model.generate(**inputs, cache=cache)

    model: built in Init, with a `config` of transformers. host_memory: the cache's share of the model's
    budget (a quarter of what keeps weights there, without one); weights that lie there make room. The share
    is given back with the cache. The whole keys and values of one layer are in memory beside it while that
    layer computes. Layers with a sliding window keep only that, in memory, as transformers' own do.

    Raises: ConfigError for a model without a configuration; HostMemoryError for a share that the budget does
    not have, or, without an NVMe tier, when it is full.
    """

    def __init__(self, model: nn.Module, *, host_memory: str | int | None = None) -> None:
        """Take the share."""
        config = getattr(model, "config", None)
        if config is None:
            raise ConfigError(
                f"KVCache is for models of transformers: {type(model).__name__} has no `config`, which says "
                "what its layers keep"
            )
        super().__init__(config=config)
        engine = engine_of_model(model)
        nbytes = (
            engine.kept.limit_nbytes // 4 if host_memory is None else parse_size(host_memory, "host_memory")
        )
        _take_share(engine, nbytes)
        self._end = weakref.finalize(self, engine.kept.release, nbytes)
        self._end.atexit = False
        share = Ledger(nbytes // 2)  # the other half is for tails
        self._segments = _Segments(engine, share, tails_nbytes=nbytes // 2)
        self.layers = [
            StoredLayer(self._segments) if type(layer) is DynamicLayer else layer for layer in self.layers
        ]
        in_a_ring([layer for layer in self.layers if isinstance(layer, StoredLayer)])
        self._share = share

    @property
    def host_nbytes(self) -> int:
        """Bytes of sealed keys and values in host memory now."""
        return self._share.held_nbytes

    @property
    def nvme_nbytes(self) -> int:
        """Bytes of sealed keys and values on NVMe now."""
        return self._segments.sealed_nbytes - self.host_nbytes


def _take_share(engine: Engine, nbytes: int) -> None:
    """Reserve bytes of the budget's kept share; weights that lie there leave as far as they have to."""
    kept = engine.kept
    if engine.pins is not None and nbytes > kept.free_nbytes - kept.aside_nbytes:
        engine.parameters.before_change()  # a commit may be reading the fields that leave
        engine.pins.make_room(nbytes)
    if not kept.try_reserve(nbytes):
        works = format_size(engine.least_total(None, nbytes))
        raise HostMemoryError(
            f"KVCache(host_memory={format_size(nbytes)}) does not fit: the budget keeps "
            f"{format_size(kept.limit_nbytes)} in host memory, {format_size(kept.held_nbytes)} of them in "
            f"use. Give the cache a smaller share, or Init a larger host_memory: {works} works."
        )


class _Segments:
    """Where the layers of one cache keep their sealed keys and values."""

    def __init__(self, engine: Engine, share: Ledger, tails_nbytes: int) -> None:
        """share: of host memory. tails_nbytes: for the tails of all layers together."""
        self.sealed_nbytes = 0
        """Bytes in host memory and on NVMe."""
        self._tails_nbytes, self._tails = tails_nbytes, 0
        self._nvme, self._share = engine.nvme_store, share
        self._boundaries = Boundaries(
            "host",
            engine.lane,
            engine.device,
            engine.outgoing_share,
            share,
            engine.nvme_store,
            engine.traffic,
            verify=str(engine.config.verify),
        )
        self._boundaries.open(engine.budget.tile_numel)
        engine.outgoing_share.use_in_rounds()
        self._count = 0

    def tail_added(self) -> None:
        """Count a layer that keeps a tail."""
        self._tails += 1

    @property
    def segment_nbytes(self) -> int:
        """Bytes of a tail that is sealed."""
        return max(1, min(_SEGMENT_NBYTES_MOST, self._tails_nbytes // max(1, self._tails)))

    def dropped(self, nbytes: int) -> None:
        """Note that a layer has forgotten so many sealed bytes."""
        self.sealed_nbytes -= nbytes

    def seal(self, tensor: torch.Tensor) -> Boundary:
        """Move a tensor to where it waits for its next use."""
        if self._nvme is None and tensor.nbytes > self._share.free_nbytes:
            limit = format_size(self._share.limit_nbytes)
            raise HostMemoryError(
                f"KVCache: {format_size(tensor.nbytes)} of keys or values do not fit its share of host "
                f"memory, of which {format_size(self._share.held_nbytes)} of {limit} "
                "are in use, and there is no NVMe tier. Give KVCache a larger host_memory, or Init a folder "
                "(nvme=...)."
            )
        self._boundaries.settle()
        self._count += 1
        with torch.inference_mode(mode=False), torch.no_grad():
            boundary = Boundary(self._boundaries, tensor.contiguous().clone(), self._count, None, "host")
            boundary.leave()
        self.sealed_nbytes += tensor.nbytes
        return boundary

    def take(self, boundary: Boundary) -> torch.Tensor:
        """Return what was sealed; it stays sealed."""
        with torch.inference_mode(mode=False), torch.no_grad():
            return boundary.take()


class StoredLayer(CacheLayerMixin):  # type: ignore[no-untyped-call] # transformers has few types
    """Keys and values of one layer, (batch, heads, tokens, width): see [Note: where keys and values lie]."""

    is_sliding = False
    is_croppable = True

    def __init__(self, segments: Any) -> None:
        """segments: where to seal."""
        super().__init__()  # type: ignore[no-untyped-call] # the same
        self._store: _Segments = segments
        self._tail: tuple[torch.Tensor, torch.Tensor]
        self._sealed: list[tuple[Boundary, Boundary]] = []
        self._following: weakref.ref[StoredLayer] | None = None
        self._tokens = self._sealed_nbytes = 0
        self._store.tail_added()

    def another(self) -> StoredLayer:
        """Return a layer without tokens that seals in the same place."""
        return StoredLayer(self._store)

    def precede(self, following: StoredLayer) -> None:
        """Note the layer that computes after this one."""
        self._following = weakref.ref(following)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Begin with the type and place of the first keys."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self._tail = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of tokens; return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        sealed = self._take()
        if self._following is not None and (following := self._following()) is not None:
            following.prefetch()
        keys, values = self._tail
        self._tail = torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)
        self._tokens += key_states.shape[-2]
        whole = self._joined(sealed)
        if sum(one.nbytes for one in self._tail) >= self._store.segment_nbytes:
            self._seal()
        return whole

    def _seal(self) -> None:
        keys, values = self._tail
        self._sealed.append((self._store.seal(keys), self._store.seal(values)))
        self._sealed_nbytes += keys.nbytes + values.nbytes
        self._tail = keys[..., :0, :].clone(), values[..., :0, :].clone()

    def _take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        for pair in self._sealed:
            for one in pair:
                one.begin(ahead=False)
        return [(self._store.take(keys), self._store.take(values)) for keys, values in self._sealed]

    def _joined(self, sealed: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        if not sealed:
            return self._tail
        keys = torch.cat([*(one for one, _ in sealed), self._tail[0]], dim=-2)
        return keys, torch.cat([*(one for _, one in sealed), self._tail[1]], dim=-2)

    def prefetch(self) -> None:
        """Have what lies on NVMe on its way, as far as there is room."""
        for pair in self._sealed:
            for one in pair:
                one.begin(ahead=True)

    def offload(self) -> None:
        """Do nothing: `update` seals what has to leave."""

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self._tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of the mask, and where it begins."""
        return self._tokens + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: it grows."""
        return -1

    def reset(self) -> None:
        """Forget all tokens."""
        self._forget()
        self._tokens = 0
        self.is_initialized = False

    def _forget(self) -> None:
        self._store.dropped(self._sealed_nbytes)
        self._sealed, self._sealed_nbytes = [], 0

    def _replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._forget()
        self._tail, self._tokens = (keys, values), keys.shape[-2]
        self._seal()

    def _changed(self, change: Any) -> None:
        if self._tokens:
            keys, values = self._joined(self._take())
            self._replace(change(keys), change(values))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative number of them, as transformers' own layers take it.

        Raises: ValueError for a positive one.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the tokens to remove as a negative number")
        if tokens_to_remove:
            self._changed(lambda one: one[..., :tokens_to_remove, :])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._changed(lambda one: one.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with these sequences."""
        self._changed(lambda one: one[indices, ...])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Go on with the sequences of these beams."""
        self._changed(lambda one: one.index_select(0, cast("torch.Tensor", beam_idx).to(one.device)))


def in_a_ring(layers: Sequence[StoredLayer]) -> None:
    """Have each layer prefetch for the next one, in the order in which they compute, and the last one for the
    first.
    """
    for layer, following in zip(layers, [*layers[1:], *layers[:1]], strict=True):
        layer.precede(following)

"""Sparse attention of transformers' models: layouts of blocks as masks.

[Note: through the interface]
transformers calls attention, and makes masks, through two tables of functions by name. A model gets a name
of its own in both. Our mask is the model's own (causal, sliding, padding, documents) and the layout together;
our attention is the one below it, with that mask. With sdpa the mask is a tensor, and attention is as dense
as before: the results of sparse attention, and no fewer operations. With flex attention, of accelerators,
blocks that are not attended to are left out.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, UnsupportedError, meant
from infinity.sequences.attention import INNER
from infinity.sequences.parallel import is_divided
from infinity.sequences.sparse_layouts import SparseLayout

_numbers = itertools.count()
_of_models: weakref.WeakKeyDictionary[nn.Module, SparseAttention] = weakref.WeakKeyDictionary()
_inner_of: dict[str, str] = {}
"""Our names of attention -> those of the attention below."""


def inner_attention(name: str | None) -> str | None:
    """Return the name of the attention that computes, below a sparse one."""
    return None if name is None else _inner_of.get(name, name)


class SparseAttention:
    """Lets the tokens of a model of transformers attend to some blocks of tokens alone, in all layers.

    model: built in Init or not. mode: "fixed", "variable", "bigbird", "bslongformer", "sliding", "dense";
    the options of each are DeepSpeed's, see sequences.sparse_layouts. What the model's own mask forbids stays
    forbidden, so that a decoder is causal with each. Blocks count from the first column of a row, padding
    too; a last block may be short. attention: of the layout, "bidirectional" or "unidirectional".
    implementation: what computes, "sdpa" or "flex_attention"; None: what the model has.

    Raises: ConfigError for options that do not fit, and a model that is sparse already; UnsupportedError for
    a model whose attention is not transformers' interface, encoder-decoders, models of several parts,
    eager and flash attention, sequences that ranks share, and heads that differ under flex attention. In a
    forward UnsupportedError where the layout would be lost: a mask of queries and keys, or another attention
    that the model was given since (set_attn_implementation).
    """

    def __init__(
        self, model: Any, mode: str = "fixed", *, implementation: str | None = None, **options: Any
    ) -> None:
        """Give `model` an attention of its own."""
        known = SparseLayout.__dataclass_fields__
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ConfigError(f"SparseAttention({unknown[0]}=...): unknown{meant(unknown[0], known)}")
        self.layout = SparseLayout(mode=mode, **options)
        _check(model)
        self.heads = int(model.config.num_attention_heads)
        self._before = model.config._attn_implementation  # noqa: SLF001 - transformers has no other name for it
        inner = implementation or self._before
        if inner not in INNER:
            raise UnsupportedError(
                f"{type(model).__name__} has attn_implementation={inner!r}, which takes no mask of blocks; "
                f"choose one of {', '.join(map(repr, INNER))}: SparseAttention(..., "
                'implementation="sdpa")'
            )
        if inner == "flex_attention" and self.layout.different_layout_per_head:
            raise UnsupportedError(
                "different_layout_per_head=True with flex_attention: transformers makes one mask for all "
                'heads; leave it out, or choose implementation="sdpa"'
            )
        self._inner, self._kept = inner, dict[tuple[int, torch.device], torch.Tensor]()
        self._name = f"infinity_sparse_{next(_numbers)}"
        self._model = weakref.ref(model)
        _register(self._name, self._attend, self._mask)
        _inner_of[self._name] = inner
        self._install(model)
        models = [one for one in model.modules() if hasattr(one, "set_attn_implementation")]
        check = partial(_see_that_the_layout_holds, self._name)
        self._hooks = [one.register_forward_pre_hook(check, with_kwargs=True) for one in models]
        _of_models[model] = self

    def blocks(self, tokens: int) -> torch.Tensor:
        """Return which blocks attend to which in a row of so many tokens: bool, [heads, blocks, blocks], with
        one head where all are alike.
        """
        return self.layout.blocks(math.ceil(tokens / self.layout.block), self.heads)

    def share(self, tokens: int) -> float:
        """Return the share of pairs of blocks that attend, before the model's own mask."""
        return float(self.blocks(tokens).float().mean())

    def remove(self) -> None:
        """Give the model the attention that it had; a second call does nothing."""
        model = self._model()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if model is not None and _of_models.pop(model, None) is not None:
            model.set_attn_implementation(self._before)

    def _install(self, model: Any) -> None:
        model.set_attn_implementation(self._name)
        models = [one for one in model.modules() if hasattr(one, "set_attn_implementation")]
        if any(one.config._attn_implementation != self._name for one in models):  # noqa: SLF001
            model.set_attn_implementation(self._before)
            raise UnsupportedError(
                f"{type(model).__name__} does not take its attention from transformers' AttentionInterface, "
                "so no mask of blocks can be put below it"
            )

    def _attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        if mask is None:
            raise UnsupportedError(
                f"{type(module).__name__} attends without a mask of transformers.masking_utils, to which the "
                "layout of blocks is added: its attention cannot be sparse"
            )
        return INNER[self._inner](module, query, key, value, mask, **options)

    def _mask(
        self,
        *,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any],
        q_offset: Any = 0,
        kv_offset: Any = 0,
        device: Any = "cpu",
        **more: Any,
    ) -> Any:
        """Make the mask of a forward, as transformers' AttentionMaskInterface asks for it."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks

        end = max(int(kv_offset) + kv_length, int(q_offset) + q_length)
        layout = self._on(math.ceil(end / self.layout.block), torch.device(device))
        alike = len(layout) == 1
        given = {
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "device": device,
            **more,
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
        }
        if alike:
            mask_function = and_masks(mask_function, self.pattern(layout[0]))
        mask = ALL_MASK_ATTENTION_FUNCTIONS[self._inner](mask_function=mask_function, **given)
        if alike:
            return mask
        size = self.layout.block
        queries = (torch.arange(q_length, device=device) + q_offset) // size
        keys = (torch.arange(kv_length, device=device) + kv_offset) // size
        return mask & layout[:, queries][:, :, keys].unsqueeze(0)

    def pattern(self, layout: torch.Tensor) -> Callable[..., Any]:
        """Return (batch, head, query, key) -> whether the query attends to the key, for [blocks, blocks]."""
        size = self.layout.block

        def attends(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
            return layout[query // size, key // size]

        return attends

    def _on(self, blocks: int, device: torch.device) -> torch.Tensor:
        """Return the layout on a device; the last one is kept."""
        place = (blocks, device)
        if place not in self._kept:
            made = self.layout.blocks(blocks, self.heads).to(device)
            self._kept.clear()
            self._kept[place] = made
        return self._kept[place]


def _check(model: Any) -> None:
    """Raises: UnsupportedError, ConfigError for a model whose attention cannot be made sparse."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise UnsupportedError(f"{name} is not a model of transformers: its attention cannot be made sparse")
    if any(one in _of_models for one in model.modules()):
        raise ConfigError(f"{name}: its attention is sparse already; remove() that first")
    if is_divided(model):
        raise UnsupportedError(f"{name}: ranks share its sequences; leave sequence_parallel out")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} attends from a decoder to an encoder, for which there are no layouts")
    parts = {id(one.config): one for one in model.modules() if hasattr(one, "set_attn_implementation")}
    if len(parts) > 1:
        raise UnsupportedError(
            f"{name} consists of several models, {', '.join(type(one).__name__ for one in parts.values())}: "
            "give SparseAttention one of them"
        )


def _see_that_the_layout_holds(name: str, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises: UnsupportedError for another attention than ours of this name, and for masks that transformers
    would take as they are: either way the forward would be without the layout.
    """
    now = model.config._attn_implementation  # noqa: SLF001 - transformers has no other name for it
    if now != name:
        raise UnsupportedError(
            f"{type(model).__name__} was given another attention after SparseAttention, as by "
            f"set_attn_implementation({now!r}): the layout of blocks would be lost. Call remove() of the "
            "SparseAttention first; for a layout above that attention make SparseAttention(..., "
            f"implementation={now!r}) then"
        )
    mask = kwargs.get("attention_mask")
    for one in (*args, mask):
        finished = isinstance(one, torch.Tensor) and one.dim() == 4  # of queries and keys
        if finished or (one is mask and one is not None and not isinstance(one, torch.Tensor)):
            raise UnsupportedError(
                f"{type(model).__name__} was given an attention_mask of queries and keys, to which no layout "
                "of blocks is added: give it the padding alone, [rows, tokens]"
            )


def _register(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Enter functions into transformers' tables, which last for ever: they hold no model."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)

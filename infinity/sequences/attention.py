"""The attention of one rank of a sequence: a part of the heads, over all tokens.

[Note: sinks]
gpt-oss adds one logit per head to the softmax, whose probability is dropped.
scaled_dot_product_attention has no argument for that. A key in front of the others does it: queries get eight
more elements (1, 0, ...), that key has sink / scale at the first of them and zeros elsewhere, and its value
is zero. So its logit is the sink, and the kernel never sees more than one more key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

from infinity.errors import ConfigError, UnsupportedError
from infinity.sequences.exchange import ToHeads, ToTokens
from infinity.sequences.group import SequenceGroup

Attention = Callable[..., tuple[torch.Tensor, Any]]
"""A function of transformers' AttentionInterface."""

_BEYOND = ("position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "block_table")
"""Arguments of attention functions that hold a part of the heads or of the tokens in a form of their own."""
_MORE = 8  # elements by which queries and keys grow for sinks: a multiple of what kernels want


@dataclass(frozen=True, slots=True)
class HeadsOfRank:
    """How heads are divided among ranks."""

    queries: int
    """Query heads of a rank."""
    keys: int
    """Key heads of a rank."""
    copies: int
    """Ranks that hold the same key head; 1 where each key head is on one rank."""


def divide_heads(queries: int, keys: int, ranks: int) -> HeadsOfRank:
    """Divide query heads and key heads among the ranks of a sequence.

    Raises: ConfigError, with the sizes that work.
    """
    fits = queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)
    if not fits:
        works = [
            str(size)
            for size in range(1, queries + 1)
            if queries % size == 0 and (keys % size == 0 or size % keys == 0)
        ]
        raise ConfigError(
            f"sequence_parallel: {queries} query heads and {keys} key heads cannot be divided among {ranks} "
            "ranks: query heads have to be a multiple of the ranks, and key heads a multiple or a divisor "
            f"of them. Sizes that work here: {', '.join(works)}"
        )
    return HeadsOfRank(queries // ranks, max(keys // ranks, 1), max(ranks // keys, 1))


def attend(
    group: SequenceGroup,
    inner: Attention,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from this rank's tokens to those of all ranks; see transformers' AttentionInterface.

    query, key, value: [batch, heads, tokens / N, width]. attention_mask: of the whole sequence, or None.
    inner: what attends with a part of the heads. Returns [batch, tokens / N, heads, width].
    """
    heads = divide_heads(query.shape[1], key.shape[1], group.size)
    _check(module, query, key, value, attention_mask, options, group.size)
    query, key, value = ToHeads.apply(group, heads.copies, query, key, value)  # type: ignore[no-untyped-call]
    sinks = options.pop("s_aux", None)
    if sinks is not None:
        options["s_aux"] = sinks.view(group.size, -1)[group.rank]
    ours = SimpleNamespace(
        training=getattr(module, "training", False),
        is_causal=getattr(module, "is_causal", True),
        num_key_value_groups=heads.queries // heads.keys,
    )
    attended, _ = inner(ours, query, key, value, attention_mask, **options)
    return ToTokens.apply(group, attended), None  # type: ignore[no-untyped-call]


def _check(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    options: dict[str, Any],
    ranks: int,
) -> None:
    """Refuse what cannot be divided.

    Raises: UnsupportedError naming the module's class and what it asks for.
    """
    name, tokens = type(module).__name__, query.shape[2]
    if key.shape[2] != tokens:
        raise UnsupportedError(
            f"{name} attends from {tokens} tokens of a rank to {key.shape[2]}: a cache of earlier tokens, or "
            "an encoder's output, is not divided among ranks. Generate inside `with sequences.whole():`"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise UnsupportedError(
            f"{name}: queries {query.dtype}, keys {key.dtype}, values {value.dtype} differ"
        )
    for one in _BEYOND:
        if options.get(one) is not None:
            raise UnsupportedError(f"{name} attends with {one}, which is not divided among ranks")
    if options.get("output_attentions"):
        raise UnsupportedError("output_attentions=True: no rank has the weights of all heads; leave it out")
    shape = None if mask is None else tuple(mask.shape[-2:])
    if shape is not None and shape != (tokens * ranks, tokens * ranks):
        raise UnsupportedError(
            f"{name} has a mask of {' x '.join(map(str, shape))} for {tokens * ranks} tokens of {ranks} "
            "ranks: a mask that the model, or its caller, builds from a rank's tokens cannot be split. "
            "Causal, sliding-window and chunked masks of transformers.masking_utils work, with padding and "
            "position_ids"
        )


def sdpa(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, Any]:
    """Attend with torch's scaled_dot_product_attention, as transformers does, and with sinks (s_aux)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sinks = options.pop("s_aux", None)
    if sinks is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    return _with_sinks(module, query, key, value, mask, sinks, **options), None


def _with_sinks(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> torch.Tensor:
    """See [Note: sinks]. sinks: [heads]; returns [batch, tokens, heads, width]."""
    tokens, width = query.shape[2:]
    scale = scaling if scaling is not None else width**-0.5
    key, value = (one.repeat_interleave(module.num_key_value_groups, 1) for one in (key, value))
    first = (sinks.to(query.dtype) / scale).view(1, -1, 1, 1).expand(len(query), -1, 1, 1)
    more = query.new_zeros(_MORE)
    more[0] = 1
    wide_query = torch.cat([query, more.expand(*query.shape[:3], _MORE)], dim=-1)
    wide_key = torch.cat([F.pad(first, (width, _MORE - 1)), F.pad(key, (0, _MORE))], dim=2)
    wide_value = F.pad(value, (0, width + _MORE - value.shape[-1], 1, 0))
    if mask is None:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device)
        mask = mask.tril() if module.is_causal else mask
    if mask.dtype != torch.bool:
        raise UnsupportedError(f"sinks with a mask of {mask.dtype}: masks of booleans work")
    attended = F.scaled_dot_product_attention(
        wide_query,
        wide_key,
        wide_value,
        attn_mask=F.pad(mask, (1, 0), value=True),
        dropout_p=dropout,
        scale=scale,
    )
    return attended[..., : value.shape[-1]].transpose(1, 2).contiguous()


def flex(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, Any]:
    """Attend with torch's flex attention, as transformers does."""
    from transformers.integrations.flex_attention import flex_attention_forward

    return flex_attention_forward(module, query, key, value, mask, **options)


INNER: dict[str, Attention] = {"sdpa": sdpa, "flex_attention": flex}
"""What may attend with a part of the heads, by transformers' names."""

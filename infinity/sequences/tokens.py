"""A layer's arguments for some of its tokens: which of their dimensions are rows and tokens.

A *layout* names each dimension of a tensor by a letter: "b" the rows of the batch, "t" tokens, "." anything
else; "b.tt" is a mask of queries and keys. Several are divided by commas: that with the tensor's number of
dimensions is taken. "" is for arguments that do not depend on tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from infinity.errors import ConfigError, UnsupportedError

KNOWN = {
    "attention_mask": "bt,btt,b.tt",
    "position_ids": "bt,.bt",
    "position_embeddings": "bt.,.bt.",
    "src_key_padding_mask": "bt",
    "cache_position": "",
}
"""Layouts of arguments of transformers' and torch's layers."""
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "seq_idx")
"""Arguments that say where documents begin, in numbers of tokens."""
_PLAIN = (bool, int, float, str, Enum, torch.dtype, torch.device, type(None))


def check_layouts(layouts: dict[str, str]) -> None:
    """See that each is a layout, with rows wherever it has tokens.

    Raises: ConfigError naming the argument.
    """
    for name, layout in layouts.items():
        for one in layout.split(",") if isinstance(layout, str) else "?":
            if set(one) - set("bt.") or one.count("b") != bool(one):
                raise ConfigError(
                    f"arguments={{{name!r}: {layout!r}}}: expected a letter for each dimension, b for rows "
                    'once, t for tokens, . for others, as in "b.tt"; or "" for what has no tokens'
                )


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens of one call of a layer that are kept."""

    indices: torch.Tensor
    """[rows, kept], int64, growing in each row."""
    tokens: int
    """Of a row, with those that are not kept."""

    def of(self, tensor: torch.Tensor, layout: str, name: str) -> torch.Tensor:
        """Return the kept tokens of a tensor; one that is the same for all rows is given rows of its own.

        Raises: UnsupportedError for a shape that is not the layout's, with both.
        """
        row = layout.index("b")
        rows = len(self.indices)
        for place, letter in enumerate(layout):
            expected = {"b": (1, rows), "t": (1, self.tokens)}.get(letter)
            if expected is not None and tensor.shape[place] not in expected:
                raise UnsupportedError(
                    f"RandomLTD: {name} is {tuple(tensor.shape)}, but the layer has {rows} rows of "
                    f"{self.tokens} tokens, and {name} is {layout!r}: b rows, t tokens"
                )
        for place, letter in enumerate(layout):
            if letter == "t" and tensor.shape[place] == self.tokens:
                shape = list(tensor.shape)
                shape[row] = rows
                tensor = tensor.expand(shape)
                tensor = tensor.gather(place, self._index(shape, row, place))
        return tensor

    def put_back(self, whole: torch.Tensor, kept: torch.Tensor, layout: str) -> torch.Tensor:
        """Return `whole` with the kept tokens replaced, in their type."""
        shape, place = list(kept.shape), layout.index("t")
        return whole.to(kept.dtype).scatter(place, self._index(shape, layout.index("b"), place), kept)

    def _index(self, shape: list[int], row: int, place: int) -> torch.Tensor:
        """Return the indices as gather and scatter want them, in a shape whose tokens are at `place`."""
        ones = [1] * len(shape)
        ones[row], ones[place] = self.indices.shape
        indices = self.indices if row < place else self.indices.t()
        expanded = list(shape)
        expanded[place] = self.indices.shape[1]
        return indices.reshape(ones).expand(expanded)

    def argument(self, name: str, value: Any, layouts: dict[str, str]) -> Any:
        """Return an argument of the layer, for the tokens that are kept.

        Raises: UnsupportedError for one that depends on tokens in a way that is not known.
        """
        layout = layouts.get(name)
        if layout == "" or isinstance(value, _PLAIN):
            if name in LENGTHS and value is not None and layout is None:
                raise _unknown(name, value, "says where documents begin, in tokens")
            return value
        if layout is not None:
            if isinstance(value, tuple | list):
                found = [self._leaf(name, one, layout) for one in value]
                return found if isinstance(value, list) else tuple(found)
            return self._leaf(name, value, layout)
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                if self.tokens in leaf.shape or name in LENGTHS:
                    raise _unknown(name, leaf, f"may be of the {self.tokens} tokens")
            elif not isinstance(leaf, _PLAIN):
                raise _unknown(name, leaf, "may hold something of the tokens")
        return value

    def _leaf(self, name: str, one: Any, layouts: str) -> Any:
        if one is None:
            return None
        if not isinstance(one, torch.Tensor):
            raise UnsupportedError(
                f"RandomLTD: {name} is a {type(one).__name__}, which has no tokens that could be left out; "
                'for masks choose attn_implementation="sdpa" or "eager"'
            )
        for layout in layouts.split(","):
            if len(layout) == one.dim():
                return self.of(one, layout, name)
        raise _unknown(name, one, f"has not the dimensions of {layouts!r}")


def _unknown(name: str, value: Any, why: str) -> UnsupportedError:
    what = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    return UnsupportedError(
        f"RandomLTD: the layer's argument {name} ({what}) {why}. Say which of its dimensions are rows and "
        f"tokens: RandomLTD(..., arguments={{{name!r}: 'bt.'}}), b for rows, t for tokens, . for others; or "
        "'' if it has none"
    )


def caches_in(arguments: Iterable[Any]) -> list[Any]:
    """Return the caches of keys and values among arguments."""
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    return [one for one in arguments if isinstance(one, cache)]

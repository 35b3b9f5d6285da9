"""Masks of the whole sequence, for attention that sees all tokens of some heads.

[Note: masks from a rank's tokens]
A model builds its masks with transformers.masking_utils, from what it
sees: a rank's tokens. That module gives our mask function the pattern (causal, a sliding window, chunks) as a
function of two positions, before it becomes a tensor, so the tensor can be built for the whole sequence.
Padding and the borders of packed documents would be a rank's own. So the model is given a mask of padding of
all ranks' tokens instead of a rank's, which also keeps transformers from looking for borders, and these are
found here, in the positions of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from infinity.errors import UnsupportedError

Pattern = Callable[[Any, Any, Any, Any], Any]
"""(batch, head, query, key) to whether the query attends to the key."""


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """What a call of the model is about, over all ranks."""

    rows: int
    tokens: int
    """Of each rank."""
    ranks: int
    padding: torch.Tensor | None
    """[rows, all tokens], False where a token is padding; None without padding."""
    positions: torch.Tensor | None
    """[rows, all tokens] of packed documents; None where each row is one."""

    @property
    def length(self) -> int:
        """Tokens of all ranks."""
        return self.tokens * self.ranks


def packed(positions: torch.Tensor) -> torch.Tensor | None:
    """Return the positions if they are those of several documents in a row: if they do not always grow by
    one; else None.
    """
    return positions if bool((positions.diff(dim=1) != 1).any()) else None


def whole_mask(
    make: Callable[..., Any],
    sequence: WholeSequence,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Pattern,
    allow_is_causal_skip: bool = True,
    **more: Any,
) -> Any:
    """Return the mask for all tokens that `make`, of transformers' AttentionMaskInterface, builds.

    The other arguments are transformers'; attention_mask is replaced by sequence.padding.

    Raises: UnsupportedError for a pattern that holds something of each token.
    """
    more.pop("attention_mask", None)
    offsets = [one for one in (q_offset, kv_offset) if not (isinstance(one, int) and one == 0)]
    if offsets or q_length != sequence.tokens or kv_length not in (sequence.tokens, sequence.length):
        raise UnsupportedError(
            f"a mask of {q_length} x {kv_length} for {sequence.tokens} tokens of each of {sequence.ranks} "
            "ranks: caches are not divided among ranks. Generate inside `with sequences.whole():`"
        )
    for tensor in _tensors(mask_function):
        if tensor.ndim > 1:
            raise UnsupportedError(
                f"the model's mask depends on a tensor of {tuple(tensor.shape)} that describes each token of "
                "this rank (blocks of images, custom masks), so it cannot be built for the tokens of all "
                "ranks"
            )
    if sequence.positions is not None:
        mask_function = _in_documents(mask_function, sequence.positions)
    return make(
        batch_size=batch_size,
        q_length=sequence.length,
        kv_length=sequence.length,
        q_offset=0,
        kv_offset=0,
        mask_function=mask_function,
        attention_mask=sequence.padding,
        allow_is_causal_skip=allow_is_causal_skip and sequence.positions is None,
        **more,
    )


def _in_documents(pattern: Pattern, positions: torch.Tensor) -> Pattern:
    """Let a pattern count within each document, and keep documents apart."""
    starts = torch.zeros_like(positions, dtype=torch.long)
    starts[:, 1:] = (positions.diff(dim=1) != 1).cumsum(1)

    def within(batch: Any, head: Any, query: Any, key: Any) -> Any:
        same = starts[batch, query] == starts[batch, key]
        return same & pattern(batch, head, positions[batch, query], positions[batch, key])

    return within


def _tensors(function: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors that a function, or functions in it, holds on to."""
    seen = set() if seen is None else seen
    for cell in getattr(function, "__closure__", None) or ():
        for one in (
            cell.cell_contents if isinstance(cell.cell_contents, tuple | list) else (cell.cell_contents,)
        ):
            if id(one) in seen:
                continue
            seen.add(id(one))
            if isinstance(one, torch.Tensor):
                yield one
            elif callable(one):
                yield from _tensors(one, seen)

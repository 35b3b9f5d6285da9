"""What a batch holds of each token: cut along the sequence. No communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from infinity.errors import UnsupportedError

IGNORED = -100
"""The label that no loss counts; transformers' own."""


def length_of(batch: Mapping[str, Any]) -> int:
    """Return the tokens of each row of a batch.

    Raises: UnsupportedError for a batch without input_ids or inputs_embeds.
    """
    for name in ("input_ids", "inputs_embeds"):
        one = batch.get(name)
        if isinstance(one, torch.Tensor) and one.ndim > 1:
            return one.shape[1]
    raise UnsupportedError(
        f"a batch of {', '.join(map(repr, batch)) or 'nothing'}: expected a dict with input_ids or "
        "inputs_embeds, [rows, tokens, ...], as transformers' collators give it"
    )


def cut(batch: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    """Return the batch with the tokens from `start` to `end` of everything that has as many as the batch.

    Raises: UnsupportedError for what has them in two dimensions, such as a mask of queries and keys.
    """
    length = length_of(batch)
    ours: dict[str, Any] = {}
    for name, one in batch.items():
        sized = isinstance(one, torch.Tensor) and one.ndim > 1
        if sized and length in one.shape[2:] and length > 1 and name != "inputs_embeds":
            raise UnsupportedError(
                f"{name!r} of {tuple(one.shape)} has the {length} tokens of the batch in another dimension "
                "than the second: masks of queries and keys cannot be cut. Give padding as attention_mask "
                "[rows, tokens], and packed documents as position_ids"
            )
        ours[name] = one[:, start:end].contiguous() if sized and one.shape[1] == length else one
    return ours


def split(batch: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Return the part of a batch that one of the ranks of its sequence computes on.

    Labels are shifted first: shift_labels, which transformers' losses take, has for each token the next one's
    label, also where that is another rank's. position_ids are those of the whole rows.

    Raises: UnsupportedError for a length that the ranks do not divide, with the next that they do.
    """
    length = length_of(batch)
    if length % ranks:
        raise UnsupportedError(
            f"sequences of {length} tokens cannot be divided among {ranks} ranks: pad them to "
            f"{length + -length % ranks}, with pad_to_multiple_of={ranks} in the collator"
        )
    whole = dict(batch)
    some = next(one for one in batch.values() if isinstance(one, torch.Tensor) and one.ndim > 1)
    if whole.get("position_ids") is None:
        whole["position_ids"] = torch.arange(length, device=some.device).expand(len(some), -1)
    if whole.get("labels") is not None and whole.get("shift_labels") is None:
        whole["shift_labels"] = F.pad(whole["labels"], (0, 1), value=IGNORED)[:, 1:]
    tokens = length // ranks
    return cut(whole, rank * tokens, (rank + 1) * tokens)


def state_of(loader: Any) -> dict[str, Any] | None:
    """Return a data loader's state; None for one that has none."""
    try:
        state: dict[str, Any] = loader.state_dict()
    except AttributeError:  # also of Accelerate's loaders, whose method asks a loader that may have none
        return None
    return state

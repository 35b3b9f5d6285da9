"""One call of a model whose sequence is in parts: its arguments, and what its ranks tell each other of them.

Two small messages precede each forward: the first says what every rank is about to do, so that ranks that
differ are named before any collective could hang; the second has what each needs of the others' tokens.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn

from infinity.errors import RanksError, UnsupportedError
from infinity.sequences.batches import IGNORED, length_of
from infinity.sequences.group import SequenceGroup
from infinity.sequences.masks import WholeSequence, packed
from infinity.tensors import as_bytes

logger = logging.getLogger("infinity")

_WHAT = "compare the parts of a sequence"
_REFUSED = {
    "past_key_values": "a cache",
    "cache": "a cache",
    "encoder_hidden_states": "an encoder's output",
    "decoder_input_ids": "a decoder's own tokens",
    "pixel_values": "images",
    "output_attentions": "the weights of all heads",
    "output_router_logits": "a loss of the routers over all tokens",
    "logits_to_keep": "a part of the logits",
    "head_mask": "a mask of heads",
}
"""Arguments of models that are not of this rank's tokens, and what they are."""


@dataclass(slots=True)
class SequenceCall:
    """A forward that runs now."""

    sequence: WholeSequence
    count: torch.Tensor | None
    """Labels of all ranks, fp64; None where no loss is asked for."""
    attended: int = 0
    """Layers that have attended."""

    def attend(self) -> None:
        """Note that a layer attends."""
        self.attended += 1


def arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's forward by name."""
    signature = inspect.signature(type(model).forward)
    given = dict(signature.bind_partial(model, *args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    given.pop(next(iter(signature.parameters)))
    return given


def refuse(config: Any, given: Mapping[str, Any]) -> None:
    """Refuse arguments that cannot be divided.

    Raises: UnsupportedError naming the first of them.
    """
    asked = {**given, "output_router_logits": given.get("output_router_logits", False)}
    asked["output_router_logits"] = asked["output_router_logits"] or getattr(
        config, "output_router_logits", False
    )
    for name, what in _REFUSED.items():
        one = asked.get(name)
        if one is not None and not (isinstance(one, bool | int) and not one):
            raise UnsupportedError(
                f"{name}: {what} cannot be divided among the ranks of a sequence; leave it out, or call the "
                "model inside `with sequences.whole():`, where each rank computes on whole sequences"
            )
    rows, tokens = _shape(given)
    for name in ("attention_mask", "position_ids", "labels", "shift_labels"):
        one = given.get(name)
        expected = [(rows, tokens), (1, tokens)] if name == "position_ids" else [(rows, tokens)]
        if one is not None and (not isinstance(one, torch.Tensor) or tuple(one.shape) not in expected):
            shape = tuple(one.shape) if hasattr(one, "shape") else type(one).__name__
            raise UnsupportedError(
                f"{name} is {shape}, but a rank has {rows} rows of {tokens} tokens: expected [rows, tokens], "
                "split as the tokens are (infinity.SequenceParallelLoader). Masks of queries and keys cannot "
                "be split"
            )


def _tokens(given: Mapping[str, Any]) -> torch.Tensor:
    """Return the ids or the embeddings of this rank's tokens."""
    length_of(given)
    tokens: torch.Tensor = (
        given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
    )
    return tokens


def _shape(given: Mapping[str, Any]) -> tuple[int, int]:
    rows, tokens = _tokens(given).shape[:2]
    return rows, tokens


class Meeting:
    """What the ranks of one sequence tell each other before a forward."""

    def __init__(self, group: SequenceGroup) -> None:
        """Meet over `group`."""
        self._group = group
        self._warned = False

    def meet(self, given: dict[str, Any]) -> SequenceCall:
        """Change the arguments of this rank's forward to those of a part of a sequence; return the call.

        Raises: RanksError where the ranks' batches differ, with each rank's.
        """
        rows, tokens = _shape(given)
        self._agree(given, rows, tokens)
        group, device = self._group, _tokens(given).device
        parts = self._exchange(_told(given, rows, group.rank))
        positions = _joined(parts["positions"], rows).long().to(device) if "positions" in parts else None
        if positions is None:
            start = group.rank * tokens
            given["position_ids"] = torch.arange(start, start + tokens, device=device).unsqueeze(0)
        present = _joined(parts["padding"], rows).bool().to(device) if "padding" in parts else None
        everything = torch.ones(rows, tokens * group.size, dtype=torch.bool, device=device)
        given["attention_mask"] = everything if present is None else present
        if "firsts" in parts:
            given["shift_labels"] = _shift(given["labels"], parts["firsts"], group.rank)
        total = parts["count"].sum() if "count" in parts else None
        if total is not None:
            given["num_items_in_batch"] = 1
        borders = None if positions is None or present is not None else packed(positions)
        hidden = None if present is None or bool(present.all()) else present
        return SequenceCall(WholeSequence(rows, tokens, group.size, hidden, borders), total)

    def _exchange(self, told: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what every rank tells, [ranks, elements], by the names of what this one tells."""
        mine = [one.detach().to("cpu", torch.float64).reshape(-1) for one in told.values()]
        whole = self._group.gather(
            torch.cat(mine) if mine else torch.empty(0, device="cpu"), "tell positions and labels"
        )
        return dict(zip(told, whole.split([len(one) for one in mine], dim=1), strict=True))

    def _agree(self, given: Mapping[str, Any], rows: int, tokens: int) -> None:
        names = ("position_ids", "attention_mask", "labels", "shift_labels", "num_items_in_batch")
        has = sum(1 << place for place, name in enumerate(names) if given.get(name) is not None)
        ids = given.get("input_ids")
        digest = 0 if ids is None else _digest(ids, given.get("position_ids"))
        said = self._group.gather(
            torch.tensor([rows, tokens, has, digest], dtype=torch.float64, device="cpu"), _WHAT
        ).tolist()
        if any(one[:3] != said[0][:3] for one in said):
            each = "; ".join(
                f"rank {rank}: {int(one[0])} x {int(one[1])} tokens with "
                + (
                    ", ".join(name for place, name in enumerate(names) if int(one[2]) >> place & 1)
                    or "nothing else"
                )
                for rank, one in enumerate(said)
            )
            raise RanksError(
                f"the ranks of a sequence have parts that differ ({each}). Every rank has to have as many "
                "rows and tokens of one batch, and the same arguments: infinity.SequenceParallelLoader "
                "splits batches "
                "so; pad them with pad_to_multiple_of in the collator"
            )
        same = self._group.size > 1 and digest and len({one[3] for one in said}) == 1
        if same and not self._warned and ids is not None and bool((ids != ids[:, :1]).any()):
            self._warned = True
            logger.warning(
                "the %d ranks of a sequence have the same tokens: is each given the whole batch, and not its "
                "part? infinity.SequenceParallelLoader splits batches",
                self._group.size,
            )


def _told(given: Mapping[str, Any], rows: int, rank: int) -> dict[str, torch.Tensor]:
    """Return what the other ranks need to know of the arguments of this one."""
    told = {}
    positions, padding = given.get("position_ids"), given.get("attention_mask")
    labels, shifted = given.get("labels"), given.get("shift_labels")
    if positions is not None:
        told["positions"] = positions.expand(rows, -1)
    if padding is not None:
        told["padding"] = padding != 0
    if labels is not None and shifted is None:
        told["firsts"] = labels[:, :1]
    if labels is not None:
        count, ignored = given.get("num_items_in_batch"), given.get("ignore_index", IGNORED)
        told["count"] = _count(labels, shifted, count, ignored, rank)
    return told


def _digest(*tensors: torch.Tensor | None) -> int:
    """Return a hash of ids, and of positions where they are given: those of two parts are not the same."""
    hashed = xxhash.xxh3_64()
    for one in tensors:
        if one is not None:
            hashed.update(as_bytes(one))
    return hashed.intdigest() >> 12  # as fp64 holds it


def _joined(parts: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [rows, all tokens] from every rank's [rows x tokens]."""
    joined: torch.Tensor = parts.unflatten(1, (rows, -1)).movedim(0, 1).flatten(1)
    return joined


def _count(labels: torch.Tensor, shifted: Any, given: Any, ignored: int, rank: int) -> torch.Tensor:
    """Return the number of labels of this rank's loss; of unshifted ones, those that this rank has."""
    if given is not None:
        return torch.as_tensor(given, dtype=torch.float64).reshape(1)
    counted = labels if shifted is None else shifted
    if shifted is None and rank == 0:
        counted = labels[:, 1:]  # nothing comes before the first token
    return (counted != ignored).sum().reshape(1)


def _shift(labels: torch.Tensor, firsts: torch.Tensor, rank: int) -> torch.Tensor:
    """Return each token's next label; the last one's is the first of the next rank."""
    if rank + 1 < len(firsts):
        following = firsts[rank + 1].to(labels.device, labels.dtype).unsqueeze(1)
    else:
        following = torch.full_like(labels[:, :1], IGNORED)
    return torch.cat([labels[:, 1:], following], dim=1)

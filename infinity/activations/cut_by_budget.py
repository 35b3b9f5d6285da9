"""Config(sequence_tiles="auto", loss_tiles="auto"): MLPs in slices of the sequence and losses without logits,
where activation_memory asks for it.

[Note: who chooses]
Each call of an MLP is cut by its own shape, and each loss by the number of its labels: see planning.slices. A
recomputation in the backward so is cut as its forward was.

[Note: ranks that choose alike]
A backward over slices uses an MLP's weights in another order than one over all of it, and ranks fetch weights
together. So in a forward with gradients ranks tell each other the number of their tokens, and all go by the
largest, in its backward too: what is recomputed carries the number of its forward, as others may have been
since. Without gradients each goes by its own, since one may compute alone; the parameters of an MLP are then
fetched around its call, cut or not. The output layer's are fetched when logits are made, or the loss: so none
makes logits with its loss then.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from infinity.activations.blocks import blocks_of
from infinity.planning.slices import loss_without_logits, mlp_nbytes, slices_within
from infinity.ranks.group import Ranks
from infinity.sizes import format_size
from infinity.tiling import TiledConv1D, TiledExperts, TiledLinear, tile_loss_where, tile_sequence_where

logger = logging.getLogger("infinity")

_NAMES = frozenset({"mlp", "feed_forward", "feedforward", "ffn", "ff", "DenseReluDense", "shared_experts"})
"""Of attributes, by which blocks of transformers hold their MLPs."""
_CONV1D = ("transformers.pytorch_utils", "Conv1D")
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_BETWEEN = (nn.Dropout, nn.Identity)
_STACK_DIMS = 3
"""Of a parameter with all experts of a layer: experts, rows, columns."""
_SELF_AND_HIDDEN = 2
"""So much takes the forward of experts that are given their tokens sorted by expert, as Llama 4's: these are
not tokens of a sequence. Others are told beside them which expert each token goes to.
"""


@dataclass(frozen=True, slots=True)
class PositionWise:
    """A module that computes each token by itself."""

    module: nn.Module
    dim: int
    """Of its inputs, along which tokens lie."""
    width: int
    """Elements that its linear layers but the last one make of a token; of experts, all that a token has."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element that computes."""
        return next(one.element_size() for one in self.module.parameters())


def position_wise(model: nn.Module, *, experts: bool = True) -> Iterator[PositionWise]:
    """Yield the MLPs, and the experts, of the blocks of a model of transformers: modules that have an MLP's
    name and are made of linear layers, activations and dropouts alone. experts: whether to yield these.
    """
    seen: set[nn.Module] = set()
    for block in blocks_of(model):
        for name, module in block.named_modules():
            own = name.rpartition(".")[2]
            if module in seen:
                continue
            if own == "experts" and experts and (width := _width_of_experts(module, model)):
                seen.add(module)
                yield PositionWise(module, 0, width)
            elif own in _NAMES and (widths := _widths(module)):
                seen.add(module)
                yield PositionWise(module, -2, sum(widths[:-1]))


def _widths(module: nn.Module) -> list[int]:
    """Return the outputs of the linear layers of a module that has two or more, and else nothing that sees
    other tokens; of others none.
    """
    if next(module.parameters(recurse=False), None) is not None:
        return []
    found: list[int] = []
    for one in module.children():
        kind: Any = type(one)
        made: Any = getattr(one, "out_features", None) or getattr(one, "nf", None)
        if kind in (nn.Linear, TiledLinear, TiledConv1D) or (kind.__module__, kind.__name__) == _CONV1D:
            found.append(int(made))
        elif not isinstance(one, _BETWEEN) and not kind.__module__.startswith(_ACTIVATIONS):
            return []
    return found if len(found) > 1 else []


def _width_of_experts(module: nn.Module, model: nn.Module) -> int:
    """Return what a token's experts make of it in their first layer; 0 for what is no stack of experts, or is
    given its tokens sorted by expert.
    """
    stacks, kind = module, type(module)
    if isinstance(module, TiledExperts):
        stacks, kind = module.tiles[0], kind.__bases__[1]  # the class that TiledExperts.of was given
    if len(inspect.signature(kind.forward).parameters) <= _SELF_AND_HIDDEN:
        return 0
    first = next((one for one in stacks.parameters(recurse=False) if one.dim() == _STACK_DIMS), None)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(text, "hidden_size", None)
    if first is None or not hidden:
        return 0
    routed = int(getattr(text, "num_experts_per_tok", None) or 1)
    return routed * first.numel() // (first.shape[0] * int(hidden))


class CutByBudget:
    """Chooses for the models of one engine: see [Note: who chooses]."""

    def __init__(self, ranks: Ranks, budget_nbytes: Callable[[bool], int]) -> None:
        """budget_nbytes: of activations; given whether all ranks ask for it."""
        self._ranks, self._budget_nbytes = ranks, budget_nbytes
        self.latest = 0
        """The most tokens that a rank had in the last forward with gradients, or in the one that is
        recomputed.
        """
        self._trains = False
        """Whether such a forward is under way."""
        self._widths: set[tuple[int, int]] = set()
        """Of MLPs, and bytes of their elements."""
        self._vocabularies: set[int] = set()
        self._said: dict[Any, str] = {}
        """What was chosen so far, for people."""

    def cut_sequences(self, model: nn.Module, *, experts: bool) -> int:
        """Let the model's MLPs run in slices where they are too large; return their number."""
        found = list(position_wise(model, experts=experts))
        for one in found:
            tile_sequence_where(one.module, self._chooser(one), one.dim, self._alike)
        return len(found)

    def cut_loss(self, model: nn.Module) -> None:
        """Let the model's losses be made without logits where these are too large.

        Raises: ValueError as tile_loss_.
        """
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        vocabulary = int(getattr(head, "out_features", 0))
        tile_loss_where(model, lambda labels: self._without_logits(labels, vocabulary))
        self._vocabularies.add(vocabulary)

    def regime(self, inputs: Any) -> tuple[Any, ...]:
        """Return what is chosen for a forward with these inputs: what is measured with one choice holds for
        no other.
        """
        tokens = self._agreed(_tokens_in(inputs))
        cut = tuple(self._slices(tokens, width, size) for width, size in sorted(self._widths))
        return cut, tuple(self._is_cut(tokens, one) for one in sorted(self._vocabularies))

    def began(self, inputs: Any) -> None:
        """A forward with gradients begins: several ranks tell each other their tokens."""
        self._trains = True
        if self._ranks.size > 1:
            self._budget_nbytes(True)
            self.latest = -self._ranks.least(-_tokens_in(inputs), "compare lengths of sequences")

    def ended(self) -> None:
        """It is over."""
        self._trains = False

    @contextmanager
    def as_in(self, latest: int) -> Iterator[None]:
        """Choose as in the forward whose `latest` is given, which is recomputed inside the `with`."""
        before, self.latest = self.latest, latest
        try:
            yield
        finally:
            self.latest = before

    def _alike(self) -> bool:
        return self._ranks.size > 1 and not torch.is_grad_enabled()

    def _agreed(self, tokens: int) -> int:
        """Return how many tokens a choice is made for, where a rank has so many."""
        trains = self._trains or torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
        if self._ranks.size == 1 or not trains:
            return tokens
        return self.latest

    def _chooser(self, one: PositionWise) -> Callable[[torch.Tensor], int]:
        width, itemsize = one.width, one.itemsize
        self._widths.add((width, itemsize))
        kind = type(one.module).__name__

        def choose(given: torch.Tensor) -> int:
            tokens = self._agreed(given.numel() // max(given.shape[-1], 1))
            slices = self._slices(tokens, width, itemsize)
            if slices > 1:
                whole = format_size(mlp_nbytes(tokens, width, itemsize))
                self._say(
                    (kind, slices),
                    f"each {kind} runs in {slices} slices, of {tokens:,} tokens for one: {whole} whole",
                )
            return slices

        return choose

    def _slices(self, tokens: int, width: int, itemsize: int) -> int:
        return slices_within(mlp_nbytes(tokens, width, itemsize), tokens, self._budget())

    def _without_logits(self, labels: int, vocabulary: int) -> bool:
        if self._ranks.size > 1 and not (self._trains or torch.is_grad_enabled()):
            return True
        tokens = self._agreed(labels)
        cut = self._is_cut(tokens, vocabulary)
        if cut:
            self._say(
                vocabulary, f"losses make no logits of {vocabulary:,} words, of {tokens:,} tokens for one"
            )
        return cut

    def _is_cut(self, tokens: int, vocabulary: int) -> bool:
        return loss_without_logits(tokens, vocabulary, self._budget())

    def _budget(self) -> int:
        return self._budget_nbytes(self._ranks.size == 1)

    def _say(self, choice: Any, what: str) -> None:
        if choice not in self._said:
            self._said[choice] = what
            logger.info("activation_memory: %s", what)

    @property
    def reason(self) -> str:
        """What was cut so far, for people; "" for nothing."""
        return "; ".join(self._said.values())


def _tokens_in(inputs: Any) -> int:
    """Return the tokens of a model's inputs: rows x columns of its largest matrix."""
    tensors = (one for one in pytree.tree_leaves(inputs) if isinstance(one, torch.Tensor))
    return max((one.shape[0] * one.shape[1] for one in tensors if one.dim() > 1), default=0)

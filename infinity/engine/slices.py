"""Config(sequence_tiles=..., loss_tiles=...): finds what there is to cut in models of transformers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.activations.cut_by_budget import CutByBudget, position_wise
from infinity.engine.engine import Engine
from infinity.engine.sequences import models_of_transformers
from infinity.errors import UnsupportedError
from infinity.tiling import tile_loss_where, tile_sequence_where

logger = logging.getLogger("infinity")
_AUTO = "auto"


def cut_activations(engine: Engine, models: Sequence[nn.Module]) -> None:
    """Let MLPs run in slices, and losses make no logits, as the Config says.

    Raises: UnsupportedError where it asks for that by a number, and nothing can be cut.
    """
    config = engine.config
    if config.sequence_tiles is None and not config.loss_tiles:
        return
    found = [_base(one) for one in models_of_transformers(models)]
    by_budget = None
    if engine.activations is not None and _AUTO in (config.sequence_tiles, config.loss_tiles):
        by_budget = CutByBudget(engine.ranks, engine.activations.budget_nbytes)
        engine.activations.cut_by(by_budget)
    if config.sequence_tiles is not None:
        _cut_sequences(engine, found, by_budget)
    if config.loss_tiles:
        _cut_losses(engine, found, by_budget)


def _cut_sequences(engine: Engine, found: Sequence[nn.Module], by_budget: CutByBudget | None) -> None:
    tiles = engine.config.sequence_tiles
    experts = engine.config.expert_parallel == 1  # else tokens go to other ranks within
    count = 0
    for model in found:
        if tiles == _AUTO and by_budget is not None:
            count += by_budget.cut_sequences(model, experts=experts)
        else:
            for one in position_wise(model, experts=experts):
                tile_sequence_where(one.module, partial(_always, int(tiles or 1)), one.dim, _never)
                count += 1
    if not count:
        _nothing(
            f"sequence_tiles={tiles!r}: no block of {_kinds(found)} has an MLP that is known: a module with "
            'a name such as "mlp", made of linear layers, activations and dropouts alone. Slice it with '
            "infinity.tiling.tile_sequence, or leave sequence_tiles out",
            asked=tiles != _AUTO,
        )


def _cut_losses(engine: Engine, found: Sequence[nn.Module], by_budget: CutByBudget | None) -> None:
    asked, why = engine.config.loss_tiles, []
    for model in found:
        try:
            if asked == _AUTO and by_budget is not None:
                by_budget.cut_loss(model)
            else:
                tile_loss_where(model, lambda _: True, must=True)
        except ValueError as error:
            why.append(str(error))
    if len(why) == len(found):
        _nothing(
            f"loss_tiles={asked!r}: {_kinds(found)} cannot make a loss without logits: "
            f"{'; '.join(why) or 'expected a causal language model of transformers'}. Leave loss_tiles out",
            asked=asked != _AUTO,
        )


def _always(slices: int, _: torch.Tensor) -> int:
    return slices


def _base(model: nn.Module) -> nn.Module:
    """Return the model that PEFT's adapters were put into, or this one: it makes the loss."""
    find: Any = getattr(model, "get_base_model", None)
    base: nn.Module = model if find is None else find()
    return base


def _never() -> bool:
    return False


def _nothing(why: str, *, asked: bool) -> None:
    if asked:
        raise UnsupportedError(why)
    logger.warning("%s", why)


def _kinds(models: Sequence[nn.Module]) -> str:
    return ", ".join(sorted({type(one).__name__ for one in models})) or "no model of transformers"

"""Config(activation_memory=...): finds the blocks of models that were built, and follows their forwards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from infinity.activations.blocks import FEWEST, blocks_of
from infinity.activations.by_budget import ActivationBudget, BudgetedBlock
from infinity.engine.engine import Engine
from infinity.errors import ConfigError, UnsupportedError
from infinity.ranks.machine_memory import available_nbytes


def keep_to_budget(engine: Engine, models: Sequence[nn.Module]) -> None:
    """Let the blocks of `models` keep what Config(activation_memory=...) has room for.

    Raises: UnsupportedError for models without blocks; ConfigError for one whose activations ranks divide.
    """
    config = engine.config
    if config.activation_memory is None or engine.boundaries is None:
        return
    if engine.parts is not None:
        raise ConfigError(
            "activation_memory with Init(partition_activations=...): what a rank keeps of an input that "
            "others have, too, is not counted. Leave one of the two out"
        )
    blocks = list(dict.fromkeys(one for model in models for one in blocks_of(model)))  # models may share some
    if not blocks:
        kinds = ", ".join(sorted({type(one).__name__ for one in models})) or "no model"
        raise UnsupportedError(
            f"activation_memory: {kinds} has no blocks to decide on: layers for which transformers has "
            f"activation checkpointing, or {FEWEST} or more modules of one class, with layers in them, in "
            "an nn.ModuleList or nn.Sequential. Leave activation_memory out, or build the model of such"
        )
    counts = engine.residency.counts
    budget = ActivationBudget(
        config.activation_nbytes,
        engine.boundaries,
        engine.device,
        engine.ranks,
        engine.hooks.by_storage,
        free_nbytes=partial(_free_nbytes, engine),
        host_nbytes=partial(_host_nbytes, engine),
        stalled_s=lambda: sum(counts.stalls_s.values()),
        trained=partial(_trained, engine),
    )
    engine.follow_activations(budget)
    for number, module in enumerate(blocks):
        module.forward = BudgetedBlock(budget, number, module)


def _free_nbytes(engine: Engine) -> int:
    """Return nine tenths of what is free where the model computes, beside what the budgets may still take."""
    if engine.device.is_host:
        ours = engine.budget.total_nbytes - engine.held_nbytes()
        free = available_nbytes() // engine.ranks.local_size - max(ours, 0)
    else:
        room = engine.device.room
        ledger = room.ledger if room is not None else None
        ours = ledger.limit_nbytes - ledger.held_nbytes if ledger is not None else 0
        free = engine.device.free_nbytes() - max(ours, 0)
    return free * 9 // 10


def _host_nbytes(engine: Engine) -> int:
    """Return the room that host_memory has for inputs, beside gradients where these have no other place."""
    free = engine.kept.limit_nbytes - engine.kept.held_nbytes
    return max(free - (engine.gradients_nbytes() if engine.nvme_store is None else 0), 0)


def _trained(engine: Engine) -> int:
    return sum(one.requires_grad for unit in engine.units for one in unit.parameters)

"""Config(activation_memory=...): finds the blocks of models that were built, and follows their forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import nn

from infinity.activations.by_budget import ActivationBudget, BudgetedBlock
from infinity.engine.engine import Engine
from infinity.errors import ConfigError, UnsupportedError
from infinity.ranks.machine_memory import available_nbytes
from infinity.tiling import Tiled

_BLOCK = ("transformers.modeling_layers", "GradientCheckpointingLayer")
_FEWEST = 2
"""Modules of one class in a list that are taken for blocks."""


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
            f"activation checkpointing, or {_FEWEST} or more modules of one class, with layers in them, in "
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


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model, none of them in another one: what transformers recomputes, or, where there
    is no such module, those that stand in a list of modules of their class.
    """
    found = list(_outermost(model, _is_checkpointed))
    yield from found or _outermost(model, _members(model).__contains__)


def _outermost(module: nn.Module, is_chosen: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """Yield the chosen modules in `module` that are in no other one, each once."""
    seen: set[nn.Module] = set()

    def walk(one: nn.Module) -> Iterator[nn.Module]:
        for child in one.children():
            if child in seen:
                continue
            seen.add(child)
            if is_chosen(child):
                yield child
            else:
                yield from walk(child)

    return walk(module)


def _is_checkpointed(module: nn.Module) -> bool:
    return any((one.__module__, one.__name__) == _BLOCK for one in type(module).__mro__)


def _members(model: nn.Module) -> set[nn.Module]:
    """Return the modules of one class in each list that has several, without single layers."""
    found: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            kinds = [type(one) for one in module]
            found |= {
                one
                for one in module
                if kinds.count(type(one)) >= _FEWEST and not isinstance(one, Tiled) and _has_layers(one)
            }
    return found


def _has_layers(module: nn.Module) -> bool:
    lists = isinstance(module, (nn.ModuleList, nn.ModuleDict))  # which have no forward
    return not lists and next(module.children(), None) is not None


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

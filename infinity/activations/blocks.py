"""Which modules of a model are its blocks: the layers that follow one another, and can be run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from infinity.tiling import Tiled

_BLOCK = ("transformers.modeling_layers", "GradientCheckpointingLayer")
FEWEST = 2
"""Modules of one class in a list that are taken for blocks."""


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
                if kinds.count(type(one)) >= FEWEST and not isinstance(one, Tiled) and _has_layers(one)
            }
    return found


def _has_layers(module: nn.Module) -> bool:
    lists = isinstance(module, (nn.ModuleList, nn.ModuleDict))  # which have no forward
    return not lists and next(module.children(), None) is not None

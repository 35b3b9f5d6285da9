"""Outlines of modules on the meta device: what Init would make of them, without their numbers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.bench.planning.config_file import content_of
from infinity.engine.engine import engine_of
from infinity.errors import ConfigError
from infinity.planning.outline import Outline, Stage, UnitOutline

logger = logging.getLogger("infinity")

_ELSE = "For others, give a module on the meta device, from Python: infinity.bench.planning.plan.plan."
_TOKENS = 8
"""Of the forward on meta that shows the order of uses."""


def from_config(path: Path, **changes: object) -> tuple[nn.Module, int]:
    """Build what a config.json describes on the meta device, in bf16, as in a run; `changes`: to what it
    says. Return the model and the width of its attention.

    Raises: ConfigError naming the file, for what is no language model, or transformers cannot build;
    ImportError without transformers.
    """
    return from_content({**content_of(path), **changes}, str(path))


def from_content(says: Mapping[str, Any], source: str) -> tuple[nn.Module, int]:
    """Build what the content of a config.json describes; see from_config. source: its name, for errors."""
    import transformers

    content = dict(says)
    kind = content.pop("model_type", None)
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f'{source}: "model_type" is {kind!r}, which transformers {transformers.__version__} does not '
            f"know. {_ELSE}"
        )
    try:
        config = transformers.AutoConfig.for_model(kind, **content)
        with torch.device("meta"):
            model = _builder(content.get("architectures") or [])(config)
        return model.to(torch.bfloat16), int(getattr(config, "hidden_size", None) or 0)
    except Exception as error:  # the checks of transformers raise whatever they like
        raise ConfigError(
            f"{source}: describes no causal language model that transformers builds ({first_line(error)}). "
            f"{_ELSE}"
        ) from error


def _builder(names: Sequence[str]) -> Any:
    """Return what builds a model: the class that is named first, if transformers has it.

    Raises: TypeError for one that reads no text.
    """
    import transformers

    named = getattr(transformers, names[0], None) if names else None
    if named is None:
        return transformers.AutoModelForCausalLM.from_config
    if not {"input_ids", "labels"} <= inspect.signature(named.forward).parameters.keys():
        raise TypeError(f"{names[0]} takes no input_ids, or no labels")
    return named


def counted_outline(content: Mapping[str, Any], source: str, name: str) -> Outline:
    """Return the outline of what the content of a config.json describes, with its activations, counted on
    tensors without memory.
    """
    model, attention = from_content(content, source)
    return with_activations(outline_of_model(model, attention, name=name), model)


def shapes_alone(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device; no value is read, and no memory taken.

    Raises: ConfigError for a model that was built in Init, whose modules belong to an engine.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(engine_of(one) is not None for one in tensors):
        raise ConfigError(
            f"{type(model).__name__} was built in Init: its modules belong to a training and are not copied. "
            "Plan the same model built outside of it: `with torch.device('meta'):` takes no memory"
        )
    twins: dict[int, Any] = {id(one): one.detach().to("meta") for one in model.buffers()}
    for one in model.parameters():
        twins[id(one)] = nn.Parameter(one.detach().to("meta"), requires_grad=one.requires_grad)
    return deepcopy(model, twins)


def with_activations(outline: Outline, model: nn.Module) -> Outline:
    """Return the outline of a model on the meta device with its activations, or with the reason why they
    cannot be counted. The model cannot be used any more.
    """
    from infinity.bench.planning.counted import UncountedError, activations_of

    try:
        return replace(outline, activations=activations_of(model, list(_blocks(model))))
    except UncountedError as error:
        return replace(outline, uncounted=str(error))


def first_line(error: BaseException) -> str:
    """Return how an error begins: some go on with a list of all that would have worked."""
    first, *others = str(error).splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if others and first.endswith(":") else first


def outline_of_model(
    model: nn.Module, attention: int = 0, *, name: str = "", inputs: Mapping[str, Any] | None = None
) -> Outline:
    """Return the outline of a module on meta, in units as Init makes them.

    Blocks, the modules of the outermost lists of modules of one class, count as recomputed. The order of uses
    is that of a forward on meta with `inputs` (input_ids of 8 tokens, if none are given); where that fails,
    which is logged, the order in which modules are registered. attention: its width in each block.

    Raises: ConfigError for a module without parameters.
    """
    owner: dict[int, int] = {}
    units_of: dict[nn.Module, list[int]] = {}
    parts: list[UnitOutline] = []
    for place, module in model.named_modules():
        own = [one for one in module._parameters.values() if one is not None and one.is_floating_point()]
        fresh = [one for one in own if id(one) not in owner]
        if fresh:
            owner.update((id(one), len(parts)) for one in fresh)
            parts.append(_part(place or type(module).__name__, module, fresh))
        units_of[module] = list(dict.fromkeys(owner[id(one)] for one in own))
    if not parts:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to plan")
    block_of = {part: number for number, block in enumerate(_blocks(model)) for part in block.modules()}
    stages: list[Stage] = []
    current: object = ()
    for module in _order(model, inputs):
        block = block_of.get(module)
        if block != current:
            stages.append(Stage((), recomputed=block is not None))
        current = block
        stages[-1] = replace(stages[-1], units=(*stages[-1].units, *units_of[module]))
    stages = [one for one in stages if one.units]
    for stage in stages:
        if stage.recomputed and attention:
            widest = max(stage.units, key=lambda unit: parts[unit].numel)
            parts[widest] = replace(parts[widest], attention=attention)
    return Outline(name or type(model).__name__, tuple(parts), tuple(stages))


def _part(name: str, module: nn.Module, parameters: Sequence[nn.Parameter]) -> UnitOutline:
    return UnitOutline(
        name,
        tuple(tuple(one.shape) for one in parameters),
        looked_up=isinstance(module, (nn.Embedding, nn.EmbeddingBag)),
        trainable=any(one.requires_grad for one in parameters),
    )


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Return the members of the outermost lists of modules that are of one class."""
    for child in module.children():
        members = list(child.children()) if isinstance(child, nn.ModuleList) else []
        if len({type(one) for one in members}) == 1 and any(True for _ in members[0].parameters()):
            yield from members
        else:
            yield from _blocks(child)


def _order(model: nn.Module, inputs: Mapping[str, Any] | None) -> list[nn.Module]:
    """Return the modules as a forward on meta enters them, else as they are registered."""
    entered: list[nn.Module] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, _: entered.append(module))
        for module in model.modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    # A mask that is complete: to make one, transformers looks at values, and there are none.
    usual = {
        "input_ids": torch.zeros(1, _TOKENS, dtype=torch.long, device="meta"),
        "attention_mask": torch.zeros(1, 1, _TOKENS, _TOKENS, device="meta"),
    }
    try:
        with torch.no_grad():
            model(**(inputs if inputs is not None else usual))
    except Exception as error:  # noqa: BLE001 - whatever a forward may raise without values
        logger.warning("the order of uses is that of registration: a forward on meta failed: %s", error)
        return list(model.modules())
    finally:
        for hook in hooks:
            hook.remove()
    return entered

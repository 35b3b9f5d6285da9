"""Outlines of models without memory: from a preset's name, a config.json of Hugging Face, or a module on the
meta device.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.bench.engine.runs import SHAPES
from infinity.cli.presets import PRESETS, VOCABULARY
from infinity.errors import ConfigError
from infinity.planning.outline import Outline, Stage, UnitOutline, llama

logger = logging.getLogger("infinity")

_ELSE = "For others, give a module on the meta device, from Python: infinity.bench.planning.plan.plan."
_TOKENS = 8
"""Tokens of the forward on meta that shows the order of uses."""


def outline_of(model: str) -> Outline:
    """Return the outline of a preset, or of the model that a config.json describes.

    Raises: ConfigError for a name that is neither, and for a file that does not describe a model.
    """
    if model in PRESETS:
        preset = PRESETS[model]
        return llama(model, preset.layers, preset.hidden, preset.intermediate, VOCABULARY)
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if path.is_file():
        name = path.parent.resolve().name if path.name == "config.json" else path.stem
        return outline_of_model(*from_config(path), name=name)
    raise ConfigError(
        f"--model {model}: neither a preset ({', '.join(PRESETS)}) nor a config.json of Hugging Face"
    )


def outline_of_shape(name: str) -> Outline:
    """Return the outline of a contestant's model; see runs.SHAPES."""
    shape = SHAPES[name]
    sizes = (shape[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"))
    return llama(name, *sizes)


def from_config(path: Path, **changes: object) -> tuple[nn.Module, int]:
    """Build the model of a config.json, with `changes` to its settings, on the meta device in bf16. Return it
    and the width of its attention.

    Raises: ConfigError naming the file, if it is not a causal language model that transformers can build;
    ImportError without transformers.
    """
    import transformers

    content = {**_content(path), **changes}
    kind = content.pop("model_type", None)
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f'{path}: "model_type" is {kind!r}, which transformers {transformers.__version__} does not know. '
            f"{_ELSE}"
        )
    try:
        config = transformers.AutoConfig.for_model(kind, **content)
        with torch.device("meta"):
            model = _builder(content.get("architectures") or [])(config)
        return model.to(torch.bfloat16), int(getattr(config, "hidden_size", None) or 0)
    except Exception as error:  # transformers' checks raise errors of any type
        raise ConfigError(
            f"{path}: describes no causal language model that transformers builds ({first_line(error)}). "
            f"{_ELSE}"
        ) from error


def _content(path: Path) -> dict[str, Any]:
    """Return the content of a config.json. Raises: ConfigError if it names no type of model."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error}). Give a config.json of Hugging Face.") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ConfigError(f'{path}: has no "model_type". Give a config.json of Hugging Face, which names it.')
    return content


def _builder(names: Sequence[str]) -> Any:
    """Return the constructor of a model: the class named first, if transformers has it.

    Raises: TypeError for a class that does not take input_ids and labels.
    """
    import transformers

    named = getattr(transformers, names[0], None) if names else None
    if named is None:
        return transformers.AutoModelForCausalLM.from_config
    if not {"input_ids", "labels"} <= inspect.signature(named.forward).parameters.keys():
        raise TypeError(f"{names[0]} takes no input_ids, or no labels")
    return named


def first_line(error: BaseException) -> str:
    """Return the first line of an error: some continue with long lists of alternatives."""
    first, *others = str(error).splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if others and first.endswith(":") else first


def outline_of_model(
    model: nn.Module, attention: int = 0, *, name: str = "", inputs: Mapping[str, Any] | None = None
) -> Outline:
    """Return the outline of a module on the meta device, in units as Init makes them.

    Blocks count as recomputed: the members of the outermost ModuleLists whose members have one class. The
    order of uses is that of a forward on meta with `inputs` (default: input_ids of 8 tokens). If that fails,
    which is logged, it is the order of registration. attention: its width in each block.

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
    """Yield the members of the outermost ModuleLists whose members have one class."""
    for child in module.children():
        members = list(child.children()) if isinstance(child, nn.ModuleList) else []
        if len({type(one) for one in members}) == 1 and any(True for _ in members[0].parameters()):
            yield from members
        else:
            yield from _blocks(child)


def _order(model: nn.Module, inputs: Mapping[str, Any] | None) -> list[nn.Module]:
    """Return the modules in the order in which a forward on meta enters them, else of registration."""
    entered: list[nn.Module] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, _: entered.append(module))
        for module in model.modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    # A complete mask: transformers would read values to make one, and meta tensors have none.
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

"""Outlines of models that are never built: from a preset's name, or a config.json of Hugging Face. What is
not known here is built on the meta device; see meta.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.bench.engine.runs import SHAPES
from infinity.bench.planning.config_file import content_of
from infinity.cli.presets import PRESETS
from infinity.errors import ConfigError
from infinity.planning.architectures import outline_of_config
from infinity.planning.outline import Outline


def outline_of(model: str) -> Outline:
    """Return the outline of a preset, or of the model that a config.json describes.

    Raises: ConfigError for a name that is neither, and for a file that does not describe a model.
    """
    if model in PRESETS:
        return outline_of_shape(model)
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        raise ConfigError(_not_found(model))
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return outline_of_content(name, content_of(path), str(path))


def outline_of_content(name: str, content: Mapping[str, Any], source: str = "") -> Outline:
    """Return the outline of what a config.json says; one that is not known here is built on the meta device,
    and its activations are counted there. source: the file, for errors.

    Raises: ConfigError for what does not describe a model.
    """
    known = outline_of_config(name, content)
    if known is not None:
        return known
    from infinity.bench.planning.meta import counted_outline  # needs torch, and seconds

    return counted_outline(content, source or name, name)


def _not_found(model: str) -> str:
    if Path(model).suffix or Path(model).is_dir():
        return f"--model {model}: there is no such file, or no config.json in that folder"
    hub = f". Of the hub's {model}, download its config.json first" if model.count("/") == 1 else ""
    return f"--model {model}: neither a preset ({', '.join(PRESETS)}) nor a config.json of Hugging Face{hub}"


def outline_of_shape(name: str) -> Outline:
    """Return the outline of a contestant's model; see runs.SHAPES."""
    outline = outline_of_config(name, {"model_type": "llama", **SHAPES[name]})
    if outline is None:
        raise ConfigError(f"{name}: {SHAPES[name]} describe no Llama")
    return outline

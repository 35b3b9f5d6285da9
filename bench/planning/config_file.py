"""The config.json of a model of Hugging Face, as it is read before anything is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError


def content_of(path: Path) -> dict[str, Any]:
    """Return what a config.json says. Raises: ConfigError for one that names no type of model."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error}). Give a config.json of Hugging Face.") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ConfigError(
            f'{path}: has no "model_type", as a config.json of Hugging Face has beside the sizes of its model'
        )
    return content

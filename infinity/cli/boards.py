"""TensorBoard and Weights & Biases, by transformers' callbacks, which write what the Trainer logs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, cast

from infinity.cli.settings import TrainSettings
from infinity.errors import ConfigError


def boards(settings: TrainSettings) -> list[Any]:
    """Open the boards that the settings name; return a callback for each.

    Raises: ConfigError naming the package that is missing, or why a board does not open.
    """
    asked = {name: getattr(settings, name) for name in _OPENS if getattr(settings, name)}
    for name in asked:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--{name} needs the package {name}: pip install {name}")
    return [_opened(name, where) for name, where in asked.items()]


def _tensorboard(folder: str) -> Any:
    from torch.utils.tensorboard import SummaryWriter
    from transformers import integrations

    writer = cast("Any", SummaryWriter)(log_dir=folder)
    return cast("Any", integrations).TensorBoardCallback(writer)


def _wandb(project: str) -> Any:
    import wandb
    from transformers import integrations

    wandb.init(project=project)  # which the callback takes
    return cast("Any", integrations).WandbCallback()


_OPENS: Mapping[str, Callable[[str], Any]] = {"tensorboard": _tensorboard, "wandb": _wandb}
_CURES = {
    "tensorboard": "Name a folder that can be written.",
    "wandb": "Log in by `wandb login`, or set WANDB_MODE=offline and send the run later by `wandb sync`.",
}


def _opened(name: str, where: str) -> Any:
    try:
        return _OPENS[name](where)
    except Exception as error:  # wandb raises errors of its own
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"--{name} does not open: {first} {_CURES[name]}") from error

"""The figures of a run for TensorBoard and Weights & Biases, by the writers of infinity.deepspeed.monitor."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict

from infinity.cli.report import StepReport
from infinity.cli.settings import TrainSettings
from infinity.deepspeed.monitor import OPENS, Write
from infinity.errors import ConfigError


class Boards:
    """The boards that the settings name; without any, nothing is written."""

    def __init__(self, settings: TrainSettings) -> None:
        """Open them.

        Raises: ConfigError naming the package that is missing, or why a board does not open.
        """
        asked = {
            "tensorboard": settings.tensorboard and {"output_path": settings.tensorboard, "job_name": ""},
            "wandb": settings.wandb and {"project": settings.wandb},
        }
        for name, section in asked.items():
            if section and importlib.util.find_spec(name) is None:
                raise ConfigError(f"--{name} needs the package {name}: pip install {name}")
        self._writes = [_opened(name, section) for name, section in asked.items() if section]

    def write(self, step: StepReport) -> None:
        """Write all numbers of a step."""
        known = {f"train/{key}": value for key, value in asdict(step).items() if value is not None}
        events = [(key, float(value), step.step) for key, value in known.items() if key != "train/step"]
        for write in self._writes:
            write(events)


_CURES = {
    "tensorboard": "Name a folder that can be written.",
    "wandb": "Log in by `wandb login`, or set WANDB_MODE=offline and send the run later by `wandb sync`.",
}


def _opened(name: str, section: dict[str, str]) -> Write:
    try:
        return OPENS[name](section)
    except Exception as error:  # wandb raises errors of its own
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"--{name} does not open: {first} {_CURES[name]}") from error

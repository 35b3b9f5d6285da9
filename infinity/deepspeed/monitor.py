"""The monitors of DeepSpeed's configuration, "tensorboard", "csv_monitor" and "wandb": scalars over samples.

Names, folders and files are DeepSpeed's (deepspeed/monitor). A monitor changes no number: if it cannot be
opened or written to, training continues without it, with a warning.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Event = tuple[str, float, int]
"""Name, value, and the samples that were trained on."""
Write = Callable[[Sequence[Event]], None]

_PREFIX = "Train/Samples/"


class Monitors:
    """The enabled monitors of a configuration. Only rank 0 has any."""

    def __init__(self, sections: Mapping[str, Mapping[str, Any]]) -> None:
        """Open a monitor for each section of the configuration."""
        self._writes: dict[str, Write] = {}
        for name, section in sections.items():
            try:
                self._writes[name] = OPENS[name](section)
            except ImportError as error:
                package = name.removesuffix("_monitor")
                _warn(f"{name} is enabled, but cannot be imported ({error}): pip install {package}")
            except Exception as error:  # noqa: BLE001 - wandb raises errors of its own
                _warn(f"{name} cannot be opened ({_first_line(error)})")

    def __bool__(self) -> bool:
        """Whether any monitor is open."""
        return bool(self._writes)

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """Write values of this many samples, by DeepSpeed's names: "train_loss", "lr"."""
        events = [(_PREFIX + name, float(value), samples) for name, value in values.items()]
        for name, write in list(self._writes.items()):
            try:
                write(events)
            except Exception as error:  # noqa: BLE001 - as above
                _warn(f"{name} cannot be written to ({_first_line(error)}), and is closed")
                del self._writes[name]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _warn(what: str) -> None:
    warnings.warn(f"DeepSpeed configuration: {what}. Training continues without it.", stacklevel=4)


def _folder(section: Mapping[str, Any]) -> Path:
    return Path(section.get("output_path", ""), section.get("job_name", "DeepSpeedJobName"))


def _csv(section: Mapping[str, Any]) -> Write:
    """Return a writer of one file per name: a header, then lines of samples and value."""
    folder = _folder(section)
    folder.mkdir(parents=True, exist_ok=True)
    begun: set[str] = set()

    def write(events: Sequence[Event]) -> None:
        for name, value, samples in events:
            path = folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
            with path.open("a", newline="", encoding="utf-8") as file:
                lines = csv.writer(file)
                if name not in begun:
                    begun.add(name)
                    lines.writerow(["step", name.rsplit("/", 1)[-1]])
                lines.writerow([samples, value])

    return write


def _tensorboard(section: Mapping[str, Any]) -> Write:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(log_dir=str(_folder(section)))

    def write(events: Sequence[Event]) -> None:
        for event in events:
            writer.add_scalar(*event)
        writer.flush()

    return write


def _wandb(section: Mapping[str, Any]) -> Write:
    import wandb

    project, group, team = section.get("project", "deepspeed"), section.get("group"), section.get("team")
    run: Any = wandb.init(project=project, group=group, entity=team)

    def write(events: Sequence[Event]) -> None:
        for name, value, samples in events:
            run.log({name: value}, step=samples)

    return write


OPENS: dict[str, Callable[[Mapping[str, Any]], Write]] = {
    "tensorboard": _tensorboard,
    "csv_monitor": _csv,
    "wandb": _wandb,
}

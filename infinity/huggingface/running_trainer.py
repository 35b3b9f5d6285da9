"""Which Trainer trains now, or is being made, as the stack of callers says.

A Trainer does not give itself to its callbacks, and an error that ends `trainer.train()` is no event of
theirs. What lasts as long as a training therefore asks, when it is used, whether `train` is still among its
callers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import transformers


def other_losses(args: transformers.TrainingArguments, trainer: object) -> Iterator[str]:
    """Yield the names of what makes the Trainer compute a loss that is not the model's own."""
    if args.label_smoothing_factor:
        yield "label_smoothing_factor"
    if getattr(trainer, "compute_loss_func", None):
        yield "compute_loss_func"


def running_trainer() -> transformers.Trainer | None:
    """Return the Trainer whose `train` is among the callers of this function, the innermost; else None."""
    return _calling("train")


def made_trainer() -> transformers.Trainer | None:
    """Return the Trainer whose `__init__` is among the callers of this function, the innermost; else None."""
    return _calling("__init__")


def _calling(name: str) -> transformers.Trainer | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name:
            found = frame.f_locals.get("self")
            if isinstance(found, transformers.Trainer):
                return found
        frame = frame.f_back
    return None

"""Which Trainer trains now, or is being made, as the stack of callers says.

A Trainer does not give itself to its callbacks, and an error that ends `trainer.train()` is no event of
theirs. What lasts as long as a training therefore asks, when it is used, whether `train` is still among its
callers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
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
    return _of(_calling("train"))


def made_trainer() -> transformers.Trainer | None:
    """Return the Trainer whose `__init__` is among the callers of this function, the innermost; else None."""
    return _of(_calling("__init__"))


def given_callbacks() -> Sequence[object]:
    """Return the callbacks, or classes of them, that the Trainer is given which is being made; else none."""
    frame = _calling("__init__")
    return () if frame is None else tuple(frame.f_locals.get("callbacks") or ())


def _of(frame: FrameType | None) -> transformers.Trainer | None:
    found: transformers.Trainer | None = None if frame is None else frame.f_locals["self"]
    return found


def _calling(name: str) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name and isinstance(frame.f_locals.get("self"), transformers.Trainer):
            return frame
        frame = frame.f_back
    return None

"""Loss scaling, so that fp16 gradients neither vanish nor overflow. Pure.

[Note: dynamic loss scaling]
The rules are those of DeepSpeed's DynamicLossScaler (deepspeed/runtime/fp16/loss_scaler.py, after
Megatron-LM's). A step whose gradients are not finite is skipped and takes one from the hysteresis; once that
is down to one, the step halves the scale instead. Whenever `window` steps have passed since the last skipped
step, the scale doubles, and the hysteresis is reset (with `consecutive`, after every good step).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How a loss is scaled; see DeepSpeed's section "fp16" and [Note: dynamic loss scaling]."""

    fixed: float = 0.0
    """The scale; 0 for a dynamic one."""
    power: int = 16
    """A dynamic scale begins with 2 to the power of this."""
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    least: float = 1.0
    casts: bool = False
    """Whether floating-point inputs of the model are cast to fp16."""


class LossScale:
    """The factor on the loss, as overflows change it; see [Note: dynamic loss scaling]."""

    def __init__(self, scaling: Scaling) -> None:
        """Begin a training."""
        self.value = scaling.fixed or 2.0**scaling.power
        self.dynamic = not scaling.fixed
        self._scaling = scaling
        self._left = scaling.hysteresis
        self._steps = 0
        self._last_overflow = -1

    def update(self, *, overflow: bool) -> None:
        """Adapt the scale after a step; overflow: it was skipped, since its gradients were not finite.

        Raises: OverflowError where the scale would have to be smaller than the least.
        """
        if not self.dynamic:
            return
        if overflow:
            self._overflown()
        else:
            doubles = (self._steps - self._last_overflow) % self._scaling.window == 0
            if doubles or self._scaling.consecutive:
                self._left = self._scaling.hysteresis
            if doubles:
                self.value *= FACTOR
        self._steps += 1

    def _overflown(self) -> None:
        self._last_overflow = self._steps
        if self._left > 1:
            self._left -= 1
            return
        least = self._scaling.least
        if self.value <= least:
            raise OverflowError(
                f"gradients overflow fp16 with the least loss scale, {least}. Likely cause: the training "
                "has diverged; use a smaller learning rate, gradient_clipping, or bf16"
            )
        self.value = max(self.value / FACTOR, least)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        counts = {"left": self._left, "steps": self._steps, "last_overflow": self._last_overflow}
        return {"value": self.value, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.value = float(state["value"])
        self._left, self._steps = int(state["left"]), int(state["steps"])
        self._last_overflow = int(state["last_overflow"])


def warn_unscaled(name: str, dtype: str) -> None:
    """Warn of a step on gradients that were not scaled."""
    warnings.warn(
        f"{name}: a step with dtype={dtype!r} and no loss scaling. Gradients below 6e-8 are 0, and those "
        "above 65504 make weights NaN. Use torch.amp.GradScaler, infinity.deepspeed.initialize with an fp16 "
        'section, or Config(dtype="bf16"), which needs neither.',
        stacklevel=7,
    )

"""How large a loss is made so that fp16 gradients neither vanish nor overflow. Pure.

[Note: the scale's course]
As DeepSpeed's DynamicLossScaler has it (deepspeed/runtime/fp16/loss_scaler.py, after Megatron-LM's): a step
whose gradients are not finite is left out, and takes one from the hysteresis; when that is down to one, it
halves the scale instead. Whenever `window` steps have passed since the last such step, the scale doubles, and
the hysteresis is whole again (with `consecutive`, after every good step).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How a loss is to be scaled; see DeepSpeed's section "fp16" and [Note: the scale's course]."""

    fixed: float = 0.0
    """The scale; 0 for one that follows the gradients."""
    power: int = 16
    """It begins with 2 to the power of this."""
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    least: float = 1.0
    casts: bool = False
    """Whether floating inputs of the model are cast to fp16."""

    def begin(self) -> LossScale:
        """Return the scale of a training that begins."""
        return LossScale(
            self.fixed or 2.0**self.power,
            dynamic=not self.fixed,
            window=self.window,
            hysteresis=self.hysteresis,
            least=self.least,
            consecutive=self.consecutive,
        )


class LossScale:
    """The factor on the loss, and what overflows do to it; see [Note: the scale's course]."""

    def __init__(
        self,
        value: float,
        *,
        dynamic: bool = True,
        window: int = 1000,
        hysteresis: int = 2,
        least: float = 1.0,
        consecutive: bool = False,
    ) -> None:
        """Begin with `value`, which stays what it is unless `dynamic`."""
        self.value = value
        self.dynamic = dynamic
        self._window, self._hysteresis, self._least = window, hysteresis, least
        self._consecutive = consecutive
        self._left = hysteresis
        self._steps = 0
        self._last_overflow = -1

    def update(self, *, overflow: bool) -> None:
        """A step is over, or was left out.

        Raises: OverflowError where the scale would have to be smaller than the least.
        """
        if not self.dynamic:
            return
        if overflow:
            self._overflown()
        else:
            if self._consecutive:
                self._left = self._hysteresis
            if (self._steps - self._last_overflow) % self._window == 0:
                self._left = self._hysteresis
                self.value *= FACTOR
        self._steps += 1

    def _overflown(self) -> None:
        self._last_overflow = self._steps
        if self._left > 1:
            self._left -= 1
            return
        if self.value <= self._least:
            raise OverflowError(
                f"gradients overflow fp16 with the least loss scale, {self._least}. Likely cause: the "
                "training has diverged; use a smaller learning rate, gradient_clipping, or bf16"
            )
        self.value = max(self.value / FACTOR, self._least)

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands, as plain values."""
        counts = {"left": self._left, "steps": self._steps, "last_overflow": self._last_overflow}
        return {"value": self.value, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.value = float(state["value"])
        self._left, self._steps = int(state["left"]), int(state["steps"])
        self._last_overflow = int(state["last_overflow"])


def warn_unscaled(name: str, dtype: str) -> None:
    """Warn of a step whose gradients nobody has scaled."""
    warnings.warn(
        f"{name}: a step with dtype={dtype!r} and no loss scaling. Gradients below 6e-8 are 0, and those "
        "above 65504 make weights NaN. Use torch.amp.GradScaler, infinity.deepspeed.initialize with an fp16 "
        'section, or Config(dtype="bf16"), which needs neither.',
        stacklevel=6,
    )

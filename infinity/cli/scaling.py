"""What `infinity train` does around a backward and a step in fp16: torch's GradScaler, as users write it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from infinity.units.tracking import Stateful


class LossScaling:
    """A loss scale that follows the gradients, of a model that computes in fp16; of any other, nothing."""

    def __init__(self, dtype: str, device: str) -> None:
        """dtype: as Config has it."""
        self._scaler = torch.amp.GradScaler(torch.device(device).type, enabled=dtype == "fp16")

    @property
    def tracked(self) -> Mapping[str, Stateful]:
        """What a durable run takes down with each step."""
        return {"scaler": self._scaler} if self._scaler.is_enabled() else {}

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to go backward from."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def step(
        self, model: nn.Module, optimizer: Any, schedule: LRScheduler, max_norm: float | None
    ) -> float | None:
        """Step the optimizer and its schedule, neither where gradients overflowed; return their norm, if
        anything made it known.
        """
        if not self._scaler.is_enabled():
            optimizer.step()
            schedule.step()
            return getattr(optimizer, "grad_norm", None)
        self._scaler.unscale_(optimizer)
        norm = None
        if max_norm is not None:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        scale = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        if self._scaler.get_scale() >= scale:
            schedule.step()
        return norm if norm is not None and math.isfinite(norm) else None

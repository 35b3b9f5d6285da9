"""DeepSpeed's learning rate schedules, as schedulers of torch, with DeepSpeed's formulas.

[Note: which step is which]
DeepSpeed counts "batch iterations": -1 when a schedule is made, 0 after the first step(), so that the first
two updates of a warm-up see the same rate. `iteration` is that number; torch's last_epoch is one more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from infinity.config.deepspeed_recipe import check_schedule
from infinity.errors import ConfigError

Rates = float | Sequence[float]


class _Schedule(LRScheduler):
    """A schedule whose rates depend on the iteration alone."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)

    @property
    def iteration(self) -> int:
        """See [Note: which step is which]."""
        return int(self.last_epoch) - 1

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration, in DeepSpeed's format."""
        return {"last_batch_iteration": self.iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from an iteration; the optimizer restores its rates itself."""
        self.last_epoch = state_dict["last_batch_iteration"] + 1
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def _per_group(optimizer: Optimizer, rates: Rates, name: str) -> list[float]:
    groups = len(optimizer.param_groups)
    if not isinstance(rates, Sequence):
        return [rates] * groups
    if len(rates) != groups:
        raise ConfigError(f"{name} has {len(rates)} values for {groups} param groups")
    return list(rates)


def _warmed(iteration: int, steps: int, kind: str) -> float:
    """Return the progress of a warm-up, from 0 to 1."""
    return math.log(iteration + 1) * (1.0 / math.log(steps)) if kind == "log" else iteration / steps


class WarmupLR(_Schedule):
    """Rise from warmup_min_lr to warmup_max_lr (None: the groups' rates) in warmup_num_steps, then hold.

    warmup_type: "log" or "linear".
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        """Set the first rates."""
        rates = [group["lr"] for group in optimizer.param_groups] if warmup_max_lr is None else warmup_max_lr
        self._low = _per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        self._high = _per_group(optimizer, rates, "warmup_max_lr")
        self._steps = max(2, int(warmup_num_steps))
        self._kind = warmup_type
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the iteration."""
        if self.iteration < 0:
            return list(self._low)
        if self.iteration < self._steps:
            share = _warmed(self.iteration, self._steps, self._kind)
        else:
            share = self._after_warmup()
        return [low + (high - low) * share for low, high in zip(self._low, self._high, strict=True)]

    def _after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then fall linearly to warmup_min_lr at total_num_steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        """Set the first rates."""
        self._total = int(total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _after_warmup(self) -> float:
        left = float(self._total - self.iteration)
        return max(0.0, left / float(max(1.0, self._total - self._steps)))


class WarmupCosineLR(_Schedule):
    """Rise from warmup_min_ratio of the groups' rates to the rates, then fall along half a cosine, to
    cos_min_ratio of them at total_num_steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        """Set the first rates."""
        self._high = [group["lr"] for group in optimizer.param_groups]
        self._total = int(total_num_steps)
        self._first = warmup_min_ratio
        self._steps = max(2, int(warmup_num_steps))
        self._last = cos_min_ratio
        self._kind = warmup_type
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the iteration."""
        return [high * self._ratio() for high in self._high]

    def _ratio(self) -> float:
        if self.iteration < 0:
            return 0.0
        if self.iteration < self._steps:
            warmed = _warmed(self.iteration, self._steps, self._kind)
            return self._first + warmed * (1.0 - self._first)
        fallen = min(1.0, (self.iteration - self._steps + 1) / max(1, self._total - self._steps))
        ratio = (1 + math.cos(math.pi * fallen)) / 2
        return max(0.0, self._last + (1.0 - self._last) * ratio)


class OneCycle(_Schedule):
    """One cycle of Smith's 1cycle policy (arXiv 1803.09820): rates rise and fall while beta1 falls and rises;
    then both decay.

    cycle_first_step_size, cycle_second_step_size (None: the same): steps up and down. cycle_*_stair_count:
    the number of stairs, 0 for a straight line. decay_step_size, decay_lr_rate, decay_mom_rate: after the
    cycle.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        """Set the first rates, and betas."""
        self._low = _per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self._high = _per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self._least = _per_group(optimizer, cycle_min_mom, "cycle_min_mom")
        self._most = _per_group(optimizer, cycle_max_mom, "cycle_max_mom")
        self._up = float(cycle_first_step_size)
        self._down = float(
            cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        )
        self._stairs = (
            cycle_first_stair_count,
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
        )
        self._interval = decay_step_size
        self._lr_decay = decay_lr_rate if decay_step_size else 0.0
        self._momentum_decay = decay_mom_rate if decay_step_size else 0.0
        self._cycles_momentum = cycle_momentum and "betas" in optimizer.defaults
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Set rates and betas of the next iteration."""
        super().step(epoch)
        if self._cycles_momentum:
            for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=True):
                group["betas"] = betas

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of the iteration, one pair per group; None where they do not follow the cycle."""
        if not self._cycles_momentum:
            return None
        return [(beta1, 0.99) for beta1 in self._beta1()]  # DeepSpeed's beta2 of a cycle

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the iteration."""
        if self._in_cycle():
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self._low, self._high, strict=True)]
        return [low / self._decayed(self._lr_decay) for low in self._low]

    def _beta1(self) -> list[float]:
        if self.iteration < 0:
            return self._least
        if self._in_cycle():
            height = self._height()
            return [
                most - (most - least) * height for least, most in zip(self._least, self._most, strict=True)
            ]
        return [most * self._decayed(self._momentum_decay) for most in self._most]

    def _in_cycle(self) -> bool:
        return self.iteration < self._up + self._down

    def _decayed(self, rate: float) -> float:
        if not rate:
            return 1.0
        return 1 + rate * ((self.iteration - (self._up + self._down) + 1) / self._interval)

    def _height(self) -> float:
        """Return the height in the cycle, from 0 up to 1 and back to 0."""
        total, number = self._up + self._down, self.iteration + 1
        at = 1.0 + number / total - math.floor(1 + number / total)
        rising, share = at <= self._up / total, self._up / total
        stairs = self._stairs[0 if rising else 1]
        if stairs:
            number %= int(total)
            passed = number / self._up if number <= self._up else (total - number) / self._down
            return math.floor(passed * stairs) / stairs
        return at / share if rising else (at - 1) / (share - 1)


class LRRangeTest(_Schedule):
    """Raise the rates without end, by lr_range_test_step_rate per lr_range_test_step_size steps, to find the
    rate at which training diverges; lr_range_test_staircase: in stairs.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        """Set the first rates."""
        self._low = _per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self._steps = lr_range_test_step_size
        self._rate = lr_range_test_step_rate
        self._in_stairs = lr_range_test_staircase
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the iteration."""
        passed = float(self.iteration + 1) / self._steps
        return [
            low * (1 + self._rate * (math.floor(passed) if self._in_stairs else passed)) for low in self._low
        ]


_KINDS: dict[str, type[_Schedule]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def make_schedule(name: str, parameters: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """Return the schedule that a DeepSpeed file describes.

    Raises: ConfigError for an unknown type or parameter, and for a number of values that is not that of the
    param groups.
    """
    given = {key: value for key, value in parameters.items() if key != "last_batch_iteration"}
    return _KINDS[check_schedule(name, parameters)](optimizer, **given)

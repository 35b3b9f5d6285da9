"""The scalars of one step of each optimizer, and the key of the random bits for rounding AdamW's moments."""

import math
from dataclasses import dataclass

WORD_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class AdamWScalars:
    """One parameter segment's hyperparameters for one step, as the user gave them.

    The kernel's scalars (bias corrections, step size, decay factor) are computed from these in fp64 and
    rounded to
    fp32 once: [Note: the adamw step] in kernels.h.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # decoupled
    step: int  # this step's count: 1 in a parameter's first
    clip: float = 1.0  # fp32 factor on the gradient; NaN if the norm is, as in torch's clipping

    def __post_init__(self) -> None:
        _check_not_negative(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        _check_below_1(beta1=self.beta1, beta2=self.beta2)
        _check_step(self.step)
        _check_clip(self.clip)


@dataclass(frozen=True, slots=True)
class SGDScalars:
    """The hyperparameters of one step of SGD with momentum."""

    lr: float
    momentum: float
    weight_decay: float  # L2: added to the gradient
    step: int  # in step 1 the momentum becomes the gradient
    dampening: float = 0.0
    nesterov: bool = False
    clip: float = 1.0

    def __post_init__(self) -> None:
        _check_not_negative(lr=self.lr, weight_decay=self.weight_decay)
        _check_below_1(momentum=self.momentum)
        _check_step(self.step)
        _check_clip(self.clip)
        if self.dampening and (self.nesterov or not self.momentum):
            message = (
                f"dampening={self.dampening}, momentum={self.momentum}, nesterov={self.nesterov}: "
                "dampening needs a momentum, and is not allowed with Nesterov's"
            )
            raise ValueError(message)


@dataclass(frozen=True, slots=True)
class AdagradScalars:
    """The hyperparameters of one step of Adagrad."""

    lr: float
    eps: float
    weight_decay: float  # L2: added to the gradient
    step: int
    lr_decay: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        _check_not_negative(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay, lr_decay=self.lr_decay)
        _check_step(self.step)
        _check_clip(self.clip)


@dataclass(frozen=True, slots=True)
class LionScalars:
    """The hyperparameters of one step of Lion (Chen et al., arXiv 2302.06675)."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float  # decoupled
    clip: float = 1.0

    def __post_init__(self) -> None:
        _check_not_negative(lr=self.lr, weight_decay=self.weight_decay)
        _check_below_1(beta1=self.beta1, beta2=self.beta2)
        _check_clip(self.clip)


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            message = f"{name}={value}: expected a finite number of at least 0"
            raise ValueError(message)


def _check_below_1(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            message = f"{name}={value}: expected at least 0 and below 1"
            raise ValueError(message)


def _check_step(step: int) -> None:
    if step < 1:
        message = f"step={step}: expected at least 1, the count that includes this step"
        raise ValueError(message)


def _check_clip(clip: float) -> None:
    if clip < 0:
        message = f"clip={clip}: expected a factor of at least 0"
        raise ValueError(message)


def state_key(seed: int, parameter: int, step: int) -> int:
    """Return the 64-bit key of one parameter's random bits in one step: [Note: the noise] in kernels.h.

    `parameter` is its index among the optimizer's parameters, in the order of its groups; `step` is its own
    step count. Each number in turn is mixed by a round of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    key = 0
    for name, value in (("seed", seed), ("parameter", parameter), ("step", step)):
        if not 0 <= value <= WORD_MASK:
            message = f"{name}={value}: expected an unsigned 64-bit integer"
            raise ValueError(message)
        key = ((key ^ value) + 0x9E3779B97F4A7C15) & WORD_MASK
        key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & WORD_MASK
        key = ((key ^ key >> 27) * 0x94D049BB133111EB) & WORD_MASK
        key ^= key >> 31
    return key

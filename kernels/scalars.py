"""The scalars of one AdamW step, and the key of the random bits that round its moments."""

import math
from dataclasses import dataclass

WORD_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class AdamWScalars:
    """One parameter segment's hyperparameters for one step, as the user gave them.

    What the kernel needs of them (bias corrections, step size, decay factor) is computed in fp64 and rounded
    to fp32 once: [Note: the adamw step] in kernels.h.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # decoupled
    step: int  # this step's count: 1 in a parameter's first
    clip: float = 1.0  # the fp32 factor on the gradient; NaN where the norm is, as torch's clipping has it

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                message = f"{name}={value}: expected a finite number of at least 0"
                raise ValueError(message)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                message = f"{name}={value}: expected at least 0 and below 1"
                raise ValueError(message)
        if self.step < 1:
            message = f"step={self.step}: expected at least 1, the count that includes this step"
            raise ValueError(message)
        if self.clip < 0:
            message = f"clip={self.clip}: expected a factor of at least 0"
            raise ValueError(message)


def state_key(seed: int, parameter: int, step: int) -> int:
    """Return the 64-bit key of one parameter's random bits in one step: [Note: the noise] in kernels.h.

    `parameter` is its place among the optimizer's parameters, in the order of its groups, `step` its own step
    count. Each number in turn goes through a round of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
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

"""The learning rate of `infinity train`, step by step."""

from __future__ import annotations

import math

LAST_FACTOR = 0.1
"""The learning rate's factor at the last step."""


def learning_rate(step: int, warmup: int, steps: int) -> float:
    """Return the learning rate's factor at a step, from 0: linear up to 1, then a cosine to LAST_FACTOR."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return LAST_FACTOR + (1 - LAST_FACTOR) * (1 + math.cos(math.pi * done)) / 2

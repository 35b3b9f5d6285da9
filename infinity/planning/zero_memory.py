"""What model states take where ranks share them: the arithmetic of ZeRO. Pure: no torch, no I/O.

Mixed-precision Adam keeps, per parameter, a 16-bit weight (2 bytes), a 16-bit gradient (2) and the
optimizer's fp32 master and two moments (12, the paper's K). ZeRO divides among ranks first the optimizer's
part (stage 1), then gradients too (2), then weights too (3): Rajbhandari, Rasley, Ruwase and He 2020, fig. 1.
"""

from __future__ import annotations

WEIGHT_NBYTES = 2
GRADIENT_NBYTES = 2
OPTIMIZER_NBYTES = 12
"""The paper's K: fp32 master, momentum and variance."""

STAGES = (0, 1, 2, 3)
"""0: nothing is shared, as in plain data parallelism."""


def model_states(parameters: float, ranks: int, stage: int) -> float:
    """Return the bytes of model states that each of `ranks` ranks holds; activations come on top.

    Raises: ValueError for a stage that is none, and for less than one rank.
    """
    if stage not in STAGES:
        raise ValueError(f"stage {stage}: ZeRO has the stages {', '.join(map(str, STAGES))}")
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: expected at least 1")
    shared = (OPTIMIZER_NBYTES, GRADIENT_NBYTES, WEIGHT_NBYTES)[:stage]
    whole = WEIGHT_NBYTES + GRADIENT_NBYTES + OPTIMIZER_NBYTES - sum(shared)
    return parameters * (whole + sum(shared) / ranks)

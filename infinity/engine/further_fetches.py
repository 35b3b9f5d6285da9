"""What the further micro-batches of a step cost, where each of them fetches the weights."""

from __future__ import annotations

import logging

from torch import nn

from infinity.engine.engine import engine_of_model
from infinity.sequences.parallel import is_divided
from infinity.sizes import format_size

logger = logging.getLogger("infinity")


def tell_of_accumulation(model: nn.Module, steps: int, cure: str) -> None:
    """Log what accumulating the gradients of `steps` micro-batches fetches more than one does. cure: what
    lets them share one fetch; where ranks share sequences, or layers, nothing does, which is said in its
    place.
    """
    engine = engine_of_model(model)
    again = 2 * (steps - 1) * sum(one.nbytes for unit in engine.units for one in unit.parameters)
    if is_divided(model) or engine.stages.mesh.several:
        what = "sequences" if is_divided(model) else "layers"
        cure = f"Ranks share {what}, and then micro-batches share no fetch: larger ones, and fewer, cost less"
    logger.info(
        "gradient_accumulation_steps=%d: each micro-batch fetches the weights anew, in forward and backward; "
        "what does not stay in host memory of these %s more is read from NVMe in every step. %s",
        steps,
        format_size(again),
        cure,
    )

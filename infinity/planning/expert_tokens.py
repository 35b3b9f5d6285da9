"""What ranks that divide experts (expert_parallel) send of tokens in a step. Pure: no torch, no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass

from infinity.planning.outline import Outline
from infinity.planning.setting import Setting

_WAYS = 2
"""A row goes to the rank of its expert, and its result comes back."""


@dataclass(frozen=True, slots=True)
class TokenTraffic:
    """Bytes of rows that one rank sends in a step, in the mean of all ranks, and where none is preferred."""

    nbytes: int
    """All of them, as `Stats.exchanged_nbytes["tokens"]` counts."""
    to_others_nbytes: int
    """Those that do not stay on the rank."""


def token_traffic(outline: Outline, setting: Setting) -> TokenTraffic | None:
    """Return what a step sends: for each token, and each expert that it is routed to, a row of the hidden
    size there and one back, in the forward, in the backward, and once more where blocks are recomputed.
    With "eager" experts a row takes its weight along, which is not counted. outline: with its experts in
    slices. None where nothing is divided, or the hidden size is not known.
    """
    divided = [unit for unit, part in enumerate(outline.parts) if part.divided and not part.idle]
    if not divided or outline.activations is None:
        return None
    recomputed = {unit for stage in outline.stages if stage.recomputed for unit in stage.units}
    again = recomputed if setting.method.checkpointing else set()
    rows_of_token = sum(
        (2 + (unit in again)) * outline.parts[unit].active * outline.parts[unit].shapes[0][0]
        for unit in divided
    )
    width = 4 if setting.dtype == "fp32" else 2
    rows = round(rows_of_token * setting.method.tokens * setting.micro_batches)
    nbytes = rows * _WAYS * outline.activations.hidden * width
    return TokenTraffic(nbytes, math.ceil(nbytes * (1 - 1 / setting.expert_parallel)))

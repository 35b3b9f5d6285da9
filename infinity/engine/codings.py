"""How the ranks of an engine send weights and gradients: coded, where Config says so."""

from __future__ import annotations

import logging

from infinity.config.settings import Config
from infinity.device.device import Device
from infinity.errors import ConfigError
from infinity.gradients.coding import Coding
from infinity.planning.coded import BITS
from infinity.ranks.group import Ranks

logger = logging.getLogger("infinity")
_NAMES = {bits: name for name, bits in BITS.items()}


def codings(config: Config, ranks: Ranks, device: Device) -> tuple[Coding | None, Coding | None]:
    """Return how weights are sent, and how gradients are; None for those that are sent as they are. Every
    rank calls it.

    Raises: ConfigError, the same on every rank, where ranks have different settings, and where they compute
    on an accelerator.
    """
    mine = [BITS.get(one or "", 0) for one in (config.quantized_weights, config.quantized_gradients)]
    if ranks.size == 1:
        if any(mine):
            logger.warning(
                "%s: there is one rank, which sends nothing to others; nothing is quantised", _said(mine)
            )
        return None, None
    rows = ranks.of_all(mine, "compare quantized_weights and quantized_gradients")
    if any(row != rows[0] for row in rows):
        given = "; ".join(f"rank {rank}: {_said(row)}" for rank, row in enumerate(rows))
        raise ConfigError(f"the ranks quantise what they send differently. Give all the same Config: {given}")
    if any(mine) and not device.is_host:
        raise ConfigError(
            f"{_said(mine)} with device={ranks.device!r}: an accelerator's memory has no room set aside "
            "for codes, and NCCL is not measured with them; leave it out, or compute on the CPU "
            '(device="cpu")'
        )
    weights, gradients = (Coding(bits) if bits else None for bits in mine)
    return weights, gradients


def _said(bits: list[int]) -> str:
    names = ("quantized_weights", "quantized_gradients")
    return ", ".join(f"{name}={_NAMES.get(one)!r}" for name, one in zip(names, bits, strict=True))

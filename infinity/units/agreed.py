"""Whether several ranks decide alike what lives on their devices; where they do not, it stays as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable

import xxhash

from infinity.planning.placement import Placement

logger = logging.getLogger("infinity")


def are_same(same: Callable[[int, str], bool], placement: Placement) -> bool:
    """Whether all ranks have decided alike. same: whether all of them have this number; all call it."""
    said = str(list(placement)).encode()
    if same(xxhash.xxh3_64_intdigest(said) >> 1, "place what lives on the device"):
        return True
    logger.warning("placement: the ranks expect different uses of units, and what lives on devices stays")
    return False


def never(_: Placement) -> bool:
    """Of a decision that a rank makes alone: nothing comes to a device, and nothing leaves it."""
    return False

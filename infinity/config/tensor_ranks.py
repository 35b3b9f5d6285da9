"""DeepSpeed's section tensor_parallel: how many ranks divide each layer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.errors import ConfigError

SECTION = "tensor_parallel."
SIZE = SECTION + "autotp_size"


def tensor_ranks(found: Mapping[str, Any]) -> int:
    """Return how many ranks divide each layer, of a file's values by path; 1 for none."""
    size = found.get(SIZE)
    return int(size) if isinstance(size, int | float) and size > 1 else 1


def divide_layers(found: Mapping[str, Any], ranks: int) -> int:
    """Return how many of `ranks` ranks have different data, those that share a sequence among them.

    Raises: ConfigError where the ranks cannot be divided so.
    """
    size = tensor_ranks(found)
    if ranks == 1:  # of a file that is read before there are ranks
        return ranks
    if ranks % size:
        raise ConfigError(
            f"{SIZE}={size}: {ranks} ranks cannot be divided into groups of {size} that divide layers; give "
            "a number that divides the ranks"
        )
    return ranks // size


def switch_off(found: Mapping[str, Any]) -> list[str]:
    """Return the keys of the section that have no effect, since no layer is divided."""
    if tensor_ranks(found) > 1:
        return []
    return [path for path in found if path.startswith(SECTION)]

"""How much ranks exchange in one collective: Config's settings, and DeepSpeed's keys, which bound them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.errors import ConfigError
from infinity.sizes import parse_size

DEFAULT = "16MiB"
"""Large enough that what a collective takes beside its bytes does not count, small beside any budget."""
_ZERO = "zero_optimization."
_BOUNDS = {
    "gather_bucket": (_ZERO + "allgather_bucket_size", _ZERO + "stage3_prefetch_bucket_size"),
    "reduce_bucket": (_ZERO + "reduce_bucket_size",),
}
"""By field of Config, DeepSpeed's keys, in elements."""


def bucket_nbytes(name: str, size: int | str) -> int:
    """Return a setting in bytes; 0: units go one by one.

    Raises: ConfigError naming it.
    """
    try:
        return parse_size(size, name)
    except ValueError as error:
        raise ConfigError(f"{error}; 0: units go one by one") from None


def bounding(given: Mapping[str, Any]) -> list[str]:
    """Return the keys of a file that bound a setting: those that are numbers."""
    keys = [key for keys in _BOUNDS.values() for key in keys]
    return [key for key in keys if isinstance(given.get(key), (int, float))]


def bounds(given: Mapping[str, Any], width: int) -> dict[str, int]:
    """Return the fields of Config, in bytes, that a file's keys make less than the default. width: bytes of
    an element.
    """
    keys, found = bounding(given), {}
    for name, of_name in _BOUNDS.items():
        least = min((int(given[key]) * width for key in of_name if key in keys), default=None)
        if least is not None and least < parse_size(DEFAULT):
            found[name] = least
    return found

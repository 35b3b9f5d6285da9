"""What is said of second parts of weights, over few ranks (ZeRO++'s hpZ). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.errors import ConfigError

MACHINE = "machine"
KEY = "zero_optimization.zero_hpz_partition_size"
SAYS = "Config(secondary_shard=N): layers are assembled again within N neighbours; 0 and 1: off"


def check_secondary(given: object) -> None:
    """Check Config.secondary_shard by itself.

    Raises: ConfigError.
    """
    if given not in (None, MACHINE) and (type(given) is not int or given < 1):
        raise ConfigError(f'secondary_shard={given!r}: expected "machine", a number of ranks, or None')


def secondary(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the field of Config that a file sets."""
    size = int(given.get(KEY) or 0)
    return {"secondary_shard": size} if size > 1 else {}

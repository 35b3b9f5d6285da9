"""How many ranks may share a sequence. Pure."""

from __future__ import annotations

from typing import Any

from infinity.errors import ConfigError


def check_sequences(size: Any, ranks: int) -> None:
    """See that `ranks` ranks can be divided into sequences of `size` ranks.

    Raises: ConfigError, with the numbers that work.
    """
    if not isinstance(size, int) or size < 1 or ranks % size:
        works = ", ".join(str(one) for one in range(1, ranks + 1) if ranks % one == 0)
        raise ConfigError(
            f"sequence_parallel={size}: {ranks} ranks cannot be divided into sequences of {size} ranks each. "
            f"Of {ranks} ranks, {works} may share a sequence"
        )

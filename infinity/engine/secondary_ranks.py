"""Which ranks keep second parts of weights together: see the note in gradients/secondary.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from infinity.config.secondary import MACHINE
from infinity.errors import ConfigError
from infinity.ranks.machines import LOCAL_SIZE, grid_of

logger = logging.getLogger("infinity")


def neighbours_of(given: str | int | None, machines: Sequence[int]) -> int:
    """Return how many neighbours keep second parts together, by Config.secondary_shard; 0 where none do,
    which is said. machines: that of each rank.

    Raises: ConfigError for a number of ranks that cannot be.
    """
    if given is None:
        return 0
    ranks = len(machines)
    size = _of_machine(machines) if given == MACHINE else int(given)
    if ranks == 1:
        _say(given, "there is one rank, which has all of the weights")
        return 0
    if ranks % size:
        good = ", ".join(str(one) for one in range(2, ranks) if ranks % one == 0) or "none"
        raise ConfigError(
            f"secondary_shard={given!r} does not divide the {ranks} ranks, whose neighbours keep second "
            f"parts together: {good} would"
        )
    if size == 1:
        _say(given, "each rank would keep all of the weights, in the host_memory of one")
        return 0
    if size == ranks:
        _say(given, "all ranks keep parts together anyway: no weights cross between others")
        return 0
    _check_machines(given, size, machines)
    return size


def _of_machine(machines: Sequence[int]) -> int:
    """Return the ranks of each machine. Raises: ConfigError where they differ, or do not lie together."""
    if len({*machines}) == len(machines):
        return 1
    if len({*machines}) == 1:
        return len(machines)
    grid = grid_of(machines)
    if grid is None:
        of_each = [machines.count(one) for one in dict.fromkeys(machines)]
        raise ConfigError(
            f"secondary_shard={MACHINE!r}: the machines have {of_each} ranks, by their order. All need the "
            "same number, and theirs one after the other; or give a number of neighbours that divides each"
        )
    return grid.ranks


def _check_machines(given: str | int, size: int, machines: Sequence[int]) -> None:
    for first in range(0, len(machines), size):
        if len({*machines[first : first + size]}) > 1:
            raise ConfigError(
                f"secondary_shard={given!r}: ranks {first} to {first + size - 1} are on several machines, "
                "between which their layers would be assembled again and again. Give the ranks of a machine "
                f'("machine"), or a divisor of them; {LOCAL_SIZE} says what counts as one'
            )


def _say(given: str | int, why: str) -> None:
    logger.warning("secondary_shard=%r: %s; no second part is kept", given, why)

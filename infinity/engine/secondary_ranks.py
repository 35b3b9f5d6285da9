"""Which ranks keep second parts of weights together: see the note in gradients/secondary.py."""

from __future__ import annotations

import logging

from infinity.config.secondary import MACHINE
from infinity.device.device import Device
from infinity.errors import ConfigError
from infinity.ranks.group import Ranks
from infinity.ranks.machines import LOCAL_SIZE, grid_of, this_machine

logger = logging.getLogger("infinity")


def neighbours_of(given: str | int | None, ranks: Ranks, device: Device) -> int:
    """Return how many neighbours keep second parts together, by Config.secondary_shard; 0 where none do,
    which is said. Every rank calls it.

    Raises: ConfigError, the same on every rank, for a number of ranks that cannot be, where ranks have
    different settings, and where they compute on an accelerator.
    """
    if ranks.size == 1:
        if given is not None:
            _say(given, "there is one rank, which has all of the weights")
        return 0
    wanted = 0 if given is None else -1 if given == MACHINE else int(given)
    rows = ranks.of_all([wanted, this_machine()], "compare secondary_shard")
    sizes, machines = [row[0] for row in rows], [row[1] for row in rows]
    if any(size != sizes[0] for size in sizes):
        names = {0: None, -1: MACHINE}
        said = "; ".join(f"rank {rank}: {names.get(size, size)!r}" for rank, size in enumerate(sizes))
        raise ConfigError(f"secondary_shard differs among the ranks. Give all the same Config: {said}")
    if given is None:
        return 0
    size = _of_machine(machines) if given == MACHINE else int(given)
    if ranks.size % size:
        good = ", ".join(str(one) for one in range(2, ranks.size) if ranks.size % one == 0) or "none"
        raise ConfigError(
            f"secondary_shard={given!r} does not divide the {ranks.size} ranks, whose neighbours keep second "
            f"parts together: {good} would"
        )
    if size == 1:
        _say(given, "each rank would keep all of the weights, in the host_memory of one")
        return 0
    if size == ranks.size:
        _say(given, "all ranks keep parts together anyway: no weights cross between others")
        return 0
    _check_machines(given, size, machines)
    if not device.is_host:
        raise ConfigError(
            f"secondary_shard={given!r} with device={ranks.device!r}: second parts in host memory are not "
            'brought to an accelerator; leave it out, or compute on the CPU (device="cpu")'
        )
    return size


def _of_machine(machines: list[int]) -> int:
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


def _check_machines(given: str | int, size: int, machines: list[int]) -> None:
    for first in range(0, len(machines), size):
        if len({*machines[first : first + size]}) > 1:
            raise ConfigError(
                f"secondary_shard={given!r}: ranks {first} to {first + size - 1} are on several machines, "
                "between which their layers would be assembled again and again. Give the ranks of a machine "
                f'("machine"), or a divisor of them; {LOCAL_SIZE} says what counts as one'
            )


def _say(given: str | int, why: str) -> None:
    logger.warning("secondary_shard=%r: %s; no second part is kept", given, why)

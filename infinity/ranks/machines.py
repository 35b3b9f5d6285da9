"""How ranks lie on machines, and the groups in which they exchange within one and between them. The grid is
pure.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import xxhash

from infinity.errors import ConfigError
from infinity.ranks.groups import Members, new_group

LOCAL_SIZE = "INFINITY_LOCAL_SIZE"
"""Names a number of ranks: each so many neighbours of the world count as a machine of their own."""


def this_machine() -> int:
    """Return a number of 63 bits that stands for this machine, or for what LOCAL_SIZE makes of it.

    Raises: ConfigError for a LOCAL_SIZE that is no number above 0.
    """
    name, given = socket.gethostname(), os.environ.get(LOCAL_SIZE)
    if given is not None:
        if not given.isdecimal() or int(given) < 1:
            raise ConfigError(f"{LOCAL_SIZE}={given!r}: expected a number of ranks above 0")
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        name += f"/{rank // int(given)}"
    return xxhash.xxh3_64_intdigest(name.encode()) >> 1


@dataclass(frozen=True, slots=True)
class RankGrid:
    """Ranks on several machines, with several on each: first those of one machine, then those of the next."""

    machines: int
    ranks: int
    """Of each machine."""

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.machines * self.ranks


def grid_of(machines: Sequence[int]) -> RankGrid | None:
    """Return the grid of ranks on these machines, one for each rank; None where there is one machine, or one
    rank on each, or other numbers on some, or neighbours on one machine that are not neighbours among the
    ranks.
    """
    names = list(dict.fromkeys(machines))
    grid = RankGrid(len(names), len(machines) // len(names))
    in_order = [name for name in names for _ in range(grid.ranks)]
    return grid if grid.machines > 1 and grid.ranks > 1 and in_order == list(machines) else None


@dataclass(frozen=True, slots=True)
class _Some:
    """Some of the ranks; see Members."""

    members: list[int]
    rank: int

    @property
    def size(self) -> int:
        return len(self.members)


class Hops:
    """Two groups of this rank: of those on its machine, and of those with its number on theirs."""

    def __init__(self, grid: RankGrid, ranks: Members, name: str, backend: str, timeout_s: float) -> None:
        """Connect them. All ranks call this."""
        self.grid = grid
        machine, number = divmod(ranks.rank, grid.ranks)
        first = machine * grid.ranks
        near = _Some(ranks.members[first : first + grid.ranks], number)
        far = _Some(ranks.members[number :: grid.ranks], machine)
        self.within: Any = new_group(f"{name} {backend} machine {machine}", near, backend, timeout_s)
        self.between: Any = new_group(f"{name} {backend} number {number}", far, backend, timeout_s)


def neighbours(size: int, ranks: Members, name: str) -> tuple[str, Members]:
    """Return a name for this rank's group of `size` neighbours, and the group."""
    group, number = divmod(ranks.rank, size)
    members = ranks.members[group * size : (group + 1) * size]
    return f"{name} neighbours {group}", _Some(members, number)

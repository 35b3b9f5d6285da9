"""What is asked of torch.distributed: groups under names of ours, and the store of its processes."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Members(Protocol):
    """Ranks of the world that form a group, and which of them this process is."""

    size: int
    rank: int
    members: list[int]


def new_group(name: str, ranks: Members, backend: str, timeout_s: float) -> Any:
    """Do as dist.new_group, under a name of ours."""
    c10d: Any = dist.distributed_c10d
    timeout = timedelta(seconds=timeout_s)
    group, _ = c10d._new_process_group_helper(  # noqa: SLF001 - new_group takes no name
        ranks.size, ranks.rank, ranks.members, c10d.Backend(backend), store(), name, timeout=timeout
    )
    numbers = {member: number for number, member in enumerate(ranks.members)}
    c10d._world.pg_group_ranks[group] = numbers  # noqa: SLF001
    return group


def all_gather(whole: torch.Tensor, part: torch.Tensor, **how: Any) -> Any:
    """Do as dist.all_gather_into_tensor, by the name that this torch has for it."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(whole, part, **how)


def store() -> Any:
    """Return what the processes have met through."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch offers it to nobody else


def meet(backend: str) -> None:
    """Connect all processes of torchrun. It keeps its store when it restarts them, with the addresses of
    those that are gone, so each life has names of its own.
    """
    connect: Any = dist.rendezvous  # type: ignore[attr-defined]
    meeting, rank, size = next(connect("env://"))
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = dist.distributed_c10d.PrefixStore(f"infinity/life {life}", meeting)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)

"""Groups of torch.distributed, by name; its backends, and the store of its processes."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from infinity.config.settings import ACCELERATORS
from infinity.errors import ConfigError
from infinity.ranks.gloo import new_gloo_group, plain_group

_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "hpu": "hccl", "npu": "hccl"}
"""By the type of an accelerator; the CPU's is gloo."""


class Members(Protocol):
    """Ranks of the world that form a group, and the index of this process among them."""

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def rank(self) -> int:
        """The index."""

    @property
    def members(self) -> list[int]:
        """The ranks of the world."""


def new_group(name: str, ranks: Members, backend: str, timeout_s: float) -> Any:
    """Make a group as dist.new_group does, but under the given name. Over gloo it shares the devices of the
    others that are open; see [Note: one device] in gloo.py.
    """
    members, rank, timeout = ranks.members, ranks.rank, timedelta(seconds=timeout_s)
    if backend == "gloo":
        group = new_gloo_group(name, members, rank, store(), timeout)
    else:
        group = plain_group(backend, name, members, rank, store(), timeout)
    numbers = {member: number for number, member in enumerate(members)}
    dist.distributed_c10d._world.pg_group_ranks[group] = numbers  # noqa: SLF001
    return group


def all_gather(whole: torch.Tensor, part: torch.Tensor, **how: Any) -> Any:
    """Call dist.all_gather_into_tensor, by its name in this version of torch."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(whole, part, **how)


def store() -> Any:
    """Return the store through which the processes met."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name


def meet(backend: str) -> None:
    """Connect all processes of torchrun. It keeps its store, with the addresses of ended processes, when it
    restarts them, so each restart uses names of its own.
    """
    connect: Any = dist.rendezvous  # type: ignore[attr-defined]
    meeting, rank, size = next(connect("env://"))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = dist.distributed_c10d.PrefixStore(f"infinity/restart {restart}", meeting)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)


def members_of(group: Any) -> list[int]:
    """Return the ranks of the world in `group`, a process group or a one-dimensional DeviceMesh.

    Raises: ConfigError for a mesh of more dimensions, and for a group that this process is not in.
    """
    if hasattr(group, "get_group"):
        if group.ndim > 1:
            raise ConfigError(
                f"process_group is a mesh of {group.ndim} dimensions, {group.mesh_dim_names}: give one of "
                'them, such as mesh["dp"]'
            )
        group = group.get_group()
    members = sorted(dist.get_process_group_ranks(group))
    if dist.get_rank() not in members:
        raise ConfigError(f"rank {dist.get_rank()} is not in the process group of ranks {members}")
    return members


def backend_of(device: str) -> str:
    """Return the backend by which ranks that compute on a device exchange what is there."""
    return _BACKENDS.get(device.partition(":")[0], "gloo")


def check_backend(device: str) -> None:
    """See that torch has it. Raises: ConfigError."""
    backend = backend_of(device)
    if not dist.is_backend_available(backend):
        raise ConfigError(
            f"device={device!r} on several ranks: they need {backend.upper()}, and torch {torch.__version__} "
            "is built without it. Use a torch that has it, one rank, or device='cpu'"
        )


def placed(device: str) -> str:
    """Return the device of this process, one of its launcher's; it becomes the present one.

    Raises: ConfigError where torch lacks the backend of its ranks.
    """
    check_backend(device)
    if device not in ACCELERATORS or "LOCAL_RANK" not in os.environ:
        return device
    own = f"{device}:{os.environ['LOCAL_RANK']}"
    torch.get_device_module(device).set_device(own)
    return own

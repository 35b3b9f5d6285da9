"""deepspeed.comm: torch.distributed, with the calls that DeepSpeed adds."""

from typing import Any

from torch import distributed

from infinity.deepspeed.launch import init_distributed, local_rank


def get_local_rank() -> int:
    """Return this process's rank on its machine."""
    return local_rank()


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return distributed.group.WORLD


def __getattr__(name: str) -> Any:
    """Look up a name in torch.distributed."""
    return getattr(distributed, name)


__all__ = ["get_local_rank", "get_world_group", "init_distributed"]

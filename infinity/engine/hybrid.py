"""A mesh of two dimensions, (replicate, shard), as FSDP2's hybrid sharding has it."""

from __future__ import annotations

import dataclasses
from typing import Any

from infinity.config.settings import Config
from infinity.errors import ConfigError
from infinity.ranks.mesh import data_of_mesh


def hybrid(group: Any, config: Config) -> tuple[Any, Config]:
    """Return the ranks that share a model, and the settings, where `group` is such a mesh: all of its ranks,
    and secondary_shard as many as its second dimension has. Anything else is returned as it is.

    Raises: ConfigError where the mesh and Config say different things, or its ranks are not in order.
    """
    if getattr(group, "ndim", 1) != 2 or not hasattr(group, "mesh"):
        return group, config
    rows = group.mesh.tolist()
    in_order = group.mesh.flatten()
    if not bool((in_order[1:] > in_order[:-1]).all()):
        raise ConfigError(
            f"process_group is a mesh of {rows}: its ranks are to ascend, row by row, so that those of a row "
            "are neighbours, which keep second parts of weights together"
        )
    size = len(rows[0])
    if config.secondary_shard not in (None, size):
        raise ConfigError(
            f"process_group is a mesh of {len(rows)} times {size} ranks, (replicate, shard), and "
            f"secondary_shard={config.secondary_shard!r}: leave one of the two out"
        )
    names = tuple(group.mesh_dim_names or ())
    if len(names) != 2:
        raise ConfigError(
            "process_group is a mesh whose dimensions have no names: init_device_mesh(..., "
            'mesh_dim_names=("replicate", "shard")) gives them some'
        )
    return data_of_mesh(group, names), dataclasses.replace(config, secondary_shard=size)

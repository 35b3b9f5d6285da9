"""A mesh of two dimensions, (replicate, shard), as FSDP2's hybrid sharding has it."""

from __future__ import annotations

import dataclasses
from typing import Any

from infinity.config.settings import Config
from infinity.errors import ConfigError
from infinity.ranks.mesh import data_of_mesh


def hybrid(group: Any, config: Config) -> tuple[Any, Config]:
    """Return the ranks that share a model, and the settings, where `group` is such a mesh, as the names of
    its dimensions say, such as "replicate" and "shard": all of its ranks, and secondary_shard as many as its
    second dimension has. Anything else is returned as it is.

    Raises: ConfigError where the mesh and Config say different things, or its ranks are not in order.
    """
    names = tuple(getattr(group, "mesh_dim_names", None) or ())
    if len(names) != 2 or "replicate" not in names[0] or "shard" not in names[1]:
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
    return data_of_mesh(group, names), dataclasses.replace(config, secondary_shard=size)

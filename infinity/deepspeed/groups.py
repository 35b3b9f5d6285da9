"""Which ranks share data, layers, stages and sequences, as a DeepSpeed script says it.

[Note: who divides what]
DeepSpeed's mesh_param is (data, sequences): how many sequences there are, and how many ranks share each. An
mpu is Megatron's: it has groups of ranks, of which those with parts of the layers build these parts by
themselves, as ordinary parameters that are marked (see [Note: marked parameters] in ranks/mesh.py).
tensor_parallel.autotp_size divides the layers of a model of transformers by its own plan. Ranks of all of
these but the stages of a pipeline are neighbours; what Infinity partitions, it partitions among the ranks
that have the same parts of the model and different data, those of one sequence among them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from infinity.deepspeed.launch import Settings, init_distributed, rank, ranks
from infinity.engine.engine import Engine
from infinity.errors import ConfigError, UnsupportedError
from infinity.ranks.mesh import data_of_groups, data_of_mesh

_DATA = ("data_parallel_group", "sequence_data_parallel_group")
_TENSOR = ("tensor_model_parallel_group", "slice_parallel_group", "model_parallel_group")
_STAGES = ("pipeline_model_parallel_group", "pipe_parallel_group")
_NAMES_OF_DATA = ("data_parallel", "data", "dp", "dp_replicate", "dp_shard")
_NAMES_OF_SEQUENCES = ("sequence_parallel", "sp")


@dataclass(frozen=True, slots=True)
class Divided:
    """The ranks, seen from this one; see [Note: who divides what]."""

    data: tuple[int, ...]
    """The ranks of the world that share what is partitioned, with different data or parts of sequences."""
    sequences: int | None = None
    """How many of them, neighbours, share a sequence; None: as the configuration says."""
    init: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of infinity.Init that say so."""
    by: str = "torch.distributed"
    """What has said so."""

    @property
    def rank(self) -> int:
        """This process's number among those that share data."""
        return self.data.index(rank())

    def check(self, engine: Engine) -> None:
        """See that a model was built for these ranks. Raises: ConfigError, with both."""
        found = engine.ranks.members
        if found != list(self.data):
            raise ConfigError(
                f"{self.by} says that the ranks {list(self.data)} share the model's data, and it was built "
                f"for the ranks {found}: give zero.Init what initialize is given (config, mpu=..., "
                "mesh_param=...), or build it in infinity.Init with the same groups"
            )


def divided(mpu: Any = None, mesh_param: Any = None, data_group: Any = None) -> Divided | None:
    """Return how a script's arguments divide the ranks; None where they say nothing. Every rank calls it.

    Raises: ConfigError for ranks that cannot be divided so, and for two that say it; UnsupportedError for an
    mpu without groups.
    """
    given = {"mpu": mpu, "mesh_param": mesh_param or None, "data_parallel_group": data_group}
    said = [name for name, one in given.items() if one is not None]
    if len(said) > 1:
        raise ConfigError(f"{' and '.join(said)}: each says which ranks share data; give one of them")
    if not said:
        return None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        init_distributed()
    if mpu is not None:
        return _by_mpu(mpu)
    if data_group is not None:
        return Divided(_members(data_group), init={"process_group": data_group}, by="data_parallel_group")
    return _by_mesh(mesh_param) if hasattr(mesh_param, "mesh_dim_names") else _by_sizes(mesh_param)


def by_configuration(said: Divided | None, settings: Settings, *, builds: bool) -> Divided:
    """Return how the ranks are divided: as `said`, else as the configuration has it. builds: whether a model
    is built, for which tensor_parallel.autotp_size makes a mesh.

    Raises: ConfigError where both say it.
    """
    size = settings.tensor_parallel
    if size == 1:
        return said or Divided(tuple(range(ranks())))
    if said is not None:
        raise ConfigError(
            f"tensor_parallel.autotp_size={size} and {said.by}: both say which ranks divide layers, or share "
            "data; give one of them. For tensor parallelism beside other groups: infinity.Init(mesh=..., "
            'data=...) and infinity.huggingface.tensor_parallel(model, mesh["tp"])'
        )
    init: dict[str, Any] = {}
    if builds:
        place = settings.config.device or "cpu"
        shape, names = (ranks() // size, size), ("data", "tensor")
        mesh = dist.device_mesh.init_device_mesh(place.partition(":")[0], shape, mesh_dim_names=names)
        init = {"mesh": mesh, "data": "data"}
    data = tuple(range(rank() % size, ranks(), size))
    return Divided(data, init=init, by="tensor_parallel.autotp_size")


def _by_sizes(sizes: Any) -> Divided:
    """Return what (data, sequences) says."""
    pair = tuple(sizes) if isinstance(sizes, list | tuple) else ()
    if len(pair) != 2 or any(not isinstance(one, int) or one < 1 for one in pair):
        raise ConfigError(
            f"mesh_param={sizes!r}: expected (data, sequences), how many sequences are trained at once and "
            'how many ranks share each, as in DeepSpeed; or a DeviceMesh with names, as ("data", "tensor")'
        )
    if pair[0] * pair[1] != ranks():
        raise ConfigError(
            f"mesh_param={sizes}: {pair[0]} sequences x {pair[1]} ranks that share each are "
            f"{pair[0] * pair[1]} ranks, and there are {ranks()}"
        )
    return Divided(tuple(range(ranks())), pair[1], by=f"mesh_param={pair}")


def _by_mesh(mesh: Any) -> Divided:
    """Return what a DeviceMesh says by the names of its dimensions."""
    names = tuple(mesh.mesh_dim_names or ())
    shared = [one for one in names if one in _NAMES_OF_SEQUENCES]
    data = tuple(one for one in names if one in _NAMES_OF_DATA or one in shared)
    found = data_of_mesh(mesh, data)
    sizes = {one: mesh.size(names.index(one)) for one in names}
    sequences = sizes[shared[0]] if shared else None
    if shared:
        _check_neighbours(_members(mesh.get_group(shared[0])), found.data)
    return Divided(found.data, sequences, {"mesh": mesh, "data": data}, f"mesh_param={sizes}")


def _by_mpu(mpu: Any) -> Divided:
    """Return what Megatron's groups say, or those of whatever has its functions."""
    data_group = _group(mpu, *reversed(_DATA))
    if data_group is None:
        raise UnsupportedError(
            f"mpu={mpu!r} has no get_data_parallel_group(): expected Megatron's functions, "
            f"{', '.join(f'get_{one}()' for one in (_DATA[0], _TENSOR[0], _STAGES[0]))}, which return groups "
            "of torch.distributed; of these the first is needed"
        )
    data, tensor, stages = _members(data_group), _group(mpu, *_TENSOR), _group(mpu, *_STAGES)
    init: dict[str, Any] = {"process_group": data_group}
    mine = (rank(),) if tensor is None else _members(tensor)
    if tensor is not None and (of_all := _of_all(mine, data_group)) != [(one,) for one in data]:
        init["process_group"] = data_of_groups(data, of_all, rank())
    if stages is not None and len(_members(stages)) > 1:
        init["pipeline_group"] = stages
    sequences = getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)()
    if sequences > 1:
        _check_neighbours(_members(mpu.get_sequence_parallel_group()), data)
    return Divided(data, sequences if sequences > 1 else None, init, "mpu")


def _group(mpu: Any, *names: str) -> Any:
    """Return the first of the groups with these names that an mpu has, or None."""
    for name in names:
        call = getattr(mpu, f"get_{name}", None)
        if callable(call) and (found := call()) is not None:
            return found
    return None


def _of_all(mine: tuple[int, ...], group: Any) -> list[tuple[int, ...]]:
    """Return what each rank of a group gives, in the order of ranks of the world."""
    rows: list[Any] = [None] * len(_members(group))
    dist.all_gather_object(rows, (rank(), mine), group=group)
    return [tuple(row) for _, row in sorted(rows)]


def _members(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _check_neighbours(sharers: Sequence[int], data: Sequence[int]) -> None:
    """See that the ranks that share a sequence are neighbours among those that share data.

    Raises: UnsupportedError.
    """
    size = len(sharers)
    rows = [tuple(data[first : first + size]) for first in range(0, len(data), size)]
    if tuple(sharers) not in rows:
        raise UnsupportedError(
            f"the ranks {list(sharers)} share a sequence, and are no neighbours among the ranks "
            f"{list(data)}, which share the model's data: make sequences the last dimension of these, as "
            "init_device_mesh(..., (data, sequences)) does"
        )

"""The dimensions of a DeviceMesh: those whose ranks share parameters and state, and those beside them.

[Note: a mesh]
`Init(mesh=mesh, data="dp")` says along which dimensions ranks have different data: they share the parameters,
as the ranks of a process_group do. Along the others, *beside* them, ranks have parts of the same tensors
(DTensors), or copies of them. What is one for the whole model is summed over all of them, and every element
counted once: the square of a parameter's gradient by the ranks that are first along each dimension on which
the parameter is replicated; these also write it to checkpoints. An overflow counts wherever it is.

[Note: marked parameters]
Megatron's layers divide a weight without DTensors: each rank has an ordinary parameter of its part, marked as
`tensor_model_parallel` (once `model_parallel`), with the `partition_dim` along which it is cut. Where an mpu
names the ranks that divide layers so, these marks are read: a marked parameter is cut along them, any other
is replicated. Such layers draw their parts by themselves, so that these ranks keep their own random numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash

from infinity.errors import ConfigError, UnsupportedError
from infinity.planning.boxes import Box, Range, Turns, by_turns, taken
from infinity.ranks.group import ALONE, Ranks
from infinity.ranks.groups import backend_of, placed
from infinity.ranks.places import Places
from infinity.tensors import digest, is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MARKS = ("tensor_model_parallel", "model_parallel")
_STRIDED = "_StridedShard"
_CURE = 'Init(mesh=mesh, data="dp") says along which dimensions of a DeviceMesh ranks have different data'


@dataclass(frozen=True, slots=True)
class DataOfMesh:
    """What Init is told of a mesh: the ranks of the world along its dimensions, seen from this one."""

    names: tuple[str, ...]
    """Of the dimensions beside the data's."""
    along: tuple[tuple[int, ...], ...]
    """For each of these, the ranks of the world that differ from this one along it alone."""
    data: tuple[int, ...]
    """The ranks that share data and state."""
    beside: tuple[int, ...]
    """The ranks that differ from this one along the other dimensions."""
    everyone: tuple[int, ...]
    """All ranks of the mesh."""
    marked: tuple[int, ...] = ()
    """The ranks along which parameters are cut that are marked so; see [Note: marked parameters]."""
    places: Places = field(default_factory=dict)
    """Where each of them is along the dimensions that have several ranks."""


def data_of_groups(data: Sequence[int], tensor_of: Sequence[Sequence[int]], rank: int) -> DataOfMesh:
    """Return what an mpu says of its ranks: those that share data, and for each of these those that divide
    its layers. rank: this process's, of the world.

    Raises: ConfigError for ranks that are no grid of both.
    """
    along = tuple(sorted(tensor_of[list(data).index(rank)]))
    everyone = sorted(one for row in tensor_of for one in row)
    alike = {len(row) for row in tensor_of} == {len(along)}
    if not alike or len({*everyone}) < len(everyone) or {*data} & {*along} != {rank}:
        raise ConfigError(
            f"mpu: the ranks {list(data)} share data, and divide layers with the ranks "
            f"{[list(row) for row in tensor_of]}: each of them needs as many, none of them twice, and none "
            "that shares its data"
        )
    places = {
        one: {"data": number, "tensor": sorted(row).index(one)}
        for number, row in enumerate(tensor_of)
        for one in row
    }
    groups = (along,), tuple(sorted(data)), along, tuple(everyone)
    return DataOfMesh(("tensor",), *groups, marked=along, places=places)


def data_of_mesh(mesh: DeviceMesh, data: str | Sequence[str] | None) -> DataOfMesh:
    """Return the ranks along the dimensions of `mesh`, of which those named by `data` share data.

    Raises: ConfigError for a mesh without names, for a name that it lacks, for one whose ranks do not ascend
    beside the data's dimensions, and where this rank is not in it.
    """
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if not names:
        raise ConfigError(
            f"mesh={mesh}: expected a DeviceMesh whose dimensions have names, as init_device_mesh(..., "
            'mesh_dim_names=("dp", "tp")) makes it'
        )
    if data is None:
        raise ConfigError(
            f"mesh has the dimensions {names}: say along which of them ranks have different data, "
            f"data={names[0]!r}, or a tuple of names; data=() if they all have the same"
        )
    chosen = (data,) if isinstance(data, str) else tuple(data)
    missing = [one for one in chosen if one not in names]
    if missing or len({*chosen}) < len(chosen):
        raise ConfigError(f"data={data!r}: the mesh has the dimensions {names}; name each one once")
    for number, name in enumerate(names):
        if name not in chosen and not _ascends(mesh, number):
            raise ConfigError(_descending(mesh, f"dimension {name!r}"))
    place = mesh.get_coordinate()
    if place is None:
        raise ConfigError(f"rank {dist.get_rank()} of the world is not in the mesh {mesh}")
    return _seen_from(mesh.mesh, place, names, chosen)


def _seen_from(
    ranks: torch.Tensor, place: Sequence[int], names: tuple[str, ...], chosen: tuple[str, ...]
) -> DataOfMesh:
    """Return the ranks along the dimensions of a mesh, seen from the rank at `place`."""

    def along(free: Sequence[str]) -> tuple[int, ...]:
        at = tuple(slice(None) if name in free else number for name, number in zip(names, place, strict=True))
        found: list[int] = ranks[at].reshape(-1).tolist()
        return tuple(sorted(found))

    others = tuple(one for one in names if one not in chosen)
    beside = tuple(along([one]) for one in others)
    places = {
        int(ranks[at]): {name: at[number] for number, name in enumerate(names) if ranks.shape[number] > 1}
        for at in itertools.product(*map(range, ranks.shape))
    }
    return DataOfMesh(others, beside, along(chosen), along(others), along(names), places=places)


class MeshRanks:
    """The ranks beside those that share an engine's data: see [Note: a mesh]; none where there is no mesh."""

    def __init__(self, of: DataOfMesh | None = None, ranks: Ranks = ALONE) -> None:
        """Know the ranks beside this one, which `ranks` connects."""
        self._of = of
        self.ranks = ranks

    @property
    def several(self) -> bool:
        """Whether there are ranks beside."""
        return self.ranks.size > 1

    @property
    def draws_alike(self) -> bool:
        """Whether the ranks beside draw the same values; see [Note: marked parameters]."""
        return self._of is None or not self._of.marked

    def totals(self, values: Sequence[float], what: str) -> list[float]:
        """Return the sums over the ranks beside, added in their order; each gives what `share` said."""
        if not self.several:
            return list(values)
        what = f"{what} over the mesh"
        self.ranks.agree(f"{what}, of {len(values)}")
        return self.ranks.totals(values, what)

    def totals_of(self, values: Sequence[float], of: Sequence[torch.Tensor], what: str) -> list[float]:
        """Return the sums, as `totals`, of what this rank has for each of the parameters `of`."""
        return self.totals([self.share(*pair) for pair in zip(values, of, strict=True)], what)

    def share(self, value: float, parameter: torch.Tensor) -> float:
        """Return what this rank adds to a sum for a parameter, of which it has `value`: nothing where another
        rank adds the same, unless it is not finite.
        """
        return value if self.counts(parameter) or not math.isfinite(value) else 0.0

    def counts(self, parameter: torch.Tensor) -> bool:
        """Whether this rank is the one, of those with copies of what it has of a parameter, that counts."""
        if self._of is None or not self.several:
            return True
        rank, cut = dist.get_rank(), self._cut(parameter)
        return all(members in cut or members[0] == rank for members in self._of.along)

    def same_copies(self, values: Sequence[torch.Tensor], of: Sequence[torch.Tensor], what: str) -> bool:
        """Whether the ranks beside that have copies of the same elements give the same local `values` for
        them, one tensor for each of the parameters `of`. All ranks call this.
        """
        if self._of is None or not self.several:
            return True
        mine = []
        for value, parameter in zip(values, of, strict=True):
            cut = self._cut(parameter)
            if all(len(members) == 1 or members in cut for members in self._of.along):
                continue  # no other rank has any of its elements
            places = [members.index(dist.get_rank()) for members in self._of.along if members in cut]
            mine += [xxhash.xxh3_64_intdigest(str(places).encode()) >> 1, digest(value)]
        if not mine:
            return True
        self.ranks.agree(what)
        rows = self.ranks.of_all(mine, what)
        columns = range(0, len(mine), 2)
        return all(
            len({(row[n], row[n + 1]) for row in rows}) == len({row[n] for row in rows}) for n in columns
        )

    def check(self, what: str, parameter: torch.Tensor) -> None:
        """Check a parameter that is a DTensor.

        Raises: UnsupportedError for one that is not of this mesh, or is placed as none can be kept.
        """
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        if self._of is None:
            raise UnsupportedError(
                f"{what} is a DTensor, as {placements} on {mesh}, and Init knows no mesh. {_CURE}"
            )
        for number, one in enumerate(placements):
            if one.is_partial():
                raise UnsupportedError(
                    f"{what} is a DTensor placed as {one} along dimension {number} of {mesh}: a parameter "
                    "is kept as Shard or Replicate. redistribute(placements=[Replicate()]) sums the parts"
                )
            if not _ascends(mesh, number):
                raise UnsupportedError(f"{what} is a DTensor: {_descending(mesh, f'dimension {number}')}")
            members = _members(mesh, number)
            if len(members) > 1 and members not in self._of.along:
                raise UnsupportedError(
                    f"{what} is a DTensor on {mesh}, whose dimension {number} has the ranks {list(members)} "
                    f"of the world, and beside its data's the mesh of Init has {self._described()}. All "
                    'parameters are on that mesh: give parallelize_module its dimension, such as mesh["tp"]; '
                    "along the data's dimensions Infinity divides them by itself"
                )

    def check_whole(self, what: str, cure: str) -> None:
        """Check that the ranks that share data have the whole model, as `what` needs.

        Raises: UnsupportedError where other ranks of the mesh have parts of it.
        """
        if self._of is not None and self.several:
            raise UnsupportedError(
                f"{what}: the model is on a mesh, whose ranks along {self._of.names} have parts of it as "
                f"DTensors. {cure}"
            )

    def is_cut(self, tensor: torch.Tensor) -> bool:
        """Whether ranks have different parts of a tensor, be this rank's the whole."""
        return any(len(members) > 1 for members in self._cut(tensor))

    def is_marked(self, tensor: torch.Tensor) -> bool:
        """Whether an ordinary tensor is a part, as it says; see [Note: marked parameters]."""
        if self._of is None or not self._of.marked or is_distributed(tensor):
            return False
        return any(bool(getattr(tensor, name, False)) for name in _MARKS)

    def check_unmarked(self, what: str, named: Iterable[tuple[str, torch.Tensor]], cure: str) -> None:
        """Check that no tensor is marked as a part. Raises: UnsupportedError naming the first that is."""
        for name, one in named:
            if self.is_marked(one):
                raise UnsupportedError(f"{what}: {name} is a part of a weight, as its layer marks it. {cure}")

    def _cut(self, parameter: torch.Tensor) -> set[tuple[int, ...]]:
        """Return the ranks along each dimension of a mesh along which a tensor is cut."""
        if not is_distributed(parameter):
            return {self._of.marked} if self._of is not None and self.is_marked(parameter) else set()
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        return {_members(mesh, number) for number, one in enumerate(placements) if not one.is_replicate()}

    def shape_of(self, tensor: torch.Tensor, what: str) -> tuple[int, ...]:
        """Return the shape of the whole of a tensor. Raises: UnsupportedError as `box_of`."""
        shape = list(tensor.shape)
        if self._of is not None and self.is_marked(tensor):
            shape[self._dimension(tensor, what)] *= len(self._of.marked)
        return tuple(shape)

    def box_of(self, parameter: torch.Tensor, what: str) -> Box:
        """Return which elements of the whole this process has of a tensor; of most that are no DTensors, all.

        Raises: UnsupportedError, naming `what`, where its elements here are no box of the whole.
        """
        if not is_distributed(parameter):
            first = [0] * parameter.ndim
            if self._of is not None and self.is_marked(parameter):
                dim = self._dimension(parameter, what)
                first[dim] = parameter.shape[dim] * self._of.marked.index(dist.get_rank())
            return Box(tuple(first), tuple(parameter.shape))
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        first, shape = [0] * parameter.ndim, list(parameter.shape)
        for number, one in enumerate(placements):
            if one.is_replicate():
                continue
            if type(one).__name__ != "Shard":
                raise UnsupportedError(
                    f"{what} is a DTensor placed as {placements}: what a rank has of it is no box of the "
                    "whole, which files could name. Shard and Replicate are saved and loaded"
                )
            if not _ascends(mesh, number):
                raise UnsupportedError(f"{what} is a DTensor: {_descending(mesh, f'dimension {number}')}")
            least = -(-shape[one.dim] // mesh.size(number))
            begin = min(shape[one.dim], least * mesh.get_local_rank(number))
            first[one.dim] += begin
            shape[one.dim] = min(least, shape[one.dim] - begin)
        return Box(tuple(first), tuple(shape))

    def turns_of(self, parameter: torch.Tensor, what: str, *, several: bool = True) -> Turns:
        """Return which elements of the whole this process has of a tensor, also where they are several boxes,
        as a part of fused weights is (_StridedShard). several: whether they may be.

        Raises: UnsupportedError as `box_of`.
        """
        if not several or not is_distributed(parameter):
            return Turns((self.box_of(parameter, what),))
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        if not any(type(one).__name__ == _STRIDED for one in placements):
            return Turns((self.box_of(parameter, what),))
        ranges: list[list[Range]] = [[(0, size)] for size in parameter.shape]
        for number, one in enumerate(placements):
            if one.is_replicate():
                continue
            if not _ascends(mesh, number):
                raise UnsupportedError(f"{what} is a DTensor: {_descending(mesh, f'dimension {number}')}")
            chunks, place = getattr(one, "split_factor", 1), (mesh.size(number), mesh.get_local_rank(number))
            found = taken(ranges[one.dim], chunks, *place) if hasattr(one, "dim") else None
            if found is None:
                raise _no_boxes(parameter, what)
            ranges[one.dim] = found
        if (turns := by_turns(ranges)) is None:
            raise _no_boxes(parameter, what)
        return turns

    def _dimension(self, tensor: torch.Tensor, what: str) -> int:
        """Return the dimension along which a marked tensor is cut. Raises: UnsupportedError."""
        dim, stride = getattr(tensor, "partition_dim", None), getattr(tensor, "partition_stride", 1)
        if not isinstance(dim, int) or not -tensor.ndim <= dim < tensor.ndim or stride != 1:
            raise UnsupportedError(
                f"{what} is marked as a part of a weight, with partition_dim={dim!r} and "
                f"partition_stride={stride!r}: which elements it has cannot be told, and files have whole "
                "weights. Give it the dimension along which it is cut, with a stride of 1"
            )
        return dim % tensor.ndim

    def _described(self) -> str:
        if self._of is None or not self._of.names:
            return "no dimension"
        pairs = zip(self._of.names, self._of.along, strict=True)
        return ", ".join(f"{name!r} of ranks {list(ranks)}" for name, ranks in pairs)


def _no_boxes(parameter: Any, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} is a DTensor of {tuple(parameter.shape)} placed as {parameter.placements}: what a rank has "
        "of it are no boxes of one shape, which files could name. Shard, Replicate, and _StridedShard whose "
        "chunks all ranks divide evenly are saved and loaded"
    )


def _ascends(mesh: DeviceMesh, number: int) -> bool:
    """Whether the ranks along a dimension of a mesh ascend, everywhere."""
    along = mesh.mesh.movedim(number, 0)
    return bool((along[1:] > along[:-1]).all())


def _descending(mesh: DeviceMesh, where: str) -> str:
    return (
        f"the mesh of ranks {mesh.mesh.tolist()} does not ascend along {where}. The groups of "
        "torch.distributed sort their ranks, so that the parts of a DTensor are not where the mesh says. "
        "Give the ranks in ascending order, as init_device_mesh does"
    )


def _members(mesh: DeviceMesh, number: int) -> tuple[int, ...]:
    """Return the ranks of the world that differ from this one along a dimension of a mesh alone."""
    return tuple(sorted(dist.get_process_group_ranks(mesh.get_group(number))))


def opened(members: Sequence[int], device: str, timeout_s: float) -> Ranks:
    """Connect these ranks of the world, of which this process is one."""
    number = list(members).index(dist.get_rank())
    return Ranks(members, number, backend_of(device), timeout_s, placed(device))


def open_mesh(of: DataOfMesh, device: str, timeout_s: float) -> tuple[Ranks, MeshRanks, Ranks]:
    """Connect the ranks that share data, those beside, and all of both. All divide their machine's memory."""
    ranks = opened(of.data, device, timeout_s)
    beside = opened(of.beside, device, timeout_s)
    if beside.size == 1:
        ranks.names.lie_at(of.places)
        return ranks, MeshRanks(of, beside), ranks
    everyone = opened(of.everyone, device, timeout_s) if ranks.size > 1 else beside
    for one in (ranks, beside, everyone):
        one.names.lie_at(of.places)
    everyone.prepare_as(ranks)
    ranks.share_machine(beside)
    if ranks.size > 1:
        ranks.closing.append(everyone.close)
    ranks.closing.append(beside.close)
    return ranks, MeshRanks(of, beside), everyone

"""The other stages of a pipeline, where an engine has one or some: what holds of all of them together.

[Note: stages]
Stages exchange activations by torch.distributed.pipelining, and nothing of their engines: each has
parameters,
NVMe and a plan of its own. What is one for all of them is said by `Init(pipeline_group=...)`, which names,
for
each rank, the ranks with the other stages: the norm of all gradients, whether any overflowed, and the
machine's
memory and drives. The ranks that share a stage have the same gradients, so each column of a mesh (data,
pipeline)
sums by itself, in the order of stages, and every parameter is counted once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from infinity.errors import ConfigError, UnsupportedError
from infinity.ranks.group import ALONE, Ranks, open_ranks
from infinity.ranks.mesh import DataOfMesh, MeshRanks, open_mesh, opened
from infinity.ranks.places import Place, with_stages
from infinity.ranks.taking_part import TakingPart
from infinity.units.pipelines import stage_that_runs

_CURE = (
    'Name the ranks that have the other stages, on every rank: Init(..., process_group=mesh["dp"], '
    'pipeline_group=mesh["pp"]).'
)


class Stages:
    """See [Note: stages]. A model that is whole is one stage."""

    def __init__(
        self,
        everyone: Ranks = ALONE,
        ranks: Ranks = ALONE,
        *,
        durable: bool = False,
        mesh: MeshRanks | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        """Know the stages that `ranks` connects, one of each. everyone: all that have a stage together: those
        that share its data and, on a mesh, those beside them. durable: whether steps are committed. mesh: the
        ranks that have parts of the same stage. timeout_s: how long to wait for what others say.
        """
        self.everyone = everyone
        self.mesh = mesh or MeshRanks()
        self._ranks, self._timeout_s = ranks, timeout_s
        self._all: Ranks | None = None
        self._training = TakingPart(ranks, timeout_s)
        """The ranks whose stages train anything: norms are theirs."""
        self._is_frozen: Callable[[], bool] = lambda: False
        self._durable = durable
        self._alone: str | None = None
        """What torch's pipelining said of a pipeline that no group names."""

    @property
    def several(self) -> bool:
        """Whether there are other stages."""
        return self._ranks.size > 1

    @property
    def in_pipeline(self) -> bool:
        """Whether there are other stages, known to this one or not."""
        return self.several or self._alone is not None

    def watch(self, is_frozen: Callable[[], bool]) -> None:
        """Ask `is_frozen`, once, whether this stage trains nothing."""
        self._is_frozen = is_frozen

    def look(self, _module: object) -> None:
        """A forward begins: say whether this stage trains anything, and see whether a pipeline runs it whose
        other stages are not known.

        Raises: UnsupportedError for a durable run, whose commits know one stage alone.
        """
        if self.several and not self._training.has_said and torch.is_grad_enabled():
            self._training.say(takes_part=not self._is_frozen())
        if self.several or self._alone is not None:
            return
        stage = stage_that_runs()
        if stage is not None and stage.group_size > 1:
            if self._durable:
                raise UnsupportedError(_NOT_DURABLE)
            self._alone = f"stage {stage.stage_index} of {stage.num_stages} on {stage.group_size} ranks"

    def each(self, value: float, what: str) -> list[float]:
        """Return a value of every rank's stage, in their order; 0 for one that trains nothing.

        Raises: UnsupportedError where there are stages that are not known; RanksError where they ask for
        different things.
        """
        if self._alone is not None:
            raise UnsupportedError(
                f"{what} over a pipeline: this engine knows its own parameters alone, and they are "
                f"{self._alone}. {_CURE}"
            )
        what = f"{what} over all stages"
        those = self._training.those(what)
        those.agree(what)  # a norm must not be taken for another's overflow
        own = [0.0] * self._ranks.size
        own[self._ranks.rank] = value
        return those.totals(own, what)

    def check(self, *, has_parameters: bool) -> None:
        """Check one of several stages, when it is built. Raises: ConfigError if it has no parameters."""
        if self.several and not has_parameters:
            raise ConfigError(
                f"stage {self._ranks.rank} of {self._ranks.size} in pipeline_group (rank {dist.get_rank()} "
                "of the "
                "world) has built no parameters in this Init. Build the modules of a rank's stages inside "
                "it, and "
                "cut the model so that each rank has some."
            )

    def all_ranks(self) -> Ranks:
        """Return the ranks of all stages, which are connected when this is first called, by all of them."""
        if not self.several:
            return self.everyone
        if self._all is None:
            known = self.everyone.names.places
            mine = json.dumps([[one, known.get(one, {})] for one in self.everyone.members]).encode()
            rows = self._ranks.each(mine, "find the ranks of all stages")
            places = {one: place for row in rows for one, place in json.loads(row)}
            self._all = opened(sorted(places), self._ranks.device, self._timeout_s)
            self._all.names.lie_at(places)
            self._ranks.closing.append(self._all.close)
        return self._all

    def share(self, folder: str | os.PathLike[str]) -> bool:
        """Whether all stages name one folder; else each has its own. Every rank of pipeline_group calls it.

        Raises: ConfigError, on all of them, where some do, and others do not.
        """
        path = os.path.realpath(folder)
        mine = xxhash.xxh3_64_intdigest(path.encode()) >> 1
        rows = self._ranks.of_all([mine], "compare folders of stages")
        same = [str(stage) for stage, row in enumerate(rows) if rows.count(row) > 1]
        if same and len(same) < len(rows):
            raise ConfigError(
                f"ranks {', '.join(same)} of pipeline_group name one folder (this one {path}), and others do "
                "not. Give all stages the same folder, or every stage one of its own"
            )
        return bool(same)

    @property
    def ranks(self) -> Ranks:
        """The ranks with the other stages, this one among them."""
        return self._ranks


_NOT_DURABLE = (
    "durable=True with a pipeline: the ranks of one stage commit their steps, and others might be a step "
    "ahead after "
    "a crash. Leave it out, and call infinity.save on every rank, with a folder for each stage."
)


def open_with_stages(
    process_group: Any, pipeline_group: Any, device: str, timeout_s: float, *, durable: bool
) -> tuple[Ranks, Stages]:
    """Connect the ranks that share an engine's parameters, and those that have the other stages of a
    pipeline;
    without a process_group each rank has its stages for itself. They divide their machine's memory and
    drives. process_group: also a DataOfMesh, whose other ranks are connected as well.

    Raises: ConfigError for groups that do not cross in this rank alone, and for durable runs of several
    stages.
    """
    if isinstance(process_group, DataOfMesh):
        return _open_with_mesh(process_group, pipeline_group, device, timeout_s, durable=durable)
    if pipeline_group is None:
        ranks = open_ranks(process_group, device, timeout_s)
        return ranks, Stages(ranks, durable=durable)
    if process_group is not None:
        ranks = open_ranks(process_group, device, timeout_s)
        others = open_ranks(pipeline_group, device, timeout_s)
        both = sorted({*ranks.members} & {*others.members})
        wrong = (
            f"process_group and pipeline_group have ranks {both} in common. process_group is of the ranks "
            "that "
            'share a stage (mesh["dp"]), pipeline_group of one rank of each stage (mesh["pp"])'
        ) * (len(both) > 1)
    else:
        others = open_ranks(pipeline_group, device, timeout_s)
        ranks = others.some([others.rank])
        world = dist.get_world_size() if dist.is_initialized() else 1
        wrong = (
            f"pipeline_group has {others.size} of {world} ranks: say which ranks share this stage, too, by "
            'process_group=mesh["dp"]'
        ) * (others.size < world)
    _keep_open(ranks, others, wrong, durable=durable)
    dimension = (getattr(process_group, "mesh_dim_names", None) or ["data"])[0]
    data = {one: {dimension: at} for at, one in enumerate(ranks.members) if ranks.size > 1}
    _place(data, ranks, others)
    return ranks, Stages(ranks, others, durable=durable, timeout_s=timeout_s)


def _open_with_mesh(
    of: DataOfMesh, pipeline_group: Any, device: str, timeout_s: float, *, durable: bool
) -> tuple[Ranks, Stages]:
    """Connect the ranks of a mesh, and those that have the other stages of a pipeline, if there is one."""
    ranks, mesh, everyone = open_mesh(of, device, timeout_s)
    if pipeline_group is None:
        return ranks, Stages(everyone, durable=durable, mesh=mesh)
    others = open_ranks(pipeline_group, device, timeout_s)
    both = sorted({*of.everyone} & {*others.members})
    wrong = (
        f"mesh and pipeline_group have ranks {both} in common. mesh is of the ranks that share a stage "
        '(mesh["dp", "tp"]), pipeline_group of one rank of each stage (mesh["pp"])'
    ) * (len(both) > 1)
    _keep_open(ranks, others, wrong, durable=durable)
    _place(of.places, ranks, others, everyone, mesh.ranks)
    return ranks, Stages(everyone, others, durable=durable, mesh=mesh, timeout_s=timeout_s)


def _place(places: Mapping[int, Place], ranks: Ranks, others: Ranks, *more: Ranks) -> None:
    """Note where the ranks of one stage are, `places` but for the stage, and those with the others."""
    if others.size > 1:
        places = with_stages(places, others.members[others.rank], others.members)
    for one in (ranks, others, *more):
        one.names.lie_at(places)


def _keep_open(ranks: Ranks, others: Ranks, wrong: str, *, durable: bool) -> None:
    """Let the connection to the other stages end with that of `ranks`.

    Raises: ConfigError if something is `wrong`, or the stages of a durable run are several; both are closed.
    """
    if wrong or (durable and others.size > 1):
        ranks.close()
        others.close()
        raise ConfigError(wrong or _NOT_DURABLE)
    ranks.share_machine(others)
    ranks.closing.append(others.close)

"""Init: builds a model of any size without holding all of it in memory; construction says how."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from infinity.activations.partitioned import CopyHolders
from infinity.config.settings import Config, check_fields
from infinity.engine.construction import Construction
from infinity.engine.engine import Engine, Groups
from infinity.engine.hybrid import hybrid
from infinity.engine.pretrained import loading_in_order
from infinity.engine.quantized import leaving_packed
from infinity.engine.recomputation import keep_to_budget
from infinity.engine.refused import check_adapters
from infinity.engine.scripting import refusing_scripts
from infinity.engine.sequences import models_of_transformers, sequence_parallel
from infinity.engine.slices import cut_activations
from infinity.errors import ConfigError, UnsupportedError
from infinity.ranks.group import Ranks
from infinity.ranks.mesh import DataOfMesh, data_of_mesh
from infinity.tensors import as_bytes, digest


@contextlib.contextmanager
def _drawing_as_rank_0(ranks: Ranks) -> Iterator[None]:
    """Give every rank the random numbers of rank 0 (torch's, of the CPU), then its own again."""
    own = torch.get_rng_state()
    if ranks.same(digest(own), "compare seeds"):
        yield
        return
    state = bytes(as_bytes(own))
    torch.set_rng_state(torch.frombuffer(bytearray(ranks.first(state, "compare seeds")), dtype=torch.uint8))
    try:
        yield
    finally:
        if ranks.rank:
            torch.set_rng_state(own)


def _divide_sequences(models: Iterable[nn.Module]) -> None:
    """Divide the sequences of the models that are transformers', as Config(sequence_parallel=...) says.

    Raises: ConfigError if there is none.
    """
    found = models_of_transformers(models)
    if not found:
        raise ConfigError(
            "sequence_parallel: no model of transformers was built inside this Init; leave it out"
        )
    for model in found:
        sequence_parallel(model)


def _data_of(mesh: Any, data: str | Sequence[str] | None, process_group: Any, config: Config) -> Any:
    """Return which ranks share data. Raises: ConfigError for arguments that do not go together;
    UnsupportedError for layers that would be cut before they are made DTensors.
    """
    if mesh is None and data is None and not isinstance(process_group, DataOfMesh):
        return process_group
    if isinstance(process_group, DataOfMesh) and mesh is None and data is None:
        found = process_group
    elif mesh is None or process_group is not None:
        raise ConfigError(
            f"Init(data={data!r}) goes with mesh=..., a DeviceMesh, and without process_group, whose place "
            "they take"
        )
    else:
        found = data_of_mesh(mesh, data)
    if config.tile_nbytes is not None and len(found.beside) > 1:
        raise UnsupportedError(
            f"tile_above={config.tile_above!r} with a mesh, whose ranks along {found.names} have parts of "
            "the layers: layers in slices cannot be made DTensors. Leave tile_above out: each rank has its "
            "part alone, and more ranks of tensor parallelism make it smaller"
        )
    return found


def _copies_of(process_group: Any, copies: Any, config: Config) -> CopyHolders | None:
    """Return which ranks have copies of the same activations; None for none. On a mesh those beside each
    other are taken by themselves, but where a budget decides what blocks keep.

    Raises: ConfigError for True without a mesh.
    """
    on_mesh = isinstance(process_group, DataOfMesh)
    if copies is True and not on_mesh:
        raise ConfigError(
            "Init(partition_activations=True) takes the ranks of a mesh that have the same data: give "
            "mesh=mesh, data=..., or the ranks, as a group of torch.distributed"
        )
    if copies is None:
        return CopyHolders(asked=False) if on_mesh and config.activation_memory is None else None
    if copies is False:
        return None
    return CopyHolders(None if copies is True else copies)


class Init:
    """Build the models inside the `with` partitioned and placed: the whole never exists in host memory.

    config: a Config, or its fields as keywords: Init(nvme="/local_nvme", host_memory="4GiB").
    process_group: the ranks that share the model, as a group of torch.distributed or a DeviceMesh of one
    dimension, or of two whose names have "replicate" and "shard" in them (see secondary_shard); None: all
    ranks of the run. Each of them builds the same model, from the random numbers of rank 0, whatever its own
    seed; after the `with` it goes on with its own.
    partition_activations: the ranks that compute on copies of the same activations, as those of tensor
    parallelism do (a group or a DeviceMesh likewise): each keeps a part of what a checkpointed block saves,
    and they gather it when the backward takes it. None: those of `mesh` beside the ones with other data, as
    far as they are seen to have copies, and without activation_memory; True: those, or an error; False: none.
    pipeline_group: where the model is a stage, or some stages, of a pipeline of
    torch.distributed.pipelining, one
    rank of each stage (a group or a DeviceMesh likewise): norms are of all stages' gradients, and the stages
    divide the machine's host_memory and drives. Without a process_group each rank has its stages for itself.
    mesh, data: a DeviceMesh, and which of its dimensions, one name or several, are those along which ranks
    have different data, in the place of a process_group; data=() for none. Along the others ranks have parts
    of the same parameters, which are DTensors (tensor parallelism), or copies of them: norms, overflows and
    the machine's memory are of all.
    frozen: weights that are loaded into a model without values, as by from_pretrained, get
    requires_grad=False. What is built beside them, as PEFT's adapters are, trains as ever, and so does what
    the checkpoint lacks, such as a new head. On the CPU memory for updates under way is small, and keeps more
    of the weights: for training all of them, load without it.

    Weights that from_pretrained takes from safetensors files, in the type that computes, stay in these files:
    nothing is copied, and each is read from there when it is used. They get records of their own when an
    optimizer is made that trains them, or when they are written to.

    ::

        with infinity.Init(config):
            model = LlamaForCausalLM(llama_config)  # or LlamaForCausalLM.from_pretrained(folder)

    Raises: ConfigError, HostMemoryError, or an OSError naming the path, on entering; after an error inside
    the `with`, its memory and files are given back.
    """

    _active: Init | None = None

    def __init__(
        self,
        config: Config | None = None,
        *,
        process_group: Any = None,
        partition_activations: Any = None,
        pipeline_group: Any = None,
        mesh: Any = None,
        data: str | Sequence[str] | None = None,
        frozen: bool = False,
        **fields: Any,
    ) -> None:
        """Check the settings."""
        if config is not None and fields:
            raise ConfigError("Init takes a Config or its fields, not both")
        own = ("config", "process_group", "partition_activations", "pipeline_group", "mesh", "data", "frozen")
        check_fields(fields, own)
        self.config = config if config is not None else Config(**fields)
        process_group, self.config = hybrid(process_group, self.config)
        self._process_group = _data_of(mesh, data, process_group, self.config)
        self._copies = _copies_of(self._process_group, partition_activations, self.config)
        self._pipeline_group = pipeline_group
        self._frozen = frozen
        self._engine: Engine | None = None
        self._construction: Construction | None = None
        self._hooks: list[Any] = []
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> Init:  # noqa: PYI034 - Self is of Python 3.11
        """Open the engine and listen to registrations."""
        if Init._active is not None:
            raise UnsupportedError(
                "Init inside another Init: build models one after the other, and "
                "call initialize() after the `with`"
            )
        groups = Groups(self._process_group, self._copies, self._pipeline_group)
        self._engine = Engine(self.config, groups, frozen=self._frozen)
        construction = self._construction = Construction(self._engine, frozen=self._frozen)
        self._engine.build_with(construction.touch)
        self._hooks = [
            # A hook may return what is registered instead, whatever torch's annotation says.
            register_module_parameter_registration_hook(cast("Any", construction.registered)),
            register_module_module_registration_hook(cast("Any", construction.adopted)),
        ]
        self._contexts.enter_context(loading_in_order())
        see_to_packed = self._contexts.enter_context(leaving_packed(construction.offered))
        construction.before_loading(see_to_packed)
        self._contexts.enter_context(refusing_scripts())
        mesh = self._engine.stages.mesh
        if mesh.draws_alike:
            self._contexts.enter_context(_drawing_as_rank_0(mesh.ranks))
        self._contexts.enter_context(_drawing_as_rank_0(self._engine.ranks))
        self._contexts.enter_context(construction.asked)
        Init._active = self
        return self

    @property
    def engine(self) -> Engine | None:
        """What will keep the models; None outside the `with`."""
        return self._engine

    @property
    def models(self) -> list[nn.Module]:
        """The models so far, none in another; none outside the `with`."""
        return [] if self._construction is None else self._construction.models()

    def take_in(self, model: nn.Module) -> None:
        """Take charge of a model that was built before, in memory. Inside the `with`."""
        if self._construction is None:
            raise UnsupportedError("take_in outside of `with infinity.Init(...) as init:`")
        if self.config.tile_nbytes is not None:
            raise UnsupportedError("tile_above: layers that exist are not cut; build the model inside Init")
        self._construction.take_in(model)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hand the finished models over; after an error give everything back."""
        Init._active = None
        self._contexts.close()
        for hook in self._hooks:
            hook.remove()
        engine, construction = self._engine, self._construction
        self._engine = self._construction = None
        if engine is None or construction is None:
            return
        try:
            if error is None:
                stages = engine.stages
                with stages.ranks.together("building the stages"), stages.mesh.ranks.together("building"):
                    models = construction.finish()
                    check_adapters(models, engine.stages.mesh)
                    engine.stages.check(has_parameters=bool(engine.units))
                    if self.config.sequence_parallel > 1:
                        _divide_sequences(models)
                    keep_to_budget(engine, models)
                    cut_activations(engine, models)
        except BaseException:
            engine.close()
            raise
        if error is not None:
            stages = engine.stages
            for ranks in (engine.ranks, stages.mesh.ranks, stages.everyone, stages.ranks):  # they meet
                ranks.post_failure(f"{type(error).__name__}: {error}")
            engine.close()
            construction.failed(error)

"""The tensors of a model and its optimizer that a checkpoint has to hold, by kind and name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.kinds import KINDS, behind, first_of, shape_of
from infinity.checkpoint.stacks import Stacks
from infinity.engine.engine import Engine, engine_of, engine_of_model
from infinity.errors import UnsupportedError
from infinity.optim.base import OffloadedOptimizer
from infinity.optim.ownership import check_current
from infinity.planning.boxes import Turns, all_of
from infinity.planning.layout import STATE_BLOCK, Segment
from infinity.storage.manifest import MASTER, PLAIN, MeshPlace, TensorSpec
from infinity.tensors import local, name_of_dtype
from infinity.units.unit import Unit

REPLACED = "(replaced)"
"""The name of a parameter that was replaced, and is in no model any more; see init."""

_TYPES = {
    "fp32": {"m": "F32", "v": "F32"},
    "bf16": {"m": "BF16", "v": "BF16"},
    "int8": {"m": "U8", "v": "U8", "scale": "F32"},
    "int4": {"m4": "U8", "v4": "U8", "mv": "U8", "scale": "F32"},
}


class Inventory:
    """A model's offloaded parameters by unit, its other tensors by name, and its optimizer's state."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OffloadedOptimizer | None,
        *,
        by_name: bool = True,
        by_turns: bool = True,
    ) -> None:
        """Take stock of a model built in Init. by_name: for files that have whole tensors by their names, of
        which this rank may have a box; by_turns: or several boxes, by turns.

        Raises: ValueError for a model that was not, and for parameters of `optimizer` that are not in it;
        UnsupportedError for a module with extra state, or an incomplete model; TypeError for another kind of
        optimizer.
        """
        if optimizer is not None and not isinstance(optimizer, OffloadedOptimizer):
            raise TypeError(
                f"expected an optimizer of infinity (AdamW, ...), or None, got {type(optimizer).__name__}; "
                "save one of torch's optimizers by its state_dict()"
            )
        self.optimizer = optimizer
        self._by_name, self._by_turns = by_name, by_turns
        self.engine = engine_of_model(model)
        self._mesh = self.engine.stages.mesh
        self.ranks = self.engine.stages.everyone
        """All that save and load together: of a mesh, those of all its dimensions."""
        self._stage, self._stages = 0, 1
        self.stacks = Stacks(model, blocks=self.engine.schema.in_blocks)
        """Which parameters are slices, and of what, in checkpoints: with moments in blocks, slices have to be
        whole blocks.
        """
        self.stacks_of_weights = Stacks(model, blocks=False)
        """The same in files of weights alone, or of moments as plain numbers."""
        self.names: dict[int, str] = {}
        """Names of offloaded parameters, by the parameters' id()."""
        self._turns: dict[str, Turns] = {}
        """Which elements this rank has of the tensors that are cut along dimensions of a mesh, by name."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Of the wholes of these."""
        self.plain: dict[str, torch.Tensor] = {}
        """Persistent buffers and ordinary parameters."""
        self._engines: dict[Unit, Engine] = {}
        for name, parameter in model.named_parameters():
            engine = engine_of(parameter)
            if engine is None:
                self.plain[name] = parameter
            else:
                self.names[id(parameter)] = name
                self._engines[engine.parameters.unit_of(parameter)[0]] = engine
            self._place(name, parameter)
        self._take_buffers(model)
        self._check_units()
        self._check_optimizer()

    def _take_buffers(self, model: nn.Module) -> None:
        known = {id(tensor) for tensor in self.plain.values()}
        for prefix, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise UnsupportedError(
                    f"{prefix or type(module).__name__} has extra state of its own (get_extra_state): "
                    "pass it to save as extra=, and set it again after load"
                )
            fleeting = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public name for it
            for name, buffer in module.named_buffers(recurse=False):
                if name in fleeting or id(buffer) in known:
                    continue
                known.add(id(buffer))
                full = f"{prefix}.{name}" if prefix else name
                self.plain[full] = buffer
                self._place(full, buffer)

    def _place(self, name: str, tensor: torch.Tensor) -> None:
        """Note which elements of a tensor this rank has.

        Raises: UnsupportedError for those of a DTensor that files could not name.
        """
        if not (self._by_name and self._mesh.is_cut(tensor)):
            return
        turns = self._mesh.turns_of(tensor, name, several=self._by_turns)
        shape = self._mesh.shape_of(tensor, name)
        if turns.boxes != (all_of(shape),):
            self._turns[name], self._shapes[name] = turns, shape
        # Alike on all ranks, also where one has all of a small tensor.
        if name in self.stacks.places:
            raise UnsupportedError(
                f"{name} is a DTensor, and a slice of {self.stacks.name(name)}, which files have whole: save "
                "model.state_dict(), which has DTensors, with torch.distributed.checkpoint"
            )
        state_dtype = self.engine.schema.state_dtype
        if self.engine.schema.in_blocks and self.optimizer is not None:
            raise UnsupportedError(
                f"{name} is a DTensor of which each rank has a part, and {state_dtype=} keeps moments in "
                f"blocks of {STATE_BLOCK} elements of that part, which another mesh divides otherwise. Use "
                "state_dtype='bf16', or save the weights alone, with optimizer=None"
            )

    def check_unmarked(self, what: str) -> None:
        """See that no tensor is marked as a part, which `what` cannot have. Raises: UnsupportedError."""
        tensors = {
            self.names[id(one)]: one
            for unit in self._engines
            for one in unit.parameters
            if id(one) in self.names
        } | self.plain
        self._mesh.check_unmarked(what, tensors.items(), "infinity.save and infinity.load have it whole")

    def _whole(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of the whole of a tensor."""
        return self._shapes.get(name) or tuple(tensor.shape)

    def join_stages(self) -> None:
        """Save and load with all ranks of all stages of a pipeline. Each of them calls this."""
        stages = self.engine.stages
        self.ranks, self._stage, self._stages = stages.all_ranks(), stages.ranks.rank, stages.ranks.size

    def turns(self, name: str) -> Turns | None:
        """Return which elements this rank has of a tensor; None for all."""
        return self._turns.get(name)

    def runs(self, name: str, start: int, stop: int) -> Iterable[tuple[int, int, int]]:
        """Return the consecutive elements of a tensor that elements [start, stop) of this rank's are: (first
        in the whole, first of these, number).
        """
        turns = self.turns(name)
        if turns is None:
            return [(start, 0, stop - start)]
        return turns.runs(self._shapes[name], start, stop)

    @property
    def place(self) -> MeshPlace:
        """This rank's place among those that save and load together."""
        beside = self._mesh.ranks
        at = self._stage * beside.size + beside.rank
        return MeshPlace(self.engine.ranks.rank, at, self._stages * beside.size)

    def _check_units(self) -> None:
        for unit in self._engines:
            for segment, parameter in zip(unit.layout.segments, unit.parameters, strict=True):
                if id(parameter) not in self.names and segment.name != REPLACED:
                    raise UnsupportedError(
                        f"{unit.name} has a parameter, {segment.name}, that is not in this model: save "
                        "and load the whole model"
                    )

    def _check_optimizer(self) -> None:
        if self.optimizer is not None:
            check_current(self.optimizer, "saving, or loading, the state")
        for group in self.groups:
            for parameter in group["params"]:
                if id(parameter) not in self.names:
                    shape = tuple(parameter.shape)
                    raise ValueError(
                        f"the optimizer has a parameter of shape {shape} that is not in the model"
                    )

    def units(self) -> Iterator[tuple[Engine, Unit]]:
        """Yield the units, each with its engine, in the order of the model."""
        for unit, engine in self._engines.items():
            yield engine, unit

    def names_in(self, unit: Unit) -> list[str | None]:
        """Return the names of a unit's parameters; None for a replaced one."""
        return [self.names.get(id(parameter)) for parameter in unit.parameters]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups."""
        return self.optimizer.param_groups if self.optimizer is not None else []

    @property
    def group_names(self) -> list[list[str]]:
        """The names of the parameters in each param group."""
        return [[self.names[id(one)] for one in group["params"]] for group in self.groups]

    @property
    def steps(self) -> dict[str, int]:
        """The number of updates of each parameter that had any; the others have no moments."""
        state = self.optimizer.counts if self.optimizer is not None else {}
        return {self.names[id(one)]: int(kept["step"]) for one, kept in state.items() if kept.get("step")}

    @property
    def groups_in_files(self) -> list[list[str]]:
        """The names in files of the parameters in each param group."""
        return list(map(self.stacks.names, self.group_names))

    def name_in_files(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name in files: for a slice its stack's."""
        return self.stacks.name(self.names[id(parameter)])

    # Dtypes and shapes

    def masters(self) -> dict[str, TensorSpec]:
        """Return the specs of all offloaded parameters' masters, by name."""
        return {
            name: ("F32", self._whole(name, parameter))
            for _, unit in self.units()
            for parameter, name in zip(unit.parameters, self.names_in(unit), strict=True)
            if name is not None
        }

    def plains(self) -> dict[str, TensorSpec]:
        """Return the specs of all other tensors, by name."""
        return {name: (name_of_dtype(one, name), self._whole(name, one)) for name, one in self.plain.items()}

    def fields_in(self, unit: Unit) -> tuple[str, ...]:
        """Return the fields of the optimizer's state in a unit's record."""
        found = {field for one in unit.parameters for field in self._types(unit, one)}
        return tuple(name for name in unit.record.schema.moments if name in found)

    def _types(self, unit: Unit, parameter: torch.Tensor) -> dict[str, str]:
        """Return the fields of a parameter's state, with their types in files."""
        optimizer, schema = self.optimizer, unit.record.schema
        if optimizer is None:
            return {}
        recipe = optimizer.recipe_of(parameter) if id(parameter) in optimizer.mine else optimizer.recipe
        return {field: _TYPES[schema.state_dtype][field] for field in recipe.fields(schema)}

    def moments(self, names: set[str]) -> dict[tuple[str, str], TensorSpec]:
        """Return the specs of these parameters' moments, by kind and name; they are there after a step."""
        found: dict[tuple[str, str], TensorSpec] = {}
        for _, unit in self.units():
            for parameter, name in zip(unit.parameters, self.names_in(unit), strict=True):
                if name is None or name not in names:
                    continue
                shape = self._whole(name, parameter)
                for field, dtype in self._types(unit, parameter).items():
                    found[KINDS[field], name] = dtype, shape_of(KINDS[field], shape)
        return found

    def held(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return the elements [start, stop) that this rank has of masters and moments, by kind and name, and
        of other tensors, which the first of the ranks that have the same has for all of them. Of what is cut
        along dimensions of a mesh they are elements of its box; of copies along these one rank has them.
        """
        first = self.engine.ranks.rank == 0
        found = {
            (PLAIN, name): (0, local(one).numel())
            for name, one in self.plain.items()
            if first and self._mesh.counts(one)
        }
        for _, unit in self.units():
            shard = zip(unit.parameters, unit.record.shard.segments, self.names_in(unit), strict=True)
            for parameter, segment, name in shard:
                if name is not None and self._mesh.counts(parameter):
                    for field in ("master", *self._types(unit, parameter)):
                        kind = KINDS.get(field, MASTER)
                        found[kind, name] = range_of(kind, segment)
        return found


def range_of(kind: str, segment: Segment) -> tuple[int, int]:
    """Return the elements [start, stop) of a tensor in files in this rank's part of a parameter."""
    start, stop = segment.first, segment.first + segment.numel
    return first_of(kind, start), behind(kind, stop) if segment.numel else 0

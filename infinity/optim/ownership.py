"""Which optimizer a parameter belongs to: the one that was made last.

[Note: superseded]
In plain PyTorch several optimizers may have the same parameters, each with moments of its own. Here a record
has one set of moments, beside the weights. So a new optimizer for another's parameters (as when a notebook's
cell is run again) takes them over: updates that the earlier one has decided stay, moments and step counts
begin anew, as for every new optimizer, and the earlier one's step() raises, since it would use moments that
are not its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.aio import StorageFullError
from infinity.deprecation import users_stacklevel
from infinity.engine.engine import Engine, engine_of
from infinity.errors import UnsupportedError
from infinity.optim.checks import check_fits
from infinity.records.update_rules import Recipe
from infinity.sizes import format_size
from infinity.storage.full_disk import of_whole
from infinity.tensors import spread_as
from infinity.units.fused_updates import is_fused


def engine_for(parameter: nn.Parameter) -> Engine:
    """Return the engine of a parameter that is given to an optimizer.

    Raises: ValueError for one that was not built in Init; UnsupportedError while its model is being built.
    """
    engine, what = engine_of(parameter), f"a parameter of shape {tuple(parameter.shape)}"
    if engine is None and not (parameter.is_floating_point() or parameter.is_complex()):
        raise ValueError(
            f"{what} is {parameter.dtype}: it has no gradient, and is not offloaded. Give the optimizer "
            "trainable parameters alone: [p for p in model.parameters() if p.is_floating_point()]"
        )
    if engine is None:
        raise ValueError(
            f"{what} was not built inside `with infinity.Init(config):`. Build the whole "
            "model there, or give ordinary parameters to one of torch's optimizers."
        )
    if engine.is_building:
        raise UnsupportedError(
            "an optimizer inside `with infinity.Init(...)`, where its model is still being built: make it "
            "after the `with`"
        )
    return engine


def check_current(optimizer: Owning, what: str) -> None:
    """Check that no later optimizer has taken an optimizer's parameters over. what: the call, for the error.

    Raises: UnsupportedError if one has.
    """
    if optimizer.superseded:
        raise UnsupportedError(
            f"{what} of a superseded {type(optimizer).__name__}: a later optimizer was made for its "
            f"parameters ({optimizer.superseded}), and has set their moments to zero. Use the later one, "
            "with schedulers made for it; if several optimizers train parts of a model, give each its own "
            "parameters."
        )


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """A parameter's engine, and its place in the optimizer."""

    engine: Engine
    position: int  # in the order in which parameters were added
    group: int


class Owning:
    """The part of an optimizer that knows its parameters, and allocates room for their state.

    Attributes:
        mine: its parameters' places, by the parameters' id().
        superseded: names of parameters that a later optimizer has taken over, for errors; "" for none.
    """

    recipe: Recipe
    param_groups: list[dict[str, Any]]
    mine: dict[int, ParameterPlace]
    superseded: str
    _begun: set[int]
    _rooms: dict[int, tuple[str, ...]]
    """By the parameter's id(), the fields of its record when room was made last: nothing is to be done while
    the record has these very fields.
    """

    def own_nothing(self) -> None:
        """Start without parameters."""
        self.mine, self.superseded = {}, ""
        self._engines: dict[int, Engine] = {}
        self._begun = set()
        self._rooms = {}
        self._applied: set[int] = set()
        self._made = False

    def recipe_in(self, group: dict[str, Any]) -> Recipe:
        """Return the update rule of a param group."""
        del group
        return self.recipe

    def recipe_of(self, parameter: torch.Tensor) -> Recipe:
        """Return the update rule of one of its parameters."""
        return self.recipe_in(self.param_groups[self.mine[id(parameter)].group])

    @property
    def steps_on_device(self) -> bool:
        """Whether it can make all of its steps on an accelerator."""
        return all(self.recipe_in(group).tensors is not None for group in self.param_groups)

    def needs_scratch(self, device: torch.device) -> bool:
        """Whether its steps on a device need memory for intermediate values there."""
        steps = [self.recipe_in(group).tensors for group in self.param_groups]
        return not all(is_fused(one, device, torch.float32) for one in steps)

    @property
    def engines(self) -> list[Engine]:
        """The engines that keep its parameters."""
        return list(self._engines.values())

    @property
    def has_applied(self) -> bool:
        """Whether it has applied gradients in a backward since the last step()."""
        return bool(self._applied)

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make room for the state of parameters, and join their engines.

        An optimizer that is being made takes over other optimizers' parameters: [Note: superseded].

        Raises: ValueError for a parameter of another optimizer, if this one is already made.
        """
        if self._made:
            _refuse_taken(self, parameters)
        trained = [one for one in parameters if one.requires_grad]
        for engine in {self.mine[id(one)].engine for one in parameters}:
            ours = [one for one in trained if self.mine[id(one)].engine is engine]
            check_fits(engine, type(self).__name__, self._missing_nbytes(ours))
            if not self.steps_on_device and engine.pins is not None:
                engine.pins.records_leave_for_good()
            self._make_own(engine, ours)
            self._add_all_fields(engine, ours)
        if not self._made:
            _supersede(self, parameters)
        for parameter in parameters:
            engine = self.mine[id(parameter)].engine
            self._engines[id(engine)] = engine
            engine.arrivals.join(self)
            unit, index = engine.parameters.unit_of(parameter)
            unit.record.keep_moments(index, self.recipe_of(parameter).state)
            if parameter.requires_grad:
                self.make_room(engine, parameter)
        self._made = True

    def make_room(self, engine: Engine, parameter: nn.Parameter) -> None:
        """Make room for the parameter's state; the first time, set the state to zero."""
        record = engine.parameters.unit_of(parameter)[0].record
        if self._rooms.get(id(parameter)) is record.fields:
            return
        self._make_own(engine, [parameter])
        if self._missing(parameter):
            self._add_fields(parameter)
        if id(parameter) not in self._begun:
            self._begun.add(id(parameter))
            self._forget(engine, parameter)
        self._rooms[id(parameter)] = record.fields

    def _make_own(self, engine: Engine, parameters: Iterable[nn.Parameter]) -> None:
        """Give weights that are trained from now on records of their own."""
        records = dict.fromkeys(engine.parameters.unit_of(one)[0].record for one in parameters)
        engine.parameters.make_own(list(records), f"{type(self).__name__} trains them")

    def _missing(self, parameter: nn.Parameter) -> list[str]:
        """Return the fields of a parameter's state that its record does not have yet, and of errors that
        ranks keep of its gradients.
        """
        engine = self.mine[id(parameter)].engine
        record = engine.parameters.unit_of(parameter)[0].record
        errors = engine.partition.error_fields(record) if engine.partition is not None else ()
        names = *self.recipe_of(parameter).fields(record.schema), *errors
        return [name for name in names if name not in record]

    def _missing_nbytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return the bytes by which records grow for the state of these parameters."""
        records = [self.mine[id(one)].engine.parameters.unit_of(one)[0].record for one in parameters]
        missing = zip(records, map(self._missing, parameters), strict=True)
        fields = {(record, name) for record, names in missing for name in names}
        fields |= {(one, name) for one in records if one.in_files is not None for name in one.schema.weights}
        return sum(record.field_nbytes(name) for record, name in fields)

    def _add_fields(self, parameter: nn.Parameter) -> None:
        missing = self._missing(parameter)
        engine = self.mine[id(parameter)].engine
        unit = engine.parameters.unit_of(parameter)[0]
        if missing and (unit.pending or not engine.lane.settled(unit.record)):
            engine.residency.flush(unit)
            engine.lane.drain()
        for name in missing:
            unit.record.add(name, engine.store)

    def _add_all_fields(self, engine: Engine, parameters: Sequence[nn.Parameter]) -> None:
        """Add the fields of all these parameters' state.

        Raises: aio.StorageFullError, with all that is needed, where NVMe has no room for it.
        """
        store, nbytes = engine.nvme_store, self._missing_nbytes(parameters)
        before = store.allocated_nbytes if store is not None else 0
        for parameter in parameters:
            try:
                self._add_fields(parameter)
            except StorageFullError as full:
                taken = (store.allocated_nbytes if store is not None else 0) - before
                unit, index = engine.parameters.unit_of(parameter)
                copies, twice = (2, ", twice in a durable run") if engine.durable is not None else (1, "")
                what = f"the state of {type(self).__name__}, {format_size(copies * nbytes)}{twice}"
                names = [unit.record.shard.segments[index].name]
                raise of_whole(full, unit.name, names, what, copies * nbytes, taken) from None

    def _forget(self, engine: Engine, parameter: nn.Parameter) -> None:
        """Set state that an earlier optimizer has left to zero."""
        unit, index = engine.parameters.unit_of(parameter)
        segment = unit.record.shard.segments[index]
        start = segment.start
        if unit.pending:
            engine.residency.flush(unit)  # of the earlier optimizer, by its recipe
        kept = self.recipe_of(parameter).fields(unit.record.schema)
        under_way = not engine.lane.settled(unit.record)
        if segment.numel and (under_way or any(unit.record.written(name, start) for name in kept)):
            zeros = torch.zeros(segment.shape, dtype=torch.float32, device="cpu")
            if names := self.recipe_of(parameter).state:
                engine.parameters.write(parameter, dict.fromkeys(names, spread_as(parameter, zeros)))


def _refuse_taken(optimizer: Owning, parameters: Iterable[nn.Parameter]) -> None:
    """Check that no other optimizer has any of these parameters of a new group.

    Raises: ValueError naming the first that another has.
    """
    for parameter in parameters:
        engine = engine_for(parameter)
        if any(id(parameter) in other.mine for other in _others(optimizer, engine)):
            name = engine.parameters.name_of(parameter)
            raise ValueError(
                f"{name} already belongs to another infinity optimizer. Delete that one first, or make one "
                "new optimizer for all these parameters, which takes them over."
            )


def _supersede(optimizer: Owning, parameters: Sequence[nn.Parameter]) -> None:
    """Take `parameters` over from other optimizers, with a warning; see [Note: superseded]."""
    taken: dict[Owning, list[str]] = {}
    for parameter in parameters:
        engine = engine_for(parameter)
        for other in _others(optimizer, engine):
            if id(parameter) in other.mine:
                taken.setdefault(other, []).append(engine.parameters.name_of(parameter))
    for other, names in taken.items():
        kind, shown = type(other).__name__, names[0] + (f" and {len(names) - 1} more" if names[1:] else "")
        applied = " (those of the last backward among them)" if other.has_applied else ""
        warnings.warn(
            f"{type(optimizer).__name__} is made for parameters that an earlier {kind} has ({shown}), and "
            f"supersedes it: the earlier one's updates{applied} stay, moments and step counts begin anew, "
            "and its step() raises from now on. Make its schedulers again, for the new one.",
            stacklevel=users_stacklevel(),
        )
        for engine in other.engines:
            engine.parameters.before_change()
            if engine.durable is not None and engine.durable.source is not None:
                engine.durable.source.succeed(other, optimizer)
            engine.arrivals.leave(other)
        other.superseded = shown


def _others(optimizer: Owning, engine: Engine) -> list[Owning]:
    return [one for one in engine.optimizers if one is not optimizer]

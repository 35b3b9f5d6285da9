"""Which optimizer a parameter belongs to: the one that was made last.

[Note: superseded]
Two optimizers of plain PyTorch may have the same parameters: each keeps its own moments, and who steps
decides. Here moments lie beside their weights, once. So an optimizer that is made for parameters of another,
as a notebook's cell does that is run again, takes them over: what the earlier one has decided stays, moments
and counts of steps begin anew, as those of every new optimizer do, and the earlier one steps no more. It
could only step with moments that are not its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.deprecation import users_stacklevel
from infinity.engine.engine import Engine, engine_of
from infinity.errors import UnsupportedError
from infinity.optim.joining import check_fits
from infinity.records.update_rules import Recipe


def engine_for(parameter: nn.Parameter) -> Engine:
    """Return the engine of a parameter that an optimizer is given.

    Raises: ValueError for one that was not built in Init; UnsupportedError where its model is being built.
    """
    engine, what = engine_of(parameter), f"a parameter of shape {tuple(parameter.shape)}"
    if engine is None and not (parameter.is_floating_point() or parameter.is_complex()):
        raise ValueError(
            f"{what} is {parameter.dtype}: it has no gradient, and is not offloaded. Give the optimizer what "
            "can be trained: [p for p in model.parameters() if p.is_floating_point()]"
        )
    if engine is None:
        raise ValueError(
            f"{what} was not built inside `with infinity.Init(config):`. Build the whole "
            "model there, or give ordinary parameters to an optimizer of torch."
        )
    if engine.is_building:
        raise UnsupportedError(
            "an optimizer inside `with infinity.Init(...)`, where its model is still being built: make the "
            "optimizer after the `with`"
        )
    return engine


def check_current(optimizer: Owning, what: str) -> None:
    """See that an optimizer still has its parameters.

    Raises: UnsupportedError where a later one has taken them over.
    """
    if optimizer.superseded:
        raise UnsupportedError(
            f"{what} of a superseded {type(optimizer).__name__}: a later optimizer was made for parameters "
            f"of its own ({optimizer.superseded}), and has begun their moments anew. Use the later one, with "
            "schedulers made for it; where several optimizers train parts of a model, give each its own "
            "parameters."
        )


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """Where one parameter of an optimizer belongs."""

    engine: Engine
    position: int  # in the order in which they came
    group: int


class Owning:
    """The part of an optimizer that knows its parameters, and gives them room for their state.

    Attributes:
        mine: its parameters, by id().
        superseded: names of those that a later optimizer has taken over; "" for none.
    """

    recipe: Recipe
    mine: dict[int, ParameterPlace]
    superseded: str
    _begun: set[int]

    def own_nothing(self) -> None:
        """Begin without parameters."""
        self.mine, self.superseded = {}, ""
        self._engines: dict[int, Engine] = {}
        self._begun = set()
        self._applied: set[int] = set()
        self._made = False

    @property
    def engines(self) -> list[Engine]:
        """Those that keep its parameters."""
        return list(self._engines.values())

    @property
    def has_applied(self) -> bool:
        """Whether it has applied gradients in a backward since the last step()."""
        return bool(self._applied)

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make room for the state of parameters, and be told of their gradients from now on.

        Raises: ValueError for a parameter of another optimizer, unless this one is being made: then it takes
        the parameter over.
        """
        if self._made:
            _refuse_taken(self, parameters)
        trained = [one for one in parameters if one.requires_grad]
        for engine in {self.mine[id(one)].engine for one in parameters}:
            ours = [one for one in trained if self.mine[id(one)].engine is engine]
            check_fits(engine, type(self).__name__, self._missing_nbytes(ours))
        for parameter in trained:
            self._add_fields(parameter)
        if not self._made:
            _supersede(self, parameters)
        for parameter in parameters:
            engine = self.mine[id(parameter)].engine
            self._engines[id(engine)] = engine
            engine.arrivals.join(self)
            if parameter.requires_grad:
                self.make_room(engine, parameter)
        self._made = True

    def make_room(self, engine: Engine, parameter: nn.Parameter) -> None:
        """Give the parameter's record its state: zero, at first, whatever an earlier optimizer left."""
        record = engine.parameters.unit_of(parameter)[0].record
        if any(name not in record for name in self.recipe.fields(record.form)):
            self._add_fields(parameter)
        if id(parameter) not in self._begun:
            self._begun.add(id(parameter))
            self._forget(engine, parameter)

    def _missing(self, parameter: nn.Parameter) -> list[str]:
        """Return the fields of a parameter's state for which its record has no room yet."""
        record = self.mine[id(parameter)].engine.parameters.unit_of(parameter)[0].record
        return [name for name in self.recipe.fields(record.form) if name not in record]

    def _missing_nbytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Bytes that records have to grow by for all these parameters."""
        records = [self.mine[id(one)].engine.parameters.unit_of(one)[0].record for one in parameters]
        missing = zip(records, map(self._missing, parameters), strict=True)
        fields = {(record, name) for record, names in missing for name in names}
        return sum(record.field_nbytes(name) for record, name in fields)

    def _add_fields(self, parameter: nn.Parameter) -> None:
        missing = self._missing(parameter)
        engine = self.mine[id(parameter)].engine
        unit = engine.parameters.unit_of(parameter)[0]
        if missing and (unit.pending or not engine.lane.settled(unit.record)):
            engine.executor.flush(unit)
            engine.lane.drain()
        for name in missing:
            unit.record.add(name, engine.store)

    def _forget(self, engine: Engine, parameter: nn.Parameter) -> None:
        """Set state that an earlier optimizer has left to zero, as that of a new one is."""
        unit, index = engine.parameters.unit_of(parameter)
        segment = unit.record.shard.segments[index]
        start = segment.start
        if unit.pending:
            engine.executor.flush(unit)  # decided by the earlier one, and by its recipe
        under_way = not engine.lane.settled(unit.record)
        if segment.numel and (
            under_way or any(unit.record.written(name, start) for name in self.recipe.state)
        ):
            zeros = torch.zeros(parameter.shape, dtype=torch.float32)
            if self.recipe.state:
                engine.parameters.write(parameter, dict.fromkeys(self.recipe.state, zeros))


def _refuse_taken(optimizer: Owning, parameters: Iterable[nn.Parameter]) -> None:
    """See that no other optimizer has any of these, which are to become a further group of `optimizer`.

    Raises: ValueError naming the first that one has.
    """
    for parameter in parameters:
        engine = engine_for(parameter)
        if any(id(parameter) in other.mine for other in _others(optimizer, engine)):
            raise ValueError(
                f"{engine.parameters.name_of(parameter)} already belongs to another infinity optimizer. "
                "Delete that one first, or make one optimizer of all these parameters, which takes them over."
            )


def _supersede(optimizer: Owning, parameters: Sequence[nn.Parameter]) -> None:
    """Let `optimizer`, which is being made, take over what others have of `parameters`; see [Note:
    superseded].
    """
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
            f"supersedes it: the earlier one's updates{applied} stay, moments and counts of steps begin "
            "anew, and its step() raises from now on. Make its schedulers again, for the new one.",
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

"""`optimizer.state` with torch's interface, over state in records that is read and written on demand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from infinity.errors import UnsupportedError
from infinity.optim.missed import MissedSteps
from infinity.optim.ownership import Owning, check_current
from infinity.optim.state_copy import StateCopy, plain_state
from infinity.records.update_rules import Recipe
from infinity.tensors import is_distributed
from infinity.tiling import Whole


def _guarded(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of state as one that refuses changes."""
    if not is_distributed(values):
        return StateCopy.guarding(values)
    from infinity.optim.distributed_state import DistributedStateCopy

    return DistributedStateCopy.guarding(values)


class ParameterState(MutableMapping[str, Any]):
    """`optimizer.state[parameter]`: "step", and the optimizer's tensors by torch's names. Empty before the
    parameter's first step.

    Reading a tensor returns a new one, fp32 on the CPU, with all updates applied. All ranks have to read, and
    assign, together. values(), items() and dict(state) read everything.

    Raises: UnsupportedError if a later optimizer has taken the parameters over.
    """

    def __init__(self, optimizer: ShowingState, parameter: nn.Parameter) -> None:
        self._optimizer, self._parameter = optimizer, parameter

    @property
    def _names(self) -> list[str]:
        if self._parameter not in self._optimizer.counts:
            return []
        return ["step", *self._optimizer.recipe_of(self._parameter).state.values()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        """Return the step count, or read a tensor."""
        field = self._field(name)
        if field is None:
            return self._optimizer.counts[self._parameter]["step"]
        check_current(self._optimizer, "state")
        engine = self._optimizer.mine[id(self._parameter)].engine
        return _guarded(engine.parameters.read(self._parameter, [field])[0])

    def __setitem__(self, name: str, value: Any) -> None:
        """Set the step count, or write a tensor."""
        field = self._field(name)
        check_current(self._optimizer, "state")
        self._optimizer.state_assigned(self._parameter)
        if field is None:
            self._optimizer.counts[self._parameter]["step"] = int(value)
            return
        expected = tuple(self._parameter.shape)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != expected:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"state[{name!r}] = {found}: expected a tensor of shape {expected}")
        engine = self._optimizer.mine[id(self._parameter)].engine
        engine.parameters.write(self._parameter, {field: plain_state(value)})

    def __delitem__(self, name: str) -> None:
        raise UnsupportedError(_not_dropped(self._optimizer))

    def _field(self, name: str) -> str | None:
        """Return the record's field of a name; None for "step"."""
        if name not in self:
            raise KeyError(f"{name!r}: expected one of {self._names or 'none, before the first step'}")
        fields = {known: field for field, known in self._optimizer.recipe_of(self._parameter).state.items()}
        return fields.get(name)

    def __repr__(self) -> str:
        shape = tuple(self._parameter.shape)
        step = {"step": self["step"]} if self else {}
        return str(step | {name: f"fp32 {shape}, read when asked for" for name in self if name != "step"})


class StateOfWhole(ParameterState):
    """`optimizer.state[embedding.weight]` where the weight is kept in blocks of rows."""

    def __init__(self, optimizer: ShowingState, whole: Whole) -> None:
        super().__init__(optimizer, whole.pieces()[0])
        self._places = whole.places()
        self._parts = [ParameterState(optimizer, one) for one in whole.pieces()]
        self._shape = tuple(whole.shape)

    def __getitem__(self, name: str) -> Any:
        """Return the step count, or read a tensor of all blocks."""
        found = [one[name] for one in self._parts[: 1 if name == "step" else None]]
        return found[0] if name == "step" else StateCopy.guarding(torch.cat(found))

    def __setitem__(self, name: str, value: Any) -> None:
        """Set the step count, or write a tensor, of all blocks."""
        if name != "step" and (not isinstance(value, torch.Tensor) or tuple(value.shape) != self._shape):
            raise ValueError(f"state[{name!r}]: expected a tensor of shape {self._shape}")
        for one, (rows, *_) in zip(self._parts, self._places, strict=True):
            one[name] = value if name == "step" else value[rows]


class States(MutableMapping[torch.Tensor, Any]):
    """`optimizer.state`: a ParameterState for each parameter that has stepped."""

    def __init__(self, optimizer: ShowingState) -> None:
        self._optimizer = optimizer

    def __getitem__(self, parameter: Any) -> ParameterState:
        if isinstance(parameter, Whole) and id(parameter.pieces()[0]) in self._optimizer.mine:
            return StateOfWhole(self._optimizer, parameter)
        if id(parameter) not in self._optimizer.mine:
            raise KeyError(f"{parameter!r} is not a parameter of this {type(self._optimizer).__name__}")
        return ParameterState(self._optimizer, parameter)

    def __setitem__(self, parameter: Any, value: Any) -> None:
        """Set values of one parameter's state, by name."""
        state = self[parameter]
        if isinstance(value, ParameterState) and value._parameter is parameter:  # noqa: SLF001 - its own
            return
        for name, one in value.items():
            state[name] = one

    def __delitem__(self, parameter: Any) -> None:
        raise UnsupportedError(_not_dropped(self._optimizer))

    def __contains__(self, parameter: object) -> bool:
        if isinstance(parameter, Whole):
            return all(one in self._optimizer.counts for one in parameter.pieces())
        return parameter in self._optimizer.counts

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._optimizer.counts)

    def __len__(self) -> int:
        return len(self._optimizer.counts)

    def __repr__(self) -> str:
        return repr(dict(self.items()))


class ShowingState(Owning):
    """The part of an optimizer that gives access to its state."""

    recipe: Recipe

    _missed: MissedSteps

    def state_assigned(self, parameter: nn.Parameter) -> None:
        """Called when a parameter's state is about to be set: what is kept beside it begins anew."""

    @property
    def counts(self) -> dict[Any, dict[str, int]]:
        """Step counts by parameter, with the steps that slices of stacks have missed."""
        self._missed.tell_all()
        return self._counts

    @property
    def _counts(self) -> dict[Any, dict[str, int]]:
        """The dict that torch's own code keeps as the optimizer's state."""
        counts: dict[Any, dict[str, int]] = self.__dict__["state"]
        return counts

    @property
    def state(self) -> States:
        """The state by parameter, as torch has it; see ParameterState."""
        return States(self)

    @state.setter
    def state(self, value: defaultdict[Any, Any]) -> None:
        """Take the empty dict that torch's constructor assigns; raise for later assignments."""
        if "state" in self.__dict__:
            raise UnsupportedError(_not_dropped(self))
        self.__dict__["state"] = value


def _not_dropped(optimizer: object) -> str:
    return (
        f"{type(optimizer).__name__}: state is kept in records, beside the weights, and cannot be dropped. "
        "Make a new optimizer, whose state begins with zeros, or assign: "
        "optimizer.state[parameter][name] = tensor."
    )

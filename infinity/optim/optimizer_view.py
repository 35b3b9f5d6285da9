"""`optimizer.state` as torch has it, where state lies in records: read and written one by one, on demand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from infinity.errors import UnsupportedError
from infinity.optim.ownership import Owning, check_current
from infinity.records.update_rules import Recipe


class StateCopy(torch.Tensor):
    """A copy of what lies in a record: to change the copy in place would be lost, and is refused."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; what it returns is an ordinary tensor, unless it is a view of this one."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        changed = kwargs.get("out"), (args[0] if args and _changes(name) else None)
        if any(isinstance(one, cls) for one in pytree.tree_leaves(changed)):
            raise UnsupportedError(
                f"{name}() on a copy of an optimizer's state, which lies in records: the change would be "
                "lost. Assign a value: optimizer.state[parameter][name] = tensor."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and result.layout == torch.strided:
                shared = result.untyped_storage()._cdata
                sources = (one for one in pytree.tree_leaves(args) if isinstance(one, cls))
                if any(one.untyped_storage()._cdata == shared for one in sources):
                    return result.as_subclass(cls)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Be copied as an ordinary tensor."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _changes(name: str) -> bool:
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__"))
    return name.endswith("_") and name != "requires_grad_"


class ParameterState:
    """`optimizer.state[parameter]`: "step", and torch's names of what the optimizer keeps. Empty before the
    parameter's first step.

    Reading one gives a new fp32 tensor on the CPU, with all updates applied; on several ranks all of them
    read, or assign, together. It is no dict, but behaves as one: dict(state) reads everything.

    Raises: UnsupportedError where a later optimizer has taken the parameters over.
    """

    def __init__(self, optimizer: ShowingState, parameter: nn.Parameter) -> None:
        """Show the state of `parameter`."""
        self._optimizer, self._parameter = optimizer, parameter

    def keys(self) -> list[str]:
        """Return the names."""
        if self._parameter not in self._optimizer.counts:
            return []
        return ["step", *self._optimizer.recipe.state.values()]

    def __iter__(self) -> Iterator[str]:
        """Go through the names."""
        return iter(self.keys())

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.keys())

    def __contains__(self, name: object) -> bool:
        """Whether it is one of the names."""
        return name in self.keys()

    def __getitem__(self, name: str) -> Any:
        """Return the count of steps, or read a tensor."""
        field = self._field(name)
        if field is None:
            return self._optimizer.counts[self._parameter]["step"]
        check_current(self._optimizer, "state")
        engine = self._optimizer.mine[id(self._parameter)].engine
        return engine.parameters.read(self._parameter, [field])[0].as_subclass(StateCopy)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set the count of steps, or write a tensor."""
        field = self._field(name)
        check_current(self._optimizer, "state")
        if field is None:
            self._optimizer.counts[self._parameter]["step"] = int(value)
            return
        expected = tuple(self._parameter.shape)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != expected:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"state[{name!r}] = {found}: expected a tensor of shape {expected}")
        engine = self._optimizer.mine[id(self._parameter)].engine
        engine.parameters.write(self._parameter, {field: value.detach().as_subclass(torch.Tensor)})

    def _field(self, name: str) -> str | None:
        """Return the record's field for a name, None for "step"."""
        if name not in self:
            raise KeyError(f"{name!r}: there is {self.keys() or 'nothing before the first step'}")
        fields = {known: field for field, known in self._optimizer.recipe.state.items()}
        return fields.get(name)

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Return one, or `otherwise` where there is none of that name."""
        try:
            return self[name]
        except KeyError:
            return otherwise

    def values(self) -> list[Any]:
        """Read all."""
        return [self[name] for name in self]

    def items(self) -> list[tuple[str, Any]]:
        """Read all, with their names."""
        return [(name, self[name]) for name in self]

    def __repr__(self) -> str:
        """What is known without reading."""
        shape = tuple(self._parameter.shape)
        step = {"step": self["step"]} if self else {}
        return str(step | {name: f"fp32 {shape}, read when asked for" for name in self if name != "step"})


class States(MutableMapping[torch.Tensor, Any]):
    """`optimizer.state`: a ParameterState for each parameter that has stepped."""

    def __init__(self, optimizer: ShowingState) -> None:
        """Show the state of an optimizer's parameters."""
        self._optimizer = optimizer

    def __getitem__(self, parameter: Any) -> ParameterState:
        """Return one parameter's state."""
        if id(parameter) not in self._optimizer.mine:
            raise KeyError(f"{parameter!r} is no parameter of this {type(self._optimizer).__name__}")
        return ParameterState(self._optimizer, parameter)

    def __setitem__(self, parameter: Any, value: Any) -> None:
        """Set values of one parameter's state, by their names."""
        state = self[parameter]
        if isinstance(value, ParameterState) and value._parameter is parameter:  # noqa: SLF001 - its own
            return
        for name, one in value.items():
            state[name] = one

    def __delitem__(self, parameter: Any) -> None:
        """Refuse to forget state."""
        raise UnsupportedError(_anew(self._optimizer))

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter has stepped."""
        return parameter in self._optimizer.counts

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Go through the parameters that have stepped."""
        return iter(self._optimizer.counts)

    def __len__(self) -> int:
        """Return how many have."""
        return len(self._optimizer.counts)

    def __repr__(self) -> str:
        """What is known without reading."""
        return repr(dict(self.items()))


class ShowingState(Owning):
    """The part of an optimizer that shows its state."""

    recipe: Recipe

    @property
    def counts(self) -> dict[Any, dict[str, int]]:
        """The steps that parameters have made: what torch's own code keeps as an optimizer's state."""
        counts: dict[Any, dict[str, int]] = self.__dict__["state"]
        return counts

    @property
    def state(self) -> States:
        """State as torch has it; see ParameterState."""
        return States(self)

    @state.setter
    def state(self, value: defaultdict[Any, Any]) -> None:
        """Begin with none, as torch's constructor does."""
        if "state" in self.__dict__:
            raise UnsupportedError(_anew(self))
        self.__dict__["state"] = value


def _anew(optimizer: object) -> str:
    return (
        f"{type(optimizer).__name__}: state lies in records, beside its weights, and is not dropped one by "
        "one. Make a new optimizer, whose state begins with zeros, or assign: "
        "optimizer.state[parameter][name] = tensor."
    )

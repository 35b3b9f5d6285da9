"""Parameters whose values a forward or backward uses: ordinary ones, but for ways past autograd's versions.

[Note: changes that would be lost]
What a step computes with is a copy of the record, or the record's own memory: a change is lost, or never
reaches the master. A change in place raises the parameter's version, and is found when its unit is released.
`p.data`, `p.numpy()` and their kin hand out the same memory without that version, so from then on the content
is compared: a digest is taken when they are called, and again at the release. Models that call none of them
pay nothing for that. `p.data = values` is refused at once, and, where changes are kept, values of another
shape or type. What is hidden from all of this (the `.data` of a view, a raw pointer) is found by content,
which is compared at a unit's first use and now and then.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.units.changes import Changes

DATA: Any = torch.Tensor.data
"""The attribute `data` of torch, past every guard: DATA.__get__(tensor), DATA.__set__(tensor, values)."""


_CHECKPOINT = "torch.utils.checkpoint"
if TYPE_CHECKING:
    _Base = nn.Parameter
else:
    _Base = torch.Tensor  # a DTensor that is a parameter is no nn.Parameter by its class


_changes: WeakIdKeyDictionary = WeakIdKeyDictionary()


def set_changes(parameter: nn.Parameter, changes: Changes) -> None:
    """Register what finds the changes of `parameter`. Held weakly on both sides."""
    _changes[parameter] = weakref.ref(changes)


def _changes_of(parameter: nn.Parameter) -> Changes | None:
    reference = _changes.get(parameter)
    changes: Changes | None = reference() if reference is not None else None
    return changes


def _watch(parameter: nn.Parameter) -> None:
    changes = _changes_of(parameter)
    if changes is not None:
        changes.watch(parameter)


class Watched(_Base):
    """What the classes of attached parameters have in common; see [Note: changes that would be lost]."""

    @property
    def data(self) -> torch.Tensor:
        """The values, as ever, and from now on watched."""
        _watch(self)
        values: torch.Tensor = DATA.__get__(self)
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        changes = _changes_of(self)
        if changes is not None and not self.has_memory_of(values):
            changes.assign(self, values)
        self.be_set_to(values)

    def has_memory_of(self, values: torch.Tensor) -> bool:
        """Whether the values of both are the same memory, seen the same way."""
        return self.is_set_to(values)

    def be_set_to(self, values: torch.Tensor) -> None:
        """Be `values`, which are kept."""
        DATA.__set__(self, values)

    def detach(self) -> torch.Tensor:
        """As ever: but for the version, which torch sees, `detach().numpy()` does what `numpy()` does. A
        checkpoint that saves what it recomputes hands it to nobody.
        """
        caller = sys._getframe(1)
        if caller.f_code.co_name == "pack_hook" and caller.f_globals.get("__name__") == _CHECKPOINT:
            return super().detach()
        _watch(self)
        values = super().detach()
        if caller.f_code is nn.Parameter.__new__.__code__:
            values.__class__ = type(self)  # nn.Parameter(p) wants the type back that p has
        return values

    def numpy(self, *, force: bool = False) -> Any:
        """As ever, and from now on watched."""
        _watch(self)
        return super().numpy(force=force)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy the values into an ordinary Parameter."""
        if id(self) not in memo:
            values = super().detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(values, self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy

    def __repr__(self) -> str:  # type: ignore[override]
        """As an ordinary Parameter's."""
        return f"Parameter containing:\n{super().detach().requires_grad_(self.requires_grad)!r}"


class Attached(Watched, nn.Parameter):
    """The class of an ordinary parameter while a step uses it, or an edit."""


def call(func: Callable[..., Any], operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return func(*args, **kwargs), where `operation`, its name, may be one that Attached defines."""
    first = args[0] if args else None
    if not isinstance(first, Watched) or operation not in {"data", "detach", "numpy"}:
        return func(*args, **kwargs)
    if operation != "data":
        return getattr(first, operation)(*args[1:], **kwargs)
    if len(args) == 1:
        return first.data
    first.data = args[1]
    return None

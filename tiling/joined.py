"""A copy of a weight that is kept in blocks, put together for one use outside of `gathered`.

What would be written to it, or to a view of it, would be lost: it is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_CHANGE_NO_VALUE = frozenset({"requires_grad_"})
_COPIED = frozenset({"__deepcopy__", "__reduce_ex__"})
_READ = frozenset({"__invert__", "__index__", "__int__", "__iter__"})
"""Of the names that begin as those of `+=` and its like do."""


class ReadOnlyCopy(torch.Tensor):
    """Such a copy, and the views of it. Results of operations that do not share its memory are plain."""

    refuse: Callable[[str], Exception]
    """Returns the error for an operation, by name, that would change it."""

    @staticmethod
    def of(values: torch.Tensor, refuse: Callable[[str], Exception]) -> ReadOnlyCopy:
        """Return `values`, and the graph that leads to them, as one."""
        copy = values.as_subclass(ReadOnlyCopy)
        copy.refuse = refuse
        return copy

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Do it, but for a change in place."""
        name, kwargs = str(getattr(func, "__name__", func)), kwargs or {}
        changed = pytree.tree_leaves(kwargs.get("out"))
        if changes_first(name) or (name == "__set__" and _attribute_of(func) == "data"):
            changed += pytree.tree_leaves(args[:1])
        for one in changed:
            if isinstance(one, ReadOnlyCopy):
                raise one.refuse(name)
        copies = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, ReadOnlyCopy)]
        with torch._C.DisableTorchFunctionSubclass():
            if name in _COPIED:
                args = (args[0].as_subclass(torch.Tensor), *args[1:])
            before = [_version(one) for one in copies]
            result = func(*args, **kwargs)
            for one, version in zip(copies, before, strict=True):
                if _version(one) != version:  # as by relu(weight, inplace=True)
                    raise one.refuse(name)
            if name == "numpy":
                result.flags.writeable = False
            places = {_place(one): one.refuse for one in copies}

            def as_view(one: Any) -> Any:
                plain = isinstance(one, torch.Tensor) and not isinstance(one, ReadOnlyCopy)
                place = _place(one) if plain else None
                refuse = places.get(place) if place is not None else None
                return one if refuse is None else ReadOnlyCopy.of(one, refuse)

            return pytree.tree_map(as_view, result)


def _version(one: torch.Tensor) -> int:
    return 0 if one.is_inference() else one._version


def _place(one: torch.Tensor) -> int | None:
    """Return what tells a tensor's memory from others'; None where it has none, as in torch.func."""
    if one.layout != torch.strided:
        return None
    try:
        return int(one.untyped_storage()._cdata)
    except NotImplementedError:
        return None


def changes_first(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if name in _CHANGE_NO_VALUE:
        return False
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _READ)
    return name.endswith("_")


def _attribute_of(func: Any) -> str:
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))

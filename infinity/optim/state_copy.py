"""Copies of an optimizer's state, which lies in records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from infinity.errors import UnsupportedError
from infinity.tensors import is_distributed, local


class Copied(torch.Tensor):
    """A copy of state in a record; changes of it in place would be lost, so they raise."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; the result is an ordinary tensor, unless it is a view of this one."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        changed = kwargs.get("out"), (args[0] if args and _changes(name) else None)
        if any(isinstance(one, cls) for one in pytree.tree_leaves(changed)):
            raise UnsupportedError(
                f"{name}() on a copy of an optimizer's state, which is kept in records: the change would be "
                "lost. Assign a tensor: optimizer.state[parameter][name] = tensor."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and result.layout == torch.strided:
                shared = local(result).untyped_storage()._cdata
                sources = (one for one in pytree.tree_leaves(args) if isinstance(one, cls))
                if any(local(one).untyped_storage()._cdata == shared for one in sources):
                    return cls.guarding(result)
        return result

    @classmethod
    def guarding(cls, values: torch.Tensor) -> torch.Tensor:
        """Return `values` as one that refuses changes; the local tensor of a DTensor is not guarded."""
        if is_distributed(values):
            values.__class__ = cls
            return values
        return values.as_subclass(StateCopy)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy it as an ordinary tensor."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as an ordinary tensor."""
        return plain_state(self).__reduce_ex__(protocol)


def _changes(name: str) -> bool:
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__"))
    return name.endswith("_") and name != "requires_grad_"


class StateCopy(Copied):
    """A copy of an ordinary parameter's state."""


def plain_state(values: torch.Tensor) -> torch.Tensor:
    """Return the values of a copy of state, or of any tensor, without the guard of a copy: other guards, as
    that of a released parameter, stay.
    """
    if not isinstance(values, Copied):
        values = values.detach()
    with torch._C.DisableTorchFunctionSubclass():
        values = values.detach()
        return values if is_distributed(values) else values.as_subclass(torch.Tensor)

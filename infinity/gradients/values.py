"""The dense values of offloaded gradients: what works on them, views of them, and what happens to changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from infinity.errors import NotResidentError, UnsupportedError
from infinity.gradients.gradient import GONE, Gradient
from infinity.gradients.store import GradientStore
from infinity.tensors import digest, is_part


class Thin(torch.Tensor):
    """A tensor without memory: what it answers from a dense copy, and what it refuses."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def whole(self) -> StoredGradient:
        """The gradient that this is, or is a view of."""
        raise NotImplementedError

    def made(self, dense: torch.Tensor) -> torch.Tensor:
        """Return the part of the gradient's dense values that this stands for."""
        raise NotImplementedError

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """The values, read-only: what was written there would be lost."""
        array = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None) -> np.ndarray[Any, Any]:
        """As `numpy`."""
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def tolist(self) -> Any:
        """The values."""
        return self.clone().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain tensor with the values."""
        memo[id(self)] = copy = self.clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as a plain tensor with the values."""
        return self.clone().__reduce_ex__(protocol)

    def _refuse(self, *_args: Any, **_named: Any) -> Any:
        raise UnsupportedError(
            "an offloaded gradient has no memory that could be handed out or shared; take that of a copy, "
            "p.grad.clone()"
        )

    data_ptr = untyped_storage = storage = share_memory_ = __dlpack__ = _refuse


class StoredGradient(Thin):
    """A thin tensor that stands for all of a stored gradient."""

    gradient: Gradient
    _store: weakref.ref[GradientStore]  # see gradient's note on what p.grad holds

    def stand_for(self, gradient: Gradient, store: GradientStore | None = None) -> None:
        """Own a stored gradient of the parameter, kept by `store`; None: by the same as the one before."""
        self.gradient = gradient
        if store is not None:
            self._store = weakref.ref(store)

    def replace(self, part: torch.Tensor) -> None:
        """Stand for a new gradient, of which `part`, nobody else's memory, is what this rank holds."""
        self.stand_for(self.store.replaced(self.gradient, part))
        self.store.settle(self.gradient.unit)

    @property
    def store(self) -> GradientStore:
        """What keeps the gradient.

        Raises: NotResidentError where it is gone with the model.
        """
        store = self._store()
        if store is None:
            raise NotResidentError(GONE)
        return store

    @property
    def whole(self) -> StoredGradient:
        """Itself."""
        return self

    def made(self, dense: torch.Tensor) -> torch.Tensor:
        """See Thin."""
        return dense


class GradientView(Thin):
    """A view of an offloaded gradient: it has the values that the gradient has when the view is used, and a
    change of the view changes the gradient.
    """

    _of: StoredGradient
    _make: Callable[[torch.Tensor], torch.Tensor]

    @staticmethod
    def __new__(  # noqa: PYI034 - torch makes it
        cls: type[GradientView],
        of: StoredGradient,
        make: Callable[[torch.Tensor], torch.Tensor],
        like: torch.Tensor,
    ) -> GradientView:
        """Make a tensor that lies as `like`, without memory; `make` makes the view of `of`'s dense values."""
        tensor: GradientView = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=int(like.storage_offset()),
            dtype=like.dtype,
            device=of.device,
        )
        tensor._of, tensor._make = of, make
        return tensor

    @property
    def whole(self) -> StoredGradient:
        """The gradient that it is a view of."""
        return self._of

    def made(self, dense: torch.Tensor) -> torch.Tensor:
        """See Thin."""
        return self._make(dense)

    def __repr__(self) -> str:  # type: ignore[override]
        """Name the gradient that it is a view of."""
        return f"GradientView(shape={tuple(self.shape)}, of {self._of!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on dense values."""
        return run_on_values(func, args, kwargs or {})


def plain(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient without its graph; for a view of an offloaded one, a plain tensor."""
    return grad.clone() if isinstance(grad, GradientView) else grad.detach()


def run_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on the dense values of the gradients, and views of them, among its arguments, and store
    those that it changes.
    """
    if _makes_views(func) and isinstance(args[0], Thin):
        return _views(func, args, kwargs)
    changed = {
        id(one.whole): one.whole
        for one in pytree.tree_leaves(_written(func, args, kwargs))
        if isinstance(one, Thin)
    }
    for grad in changed.values():
        grad.gradient.check(f"{_name(func)}() on a gradient")
    values: dict[int, torch.Tensor] = {}
    stood_for: dict[int, torch.Tensor] = {}

    def dense(one: Thin) -> torch.Tensor:
        whole = one.whole
        if id(whole) not in values:
            values[id(whole)] = whole.store.dense(whole.gradient, _dtype(whole, changes=id(whole) in changed))
        tensor = one.made(values[id(whole)])
        stood_for[id(tensor)] = one
        return tensor

    dense_args, dense_kwargs = pytree.tree_map_only(Thin, dense, (args, kwargs))
    answer = func(*dense_args, **dense_kwargs)
    for key, grad in changed.items():
        store_changed(grad, values[key], _name(func))
    return pytree.tree_map_only(torch.Tensor, lambda one: stood_for.get(id(one), one), answer)


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that `func` changes."""
    arguments = func._schema.arguments
    given = {one.name: value for one, value in zip(arguments, args, strict=False)} | kwargs
    return [
        given[one.name]
        for one in arguments
        if one.alias_info is not None and one.alias_info.is_write and one.name in given
    ]


def _makes_views(func: Any) -> bool:
    return not func._schema.is_mutable and any(one.alias_info is not None for one in func._schema.returns)


def _views(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the views that `func` makes of a gradient, or of a view of one: their values are taken when they
    are used.
    """
    first, *rest = args
    whole, before = first.whole, first.made
    without = torch.empty(whole.shape, dtype=whole.gradient.unit.flat.dtype, device="meta")
    like = func(before(without), *rest, **kwargs)

    def view(number: int | None, one: torch.Tensor) -> GradientView:
        def made(dense: torch.Tensor) -> torch.Tensor:
            views = func(before(dense), *rest, **kwargs)
            tensor: torch.Tensor = views if number is None else views[number]
            return tensor

        return GradientView(whole, made, one)

    if isinstance(like, torch.Tensor):
        return view(None, like)
    return [view(number, one) for number, one in enumerate(like)]


def _dtype(grad: StoredGradient, *, changes: bool) -> torch.dtype:
    """Return the type in which operations work on a gradient: the parameter's; but fp32 for a change of an
    fp16 gradient that was scaled, which could vanish in fp16.
    """
    own = grad.gradient.unit.flat.dtype
    wide = changes and own == torch.float16 and grad.gradient.scale != 1
    return torch.float32 if wide else own


def store_changed(grad: StoredGradient, values: torch.Tensor, operation: str) -> None:
    """Let `grad` stand for `values`, which `operation` has made of it; of several ranks each stores its part.

    Raises: UnsupportedError for another shape or dtype, and, on every rank, where the ranks' values differ.
    """
    store, old = grad.store, grad.gradient
    unit, index = old.unit, old.index
    name = unit.shard.segments[index].name
    own = unit.flat.dtype
    if values.shape != grad.shape or values.dtype not in (own, grad.dtype):
        raise UnsupportedError(
            f"{name}: {operation}() would make an offloaded gradient {tuple(values.shape)}, {values.dtype}; "
            f"it stays {tuple(grad.shape)}, {own}. Work on a copy: p.grad.clone()."
        )
    host = values.detach().to("cpu").contiguous()
    if store.ranks.size > 1 and not store.ranks.same(digest(host), f"change the gradient of {name}"):
        raise UnsupportedError(
            f"{name}: {operation}() on a gradient, which is the mean over all ranks, has made different "
            "values on them; nothing is changed. Let every rank do the same (torch.distributed.broadcast "
            "what one of them draws), or assign p.grad, of which the ranks' mean is taken."
        )
    part = unit.record.part(index, host)
    grad.replace(part.clone() if is_part(part) else part)

"""The tensors without memory that stand for stored gradients: `p.grad` itself, and views of it.

What clipping, accumulating and zeroing do happens where the gradient lies (`_OPERATIONS`); every other
operation runs on dense values, and those that it changes are stored anew.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils import _pytree as pytree

from infinity.errors import NotResidentError, UnsupportedError
from infinity.gradients.gradient import GONE, Gradient
from infinity.gradients.store import GradientStore
from infinity.tensors import digest, is_distributed, is_part, part_of
from infinity.units import pipelines
from infinity.units.unit import Unit


class Thin(torch.Tensor):
    """A tensor without memory: what it answers from a dense copy, and what it refuses."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def whole(self) -> OffloadedGradient:
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


class OffloadedGradient(Thin):
    """Stands for a stored gradient: clips, accumulates and zeroes it where it lies. Other operations work on
    its dense values; those that change them, also through a view, have them stored anew.
    """

    gradient: Gradient
    _store: weakref.ref[GradientStore]  # see gradient's note on what p.grad holds

    @staticmethod
    def __new__(  # noqa: PYI034 - torch makes it
        cls: type[OffloadedGradient], parameter: nn.Parameter, gradient: Gradient, store: GradientStore
    ) -> OffloadedGradient:
        """Make a tensor of the parameter's shape, dtype and device, without memory."""
        kind = DistributedGradient if is_distributed(parameter) else cls
        tensor: OffloadedGradient = torch.Tensor._make_wrapper_subclass(
            kind, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        tensor.gradient, tensor._store = gradient, weakref.ref(store)
        return tensor

    def replace(self, part: torch.Tensor) -> None:
        """Stand for a new gradient. part: what this rank holds of it, in memory that nothing else uses."""
        self.gradient = self.store.replaced(self.gradient, part)
        self.gradient.was_asked_for()
        self.store.settle(self.gradient.unit)

    def zero(self) -> OffloadedGradient:
        """Stand for a new gradient, of zeros."""
        self.gradient = self.gradient.fresh()
        return self

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
    def whole(self) -> OffloadedGradient:
        """Itself."""
        return self

    def made(self, dense: torch.Tensor) -> torch.Tensor:
        """See Thin."""
        return dense

    def is_of(self, unit: Unit, index: int) -> bool:
        """Whether it stands for this parameter's gradient, and not for another's."""
        return self.gradient.unit is unit and self.gradient.index == index

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """fp32 of an fp16 gradient, which is what it stands for: 16 bits times an fp32 factor. So GradScaler,
        which refuses to unscale gradients in 16 bits, unscales this one.
        """
        stored = self.gradient.unit.flat.dtype
        return torch.float32 if stored == torch.float16 else stored

    @property
    def data(self) -> torch.Tensor:
        """Itself: it is no part of any graph."""
        return self

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values is not self:
            _store_changed(self, values.detach().clone(), "setting data of")

    def __repr__(self) -> str:  # type: ignore[override]
        """Where the gradient is."""
        return f"OffloadedGradient(shape={tuple(self.shape)}, {self.gradient.form.value})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` where the gradient lies if it can be, else on dense values."""
        special = _OPERATIONS.get(func.overloadpacket.__name__)
        if special in (_norm, _norms, _unscale):
            _check_kept(_measured_together() if special is not _unscale else args[0])
        if special is not None and _all_whole(args[0]):
            answer = special(*args, **(kwargs or {}))
            if answer is not NotImplemented:
                return answer
        return _run_on_values(func, args, kwargs or {})


class DistributedGradient(OffloadedGradient):
    """Stands for the stored gradient of a DTensor. Operations that need its values run on DTensors, each rank
    having the local tensor of what it stores; its norm is that of the whole.
    """

    @property
    def device_mesh(self) -> Any:
        """The parameter's."""
        return self._spec.mesh

    @property
    def placements(self) -> Any:
        """The parameter's."""
        return self._spec.placements

    @property
    def _spec(self) -> Any:
        return self.gradient.unit.parameters[self.gradient.index]._spec  # type: ignore[attr-defined]

    def to_local(self, **options: Any) -> torch.Tensor:
        """The values that this rank has, as a new tensor."""
        return self.clone().to_local(**options)  # type: ignore[attr-defined,no-any-return]

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """All values, as a new tensor; every rank of the mesh calls it."""
        return self.clone().full_tensor(**options)  # type: ignore[attr-defined,no-any-return]

    def redistribute(self, *places: Any, **options: Any) -> torch.Tensor:
        """The values, as a DTensor of other placements; every rank of the mesh calls it."""
        return self.clone().redistribute(*places, **options)  # type: ignore[attr-defined,no-any-return]


class GradientView(Thin):
    """A view of an offloaded gradient: it has the values that the gradient has when the view is used, and a
    change of the view changes the gradient.
    """

    _of: OffloadedGradient
    _make: Callable[[torch.Tensor], torch.Tensor]

    @staticmethod
    def __new__(  # noqa: PYI034 - torch makes it
        cls: type[GradientView],
        of: OffloadedGradient,
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
    def whole(self) -> OffloadedGradient:
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
        return _run_on_values(func, args, kwargs or {})


def plain(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient without its graph, whose memory has its values, which torch may negate lazily; for a
    view of an offloaded one, a plain tensor.
    """
    return grad.clone() if isinstance(grad, GradientView) else grad.detach().resolve_neg()


def _run_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on the dense values of the gradients, and views of them, among its arguments, and store
    those that it changes.
    """
    if func.namespace == "c10d":
        raise UnsupportedError(
            f"{_name(func)}(): a collective of torch.distributed on an offloaded gradient, whose result "
            "would be lost. Ranks that share data have its mean already, and a gradient that is summed over "
            "ranks of tensor parallelism is that of a DTensor. Exchange a copy, p.grad.clone(), and give it "
            "back: p.grad.copy_(...)"
        )
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
        _store_changed(grad, values[key], _name(func))
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


def _dtype(grad: OffloadedGradient, *, changes: bool) -> torch.dtype:
    """Return the type in which operations work on a gradient: the parameter's; but fp32 for a change of an
    fp16 gradient that was scaled, which could vanish in fp16.
    """
    own = grad.gradient.unit.flat.dtype
    wide = changes and own == torch.float16 and grad.gradient.scale != 1
    return torch.float32 if wide else own


def _store_changed(grad: OffloadedGradient, values: torch.Tensor, operation: str) -> None:
    """Let `grad` stand for `values`, which `operation` has made of it; of several ranks each stores its part.

    Raises: UnsupportedError for another shape or dtype, and, on every rank, where the ranks' values differ.
    """
    store, old = grad.store, grad.gradient
    unit, index = old.unit, old.index
    name = unit.layout.segments[index].name
    own = unit.flat.dtype
    if values.shape != grad.shape or values.dtype not in (own, grad.dtype):
        raise UnsupportedError(
            f"{name}: {operation}() would make an offloaded gradient {tuple(values.shape)}, {values.dtype}; "
            f"it stays {tuple(grad.shape)}, {own}. Work on a copy: p.grad.clone()."
        )
    host = part_of(unit.parameters[index], values, f"{name}: {operation}()").detach().to("cpu").contiguous()
    what, mesh = f"change the gradient of {name}", store.stages.mesh
    same = store.ranks.size == 1 or store.ranks.same(digest(host), what)
    if not mesh.same_copies([host], [unit.parameters[index]], f"{what} over the mesh") or not same:
        raise UnsupportedError(
            f"{name}: {operation}() on a gradient, which is the mean over all ranks, has made different "
            "values on them; nothing is changed. Let every rank do the same (torch.distributed.broadcast "
            "what one of them draws), or assign p.grad, of which the ranks' mean is taken."
        )
    part = unit.record.rank_part(index, host)
    grad.replace(part.clone() if is_part(part) else part)


# What runs where the gradient lies


def _all_whole(grads: Any) -> bool:
    """Whether this is one gradient, or nothing but such: no view, and no ordinary tensor among them."""
    return all(isinstance(one, OffloadedGradient) for one in (grads if isinstance(grads, list) else [grads]))


def _check_kept(grads: Sequence[Any]) -> None:
    """Raise UnsupportedError if some of the gradients that are looked at together over a pipeline are
    ordinary tensors, of which other stages would not know.
    """
    kept = [one for one in grads if isinstance(one, OffloadedGradient)]
    others = [one for one in grads if not isinstance(one, OffloadedGradient)]
    if others and any(one.store.stages.in_pipeline for one in kept):
        raise UnsupportedError(
            f"clip_grad_norm_ or GradScaler over a pipeline, of {len(kept)} offloaded gradients and "
            f"{len(others)} ordinary tensors, the first of shape {tuple(others[0].shape)}: the other stages "
            "would not know of these. Likely cause: p.grad was assigned. Change it in place "
            "(p.grad.copy_(...)), or give the optimizer max_norm, which takes in what was assigned."
        )


def _norm(grad: OffloadedGradient, order: Any = 2, *rest: Any, **named: Any) -> Any:
    answer = _norms([grad], order, *rest, **named)
    return answer if answer is NotImplemented else answer[0]


def _norms(grads: list[OffloadedGradient], order: Any = 2, *rest: Any, **named: Any) -> Any:
    together = [one for one in _measured_together() if isinstance(one, OffloadedGradient)]
    if order != 2 or rest or named:
        if any(one.store.stages.several for one in together):
            raise UnsupportedError(
                f"clipping by the norm of order {order} over a pipeline: stages sum the norm of order 2 "
                "alone. Clip "
                "by that, clip_grad_norm_(parameters, max_norm), or by value, clip_grad_value_."
            )
        return NotImplemented
    sums: dict[int, float] = {}
    for store in dict.fromkeys(grad.store for grad in grads):
        ours = [grad.gradient for grad in grads if grad.store is store]
        sums.update(zip(map(id, ours), store.square_sums(ours), strict=True))
    norms = [math.sqrt(sums[id(grad.gradient)]) * float(grad.gradient.scale) for grad in grads]
    for number, grad in enumerate(grads):
        others = _of_other_stages(grad, together)
        if others:
            norms[number] = math.sqrt(norms[number] ** 2 + sum(others))
    device = grads[0].device
    if len(norms) == 1:  # as clip_grad_norm_ asks for each: a kernel, for which the host does not wait
        return [torch.full((), norms[0], dtype=torch.float64, device=device)]
    return list(torch.tensor(norms, dtype=torch.float64, device=device))  # one copy to the device


_TOTALS = ("get_total_norm", "_get_total_norm", "clip_grad_norm_")
"""Functions of torch that take the norms of gradients for one; its name depends on the version."""


def _measured_together() -> list[torch.Tensor]:
    """Return the gradients of which torch makes one norm; none where it is asked for some by themselves."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == clip_grad.__name__ and frame.f_code.co_name in _TOTALS:
            grads = frame.f_locals.get("tensors", frame.f_locals.get("grads"))
            return [grads] if isinstance(grads, torch.Tensor) else list(grads or [])
        frame = frame.f_back
    return []


def _of_other_stages(grad: OffloadedGradient, together: list[OffloadedGradient]) -> list[float]:
    """Return the sums of squares of the other stages' gradients where `grad` stands for them: the first of
    its engine's
    among those of which torch makes one norm, which is then that of the whole pipeline.
    """
    ours = [one for one in together if one.store is grad.store]
    if not ours or ours[0] is not grad:
        return []
    store, stages = grad.store, grad.store.stages
    own = 0.0
    if stages.several:
        sums = store.square_sums([one.gradient for one in ours])
        own = sum(total * float(one.gradient.scale) ** 2 for total, one in zip(sums, ours, strict=True))
    every = stages.each(own, "clip_grad_norm_")
    return [one for stage, one in enumerate(every) if stage != stages.ranks.rank]


def _multiply(grad: OffloadedGradient, factor: Any) -> Any:
    return _scale(grad, factor) if _clips() else NotImplemented


def _multiply_all(grads: list[OffloadedGradient], factor: Any) -> Any:
    if not _clips():
        return NotImplemented
    number = float(_everywhere(factor))  # one copy from the device
    for grad in grads:
        _scale(grad, number)
    return None


def _clips() -> bool:
    """Whether torch.nn.utils.clip_grad_norm_ has called: its factor is recorded, and applied in fp32. After
    any other product the gradient is rounded to its own type, as in torch.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == clip_grad.__name__:
            return True
        frame = frame.f_back
    return False


def _everywhere(factor: Any) -> Any:
    """Return a factor, which may be a DTensor, as norms of other orders than 2 are, as one that any rank can
    look at.
    """
    return factor.full_tensor() if is_distributed(factor) else factor


def _scale(grad: OffloadedGradient, factor: Any) -> OffloadedGradient:
    grad.gradient.check("clipping")
    grad.gradient.multiply(_number(factor))
    return grad


_last_factor: tuple[weakref.ref[torch.Tensor], int, float] | None = None


def _number(factor: Any) -> float:
    """Return a factor as a number. One tensor scales all gradients in turn, and the host waits for a device
    when it asks for its value: so the last answer is kept, as long as it holds.
    """
    global _last_factor  # noqa: PLW0603
    if not isinstance(factor, torch.Tensor):
        return float(factor)
    if _last_factor is not None:
        last, version, number = _last_factor
        if last() is factor and version == factor._version:
            return number
    number = float(_everywhere(factor))
    if not factor.is_inference():
        _last_factor = weakref.ref(factor), factor._version, number
    return number


def _unscale(grads: list[OffloadedGradient], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Scale all, for GradScaler, and say whether any, on any rank, of any stage, was not finite before."""
    for store in dict.fromkeys(grad.store for grad in grads):
        sums = store.square_sums([grad.gradient for grad in grads if grad.store is store])
        overflows = store.stages.each(float(not all(map(math.isfinite, sums))), "loss scaling")
        if any(overflows):
            found_inf.fill_(1)
    number = float(inverse)
    for grad in grads:
        _scale(grad, number)
        grad.gradient.was_seen_finite()


def _add(grad: OffloadedGradient, new: Any, *, alpha: Any = 1) -> Any:
    """Accumulate, where autograd adds, or torch's pipelining in its place; a sum that others make is
    computed on
    dense values.
    """
    if (
        not (torch._C._current_graph_task_id() != -1 or pipelines.brings_gradients(sys._getframe(2)))
        or not isinstance(new, torch.Tensor)
        or isinstance(new, Thin)
        or alpha != 1
        or new.shape != grad.shape
    ):
        return NotImplemented
    if float(grad.gradient.scale) != 1:
        raise UnsupportedError(
            f"{grad.gradient.unit.name}: a gradient was clipped and then accumulated onto. Call zero_grad() "
            "between step() and the next "
            "backward, or clip after the last backward."
        )
    store = grad.store
    unit, index = grad.gradient.unit, grad.gradient.index
    new = part_of(unit.parameters[index], new, f"{unit.layout.segments[index].name}: its gradient")
    store.add(grad.gradient, store.received(plain(new)))
    return grad


def _zero_all(grads: list[OffloadedGradient]) -> None:
    for grad in grads:
        grad.zero()


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "linalg_vector_norm": _norm,
    "_foreach_norm": _norms,
    "mul_": _multiply,
    "_foreach_mul_": _multiply_all,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "add_": _add,
    "zero_": OffloadedGradient.zero,
    "_foreach_zero_": _zero_all,
    "detach": lambda grad: grad,
    "detach_": lambda grad: grad,
}

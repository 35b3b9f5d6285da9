"""The thin tensor that stands for a stored gradient as `p.grad`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from infinity.errors import NotResidentError, UnsupportedError
from infinity.gradient import GONE, Form, Gradient, applied_message
from infinity.gradient_store import GradientStore


class OffloadedGradient(torch.Tensor):
    """Stands for a stored gradient: clips, accumulates and zeroes it where it lies; anything else sees its
    dense values.
    """

    gradient: Gradient
    _store: weakref.ref[GradientStore]  # see gradient's note on what p.grad holds

    @staticmethod
    def __new__(  # noqa: PYI034 - torch makes it
        cls: type[OffloadedGradient], parameter: nn.Parameter, gradient: Gradient, store: GradientStore
    ) -> OffloadedGradient:
        """Make a tensor of the parameter's shape, dtype and device, without memory."""
        tensor: OffloadedGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        tensor.gradient, tensor._store = gradient, weakref.ref(store)
        return tensor

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
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """fp32 of an fp16 gradient, which is what it stands for: 16 bits times an fp32 factor. So GradScaler,
        which refuses to unscale gradients in 16 bits, unscales this one.
        """
        stored = self.gradient.unit.flat.dtype
        return torch.float32 if stored == torch.float16 else stored

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        """Where the gradient is."""
        return f"OffloadedGradient(shape={tuple(self.shape)}, {self.gradient.form.value})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` where the gradient lies if it can be, else on dense values, which it may not change."""
        name = func.overloadpacket.__name__
        special = _OPERATIONS.get(name)
        if special is not None:
            answer = special(*args, **(kwargs or {}))
            if answer is not NotImplemented:
                return answer
        if func._schema.is_mutable:
            raise UnsupportedError(
                f"{name}() on an offloaded gradient: only scaling, zeroing and accumulating change it in "
                "place. "
                "Assign a new tensor to p.grad instead."
            )
        args, kwargs = pytree.tree_map_only(
            cls, lambda grad: grad.store.dense(grad.gradient), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _norm(grad: OffloadedGradient, order: Any = 2, *rest: Any, **named: Any) -> Any:
    if order != 2 or rest or named:
        return NotImplemented
    return _norms([grad])[0]


def _norms(grads: list[OffloadedGradient], order: Any = 2, *rest: Any, **named: Any) -> Any:
    if order != 2 or rest or named:
        return NotImplemented
    sums: dict[int, float] = {}
    for store in dict.fromkeys(grad.store for grad in grads):
        ours = [grad.gradient for grad in grads if grad.store is store]
        sums.update(zip(map(id, ours), store.square_sums(ours), strict=True))
    return [
        torch.tensor(
            math.sqrt(sums[id(grad.gradient)]) * float(grad.gradient.scale),
            dtype=torch.float64,
            device=grad.device,
        )
        for grad in grads
    ]


def _scale(grad: OffloadedGradient, factor: Any) -> Any:
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        return NotImplemented
    if grad.gradient.form is Form.APPLIED:
        raise UnsupportedError(applied_message(grad.gradient.unit, "clipping"))
    grad.gradient.scale = np.float32(grad.gradient.scale * np.float32(float(factor)))
    return grad


def _scale_all(grads: list[OffloadedGradient], factor: Any) -> None:
    for grad in grads:
        _scale(grad, factor)


def _unscale(grads: list[OffloadedGradient], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """As GradScaler asks for it: scale all, and say whether any, on any rank, was not finite before."""
    for store in dict.fromkeys(grad.store for grad in grads):
        sums = store.square_sums([grad.gradient for grad in grads if grad.store is store])
        if not all(map(math.isfinite, sums)):
            found_inf.fill_(1)
    for grad in grads:
        _scale(grad, inverse)
        grad.gradient.checked = True


def _add(grad: OffloadedGradient, new: Any, *, alpha: Any = 1) -> Any:
    if (
        not isinstance(new, torch.Tensor)
        or isinstance(new, OffloadedGradient)
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
    store.add(grad.gradient, new if store.received is None else store.received(new))
    return grad


def _zero(grad: OffloadedGradient) -> OffloadedGradient:
    gradient = grad.gradient
    grad.gradient = gradient.fresh()
    return grad


def _zero_all(grads: list[OffloadedGradient]) -> None:
    for grad in grads:
        _zero(grad)


def _same(grad: OffloadedGradient) -> OffloadedGradient:
    return grad


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "linalg_vector_norm": _norm,
    "_foreach_norm": _norms,
    "mul_": _scale,
    "_foreach_mul_": _scale_all,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "add_": _add,
    "zero_": _zero,
    "_foreach_zero_": _zero_all,
    "detach": _same,
}
"""What runs where the gradient lies."""

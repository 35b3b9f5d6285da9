"""The thin tensor that stands for a stored gradient as `p.grad`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from infinity.errors import UnsupportedError
from infinity.gradients.gradient import Gradient
from infinity.gradients.store import GradientStore
from infinity.gradients.values import StoredGradient, Thin, run_on_values, store_changed
from infinity.units.unit import Unit


class OffloadedGradient(StoredGradient):
    """Stands for a stored gradient: clips, accumulates and zeroes it where it lies. Other operations work on
    its dense values; those that change them, also through a view, have them stored anew.
    """

    @staticmethod
    def __new__(  # noqa: PYI034 - torch makes it
        cls: type[OffloadedGradient], parameter: nn.Parameter, gradient: Gradient, store: GradientStore
    ) -> OffloadedGradient:
        """Make a tensor of the parameter's shape, dtype and device, without memory."""
        tensor: OffloadedGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        tensor.stand_for(gradient, store)
        return tensor

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
            store_changed(self, values.detach().clone(), "setting data of")

    def __repr__(self) -> str:  # type: ignore[override]
        """Where the gradient is."""
        return f"OffloadedGradient(shape={tuple(self.shape)}, {self.gradient.form.value})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` where the gradient lies if it can be, else on dense values."""
        special = _OPERATIONS.get(func.overloadpacket.__name__)
        if special is not None and _all_whole(args[0]):
            answer = special(*args, **(kwargs or {}))
            if answer is not NotImplemented:
                return answer
        return run_on_values(func, args, kwargs or {})


def _all_whole(grads: Any) -> bool:
    """Whether this is one gradient, or nothing but such: no view, and no ordinary tensor among them."""
    return all(isinstance(one, OffloadedGradient) for one in (grads if isinstance(grads, list) else [grads]))


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


def _multiply(grad: OffloadedGradient, factor: Any) -> Any:
    return _scale(grad, factor) if _clips() else NotImplemented


def _multiply_all(grads: list[OffloadedGradient], factor: Any) -> Any:
    if not _clips():
        return NotImplemented
    for grad in grads:
        _scale(grad, factor)
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


def _scale(grad: OffloadedGradient, factor: Any) -> OffloadedGradient:
    grad.gradient.check("clipping")
    grad.gradient.multiply(float(factor))
    return grad


def _unscale(grads: list[OffloadedGradient], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Scale all, for GradScaler, and say whether any, on any rank, was not finite before."""
    for store in dict.fromkeys(grad.store for grad in grads):
        sums = store.square_sums([grad.gradient for grad in grads if grad.store is store])
        if not all(map(math.isfinite, sums)):
            found_inf.fill_(1)
    for grad in grads:
        _scale(grad, inverse)
        grad.gradient.was_seen_finite()


def _add(grad: OffloadedGradient, new: Any, *, alpha: Any = 1) -> Any:
    """Accumulate, where autograd adds; a sum that others make is computed on dense values."""
    if (
        torch._C._current_graph_task_id() == -1
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
    store.add(grad.gradient, store.received(new))
    return grad


def _zero(grad: OffloadedGradient) -> OffloadedGradient:
    gradient = grad.gradient
    grad.stand_for(gradient.fresh())
    return grad


def _zero_all(grads: list[OffloadedGradient]) -> None:
    for grad in grads:
        _zero(grad)


def _same(grad: OffloadedGradient) -> OffloadedGradient:
    return grad


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "linalg_vector_norm": _norm,
    "_foreach_norm": _norms,
    "mul_": _multiply,
    "_foreach_mul_": _multiply_all,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "add_": _add,
    "zero_": _zero,
    "_foreach_zero_": _zero_all,
    "detach": _same,
    "detach_": _same,
}
"""What runs where the gradient lies."""

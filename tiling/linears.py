"""Linear layers inside a module that runs over slices of the sequence.

[Note: straight into the sums]
Autograd makes a whole weight's gradient for each slice before it can be added to those of the slices before.
A linear layer's is a product, which BLAS, or for bf16 a kernel of ours, adds to what is there: it needs no
room of its own, and of a 16-bit weight no rounding per slice (but where the CPU multiplies in 16 bits and no
kernel does it: results are rounded then, and added, a MiB at a time). So on the CPU, where that costs
nothing, calls of F.linear on the module's own parameters add theirs where the sums are. Slices of the batch
do not: micro-batches promise the bits of gradients that are accumulated one by one.

[Note: results that nobody reads]
An MLP ends with a linear layer. In backward its slices are computed again for what the gradients need, and
that layer's result is no part of it: of the MLP's twelve products one can be left out (torch's checkpoint has
an early stop for the same reason). So a forward notes which linear layers' results went out as they were,
read by no function of torch's on the way. The recomputation hands out NaNs in their place that take no
memory; a function that reads them then shows that the module does not do the same twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from infinity.tiling.mapped import BufferPool
from infinity.tiling.products import in_fp32, product
from infinity.tiling.sums import GradientSums

_PROPERTIES = ("shape", "dtype", "device", "requires_grad", "grad_fn", "is_leaf")
_ABOUT: set[Callable[..., Any]] = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES}
_ABOUT |= {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.register_hook}
"""Functions that ask about a tensor and do not read it: hooks may well call them in a recomputation alone."""


class Straight(TorchFunctionMode):
    """Inside the `with`, linear layers on the CPU compute as the notes above say.

    pool: for results. sums: None where there are no gradients. left_out: numbers of the layers, in the order
    of calls, whose results nobody reads.
    """

    def __init__(
        self, pool: BufferPool, sums: GradientSums | None, left_out: Collection[int | None] = ()
    ) -> None:
        super().__init__()
        self._pool = pool
        self._sums = sums
        self._left_out = left_out
        self._calls = 0
        self._unread: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch's: those that are linear layers our way.

        Raises: RuntimeError where it reads what was left out.
        """
        for one in () if func in _ABOUT else pytree.tree_leaves((args, kwargs)):
            if self._number(one) in self._left_out:
                raise RuntimeError(
                    f"{func.__name__} reads the result of linear layer {self._number(one)} in a slice that "
                    "is computed again, and did not at first: the module depends on more than its inputs and "
                    "torch's random numbers. Let it do the same twice, or do not run it in slices."
                )
            self._unread.pop(id(one), None)
        if func is F.linear and not kwargs and _is_ours(*args):
            x, weight, bias = (*args, None)[:3]
            flat = x.reshape(-1, x.shape[-1])
            layer = LeftOut if self._calls in self._left_out else Linear
            made = layer.apply(flat, weight, bias, self._sums, self._pool)  # type: ignore[no-untyped-call]
            made = made.view(*x.shape[:-1], weight.shape[0])
            self._unread[id(made)] = weakref.ref(made), self._calls
            self._calls += 1
            return made
        return func(*args, **(kwargs or {}))

    def unread(self, results: Sequence[torch.Tensor]) -> frozenset[int]:
        """Return the numbers of the layers whose results are among these and which no function has read."""
        numbers = map(self._number, results)
        return frozenset(number for number in numbers if number is not None)

    def _number(self, one: object) -> int | None:
        """Return the number of the layer that made a tensor which nobody has read."""
        made, number = self._unread.get(id(one), (None, None))
        return number if made is not None and made() is one else None


def _is_ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    plain = x.device.type == "cpu" and x.dtype == weight.dtype and not torch.is_autocast_enabled("cpu")
    fits = bias is None or bias.dtype == x.dtype
    return plain and fits and x.numel() > 0 and x.dtype.is_floating_point


class Linear(torch.autograd.Function):
    """x @ weight.T + bias, whose weight's gradient goes straight into the sums."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sums: GradientSums | None,
        pool: BufferPool,
    ) -> torch.Tensor:
        """Return [tokens, out] of x [tokens, in] and weight [out, in]."""
        ctx.save_for_backward(x, weight)
        ctx.sums, ctx.pool = sums, pool
        if bias is None or in_fp32(x):
            found = product(x, weight.t(), pool)
            return found if bias is None else found.add_(bias)
        out = pool.empty((len(x), len(weight)), x.dtype, x.device)
        return torch.addmm(bias, x, weight.t(), out=out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of x, of a weight that has no sum, and of the bias."""
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[1] and not ctx.sums.add_product(weight, grad.t(), x):
            of_weight = product(grad.t(), x)
        of_x = product(grad, weight, ctx.pool) if ctx.needs_input_grad[0] else None
        return of_x, of_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None, None


class LeftOut(Linear):
    """The same for the gradients alone: see [Note: results that nobody reads]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        _bias: torch.Tensor | None,
        sums: GradientSums | None,
        pool: BufferPool,
    ) -> torch.Tensor:
        """Return NaNs [tokens, out]."""
        ctx.save_for_backward(x, weight)
        ctx.sums, ctx.pool = sums, pool
        return x.new_full((), torch.nan).expand(len(x), len(weight))

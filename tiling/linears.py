"""Linear layers inside a module that runs over slices of the sequence.

[Note: straight into the sums]
Autograd makes a weight's whole gradient for each slice before it can be added to the sum over earlier slices.
A linear layer's weight gradient is a product, which BLAS (for bf16: a kernel of ours) can add to the sum
directly. That needs no memory for the product, and a 16-bit weight's gradient is not rounded per slice. (The
exception: a CPU that multiplies in 16 bits without a kernel of ours. Products are then rounded, and added, a
MiB at a time.) Calls of F.linear on the CPU with the module's own parameters are therefore replaced. Slices
of the batch do not do this: micro-batches promise the bits of gradients that are accumulated one by one.

[Note: results that nobody reads]
An MLP ends with a linear layer. The backward recomputes its slices for the values that gradients need, and
that layer's result is not one of them: one of the MLP's twelve products can be left out (torch's checkpoint
stops early for the same reason). So the forward records which linear layers' results left the module without
being read by any torch function. The recomputation returns NaNs for these, which take no memory. A function
that reads them then proves that the module does not compute the same thing twice, which is an error.
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
"""Functions that do not read a tensor's values. Hooks may call them in the recomputation only."""


class Straight(TorchFunctionMode):
    """Context in which linear layers on the CPU are computed as the notes above say.

    pool: memory for results. sums: None if there are no gradients. left_out: the layers whose results nobody
    reads, numbered in the order of their calls.
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
        """Run a torch function, replacing linear layers.

        Raises:
            RuntimeError: it reads a result that was left out.
        """
        for one in () if func in _ABOUT else pytree.tree_leaves((args, kwargs)):
            if self._number(one) in self._left_out:
                raise RuntimeError(
                    f"{func.__name__} reads the result of linear layer {self._number(one)} in the "
                    "recomputation of a slice, but did not in its forward: the module depends on more than "
                    "its inputs and torch's random numbers. Make it repeatable, or do not run it in slices."
                )
            self._unread.pop(id(one), None)
        if func is F.linear and not kwargs and _is_ours(*args):
            x, weight, bias = (*args, None)[:3]
            flat = x.reshape(-1, x.shape[-1])
            layer = LeftOut if self._calls in self._left_out else Linear
            result = layer.apply(flat, weight, bias, self._sums, self._pool)  # type: ignore[no-untyped-call]
            result = result.view(*x.shape[:-1], weight.shape[0])
            self._unread[id(result)] = weakref.ref(result), self._calls
            self._calls += 1
            return result
        return func(*args, **(kwargs or {}))

    def unread(self, results: Sequence[torch.Tensor]) -> frozenset[int]:
        """Return the numbers of the layers whose results are among `results` and were not read."""
        numbers = map(self._number, results)
        return frozenset(number for number in numbers if number is not None)

    def _number(self, one: object) -> int | None:
        """Return the number of the layer whose unread result `one` is; None for any other object."""
        result, number = self._unread.get(id(one), (None, None))
        return number if result is not None and result() is one else None


def _is_ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    plain = x.device.type == "cpu" and x.dtype == weight.dtype and not torch.is_autocast_enabled("cpu")
    fits = bias is None or bias.dtype == x.dtype
    return plain and fits and x.numel() > 0 and x.dtype.is_floating_point


class Linear(torch.autograd.Function):
    """x @ weight.T + bias; the weight's gradient is added straight into the sums."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sums: GradientSums | None,
        pool: BufferPool,
    ) -> torch.Tensor:
        """Return [tokens, out] for x [tokens, in] and weight [out, in]."""
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
        """Return the gradients of x, of the bias, and of a weight that has no sum."""
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[1] and not ctx.sums.add_product(weight, grad.t(), x):
            of_weight = product(grad.t(), x)
        of_x = product(grad, weight, ctx.pool) if ctx.needs_input_grad[0] else None
        return of_x, of_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None, None


class LeftOut(Linear):
    """Linear without its result, for the gradients only: see [Note: results that nobody reads]."""

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

"""Linear layers inside a module that runs over slices of the sequence.

[Note: straight into the sums]
Autograd makes a whole weight's gradient for each slice before it can be added to those of the slices before.
A linear layer's is a product, which BLAS adds to what is there: it needs no room of its own, and of a 16-bit
weight no rounding per slice. So on the CPU, where that costs nothing, calls of F.linear on the module's own
parameters add theirs where the sums are. Slices of the batch do not: micro-batches promise the bits of
gradients that are accumulated one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from infinity.tiling import mapped
from infinity.tiling.products import in_fp32, product, wide
from infinity.tiling.sums import Sums


class Straight(TorchFunctionMode):
    """Inside the `with`, linear layers on the CPU compute as [Note: straight into the sums] says.

    sums: None where there are no gradients.
    """

    def __init__(self, sums: Sums | None) -> None:
        super().__init__()
        self._sums = sums

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch's: those that are linear layers our way."""
        if func is F.linear and not kwargs and _is_ours(*args):
            x, weight, bias = (*args, None)[:3]
            flat = x.reshape(-1, x.shape[-1])
            return Linear.apply(flat, weight, bias, self._sums).view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _is_ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    plain = x.device.type == "cpu" and x.dtype == weight.dtype and not torch.is_autocast_enabled("cpu")
    fits = bias is None or bias.dtype == x.dtype
    return plain and fits and x.numel() > 0 and (wide(x.dtype) == x.dtype or in_fp32(x))


class Linear(torch.autograd.Function):
    """x @ weight.T + bias, whose weight's gradient goes straight into the sums."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sums: Sums | None
    ) -> torch.Tensor:
        """Return [tokens, out] of x [tokens, in] and weight [out, in]."""
        ctx.save_for_backward(x, weight)
        ctx.sums = sums
        if bias is None or in_fp32(x):
            found = product(x, weight.t())
            return found if bias is None else found.add_(bias)
        out = mapped.empty((len(x), len(weight)), x.dtype, x.device)
        return torch.addmm(bias, x, weight.t(), out=out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of x, of a weight that has no sum, and of the bias."""
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[1] and not ctx.sums.add_product(weight, grad.t(), x):
            of_weight = product(grad.t(), x)
        of_x = product(grad, weight) if ctx.needs_input_grad[0] else None
        return of_x, of_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None

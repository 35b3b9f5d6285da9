"""Sums the gradients of one sliced call.

[Note: memory of the sums]
A slice's gradients are added one parameter at a time, as autograd makes them, and each is freed at once. At
the end the sums are rounded one at a time, and each is freed before the next is rounded. Beyond the memory of
one slice, a backward in slices therefore holds the fp32 sums of one call; a single slice needs none. Sums and
rounded gradients are mapped: see [Note: mapped tensors] in mapped.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch

from infinity.tiling import mapped
from infinity.tiling.products import accumulate, add_product, wide


class GradientSums:
    """The gradients of one sliced call, summed over its slices; see [Note: memory of the sums].

    sliced, dims, wanted: for each input, whether it is cut, along which dimension, and whether its gradient
    is wanted. slices: their number.
    """

    def __init__(
        self,
        sliced: Sequence[bool],
        dims: Sequence[int],
        slices: int,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self._sliced, self._dims = sliced, dims
        self._inputs, self._wanted, self._parameters = inputs, wanted, parameters
        self._of_inputs: list[torch.Tensor | None] = [None] * len(inputs)
        self._of_parameters: list[torch.Tensor | None] = [None] * len(parameters)
        self._numbers = {id(one): number for number, one in enumerate(parameters)}
        self._alone = slices == 1

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Context in which the parameters' gradients are added to the sums as autograd makes them."""
        parameters = () if self._alone else self._parameters
        hooks = [
            one.register_hook(functools.partial(self._take, number)) for number, one in enumerate(parameters)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _take(self, number: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:  # it was added straight into the sums
            return None
        total = self._of_parameters[number]
        if total is None:  # a copy: autograd may use the same tensor elsewhere
            self._of_parameters[number] = _widened(grad)
        else:
            accumulate(total, grad)
        return grad.new_zeros(()).expand(grad.shape)

    def add_product(self, parameter: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Add left @ right to a parameter's sum; False if there is no sum for it (or only one slice)."""
        number = None if self._alone else self._numbers.get(id(parameter))
        if number is None:
            return False
        total = self._of_parameters[number]
        if total is None:
            total = mapped.zeros(parameter.shape, wide(parameter.dtype), parameter.device)
            self._of_parameters[number] = total
        add_product(total, left, right)
        return True

    def add(self, found: Sequence[torch.Tensor | None], start: int, size: int) -> None:
        """Add the gradients of one slice: of the wanted inputs, followed by the parameters'.

        The latter are used only if there is a single slice; with several, `taking` has added them.
        """
        rest = iter(found)
        for number, one in enumerate(self._inputs):
            grad = next(rest) if self._wanted[number] else None
            if grad is None or self._alone:
                self._of_inputs[number] = grad if self._alone else self._of_inputs[number]
            elif self._sliced[number]:
                if self._of_inputs[number] is None:
                    self._of_inputs[number] = mapped.zeros(one.shape, one.dtype, one.device)
                self._of_inputs[number].narrow(self._dims[number], start, size).copy_(grad)  # type: ignore[union-attr]
            elif (total := self._of_inputs[number]) is None:
                self._of_inputs[number] = _widened(grad)
            else:
                accumulate(total, grad)
        if self._alone:
            self._of_parameters = list(rest)

    def finished(self) -> list[torch.Tensor | None]:
        """Return the gradients of inputs and parameters, in their dtypes; the sums are not kept."""
        of_inputs = [_rounded(self._of_inputs, number, one) for number, one in enumerate(self._inputs)]
        return of_inputs + [
            _rounded(self._of_parameters, number, one) for number, one in enumerate(self._parameters)
        ]


def _widened(grad: torch.Tensor) -> torch.Tensor:
    return mapped.empty(grad.shape, wide(grad.dtype), grad.device).copy_(grad)


def _rounded(totals: list[torch.Tensor | None], number: int, like: torch.Tensor) -> torch.Tensor | None:
    total, totals[number] = totals[number], None
    if total is None or total.dtype == like.dtype:
        return total
    return mapped.empty(total.shape, like.dtype, total.device).copy_(total)

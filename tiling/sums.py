"""Gradients of one call in slices, added up.

[Note: room for sums]
A slice's gradients are added up one parameter at a time, as they come, and each is let go of at once. A sum
goes when it has been rounded, before the next is. So a backward in slices holds, beyond one slice, the fp32
sums of one call; one slice needs none. Sums and what they are rounded to are mapped: see [Note: mapped
tensors] in mapped.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from infinity.tiling import mapped
from infinity.tiling.products import accumulate, add_product, wide


class InputCuts(NamedTuple):
    """How the inputs of a call are cut."""

    sliced: Sequence[bool]  # for each, whether it is
    dims: Sequence[int]  # and where
    slices: int


class GradientSums:
    """Gradients of one sliced call, as its slices add to them; see [Note: room for sums]."""

    def __init__(
        self,
        cuts: InputCuts,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self._cuts, self._inputs, self._wanted, self._parameters = cuts, inputs, wanted, parameters
        self._of_inputs: list[torch.Tensor | None] = [None] * len(inputs)
        self._of_parameters: list[torch.Tensor | None] = [None] * len(parameters)
        self._numbers = {id(one): number for number, one in enumerate(parameters)}
        self._alone = cuts.slices == 1

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Take the parameters' gradients as they come, inside the `with`, and leave none of them."""
        taken: list[Any] = []
        if not self._alone:
            for number, one in enumerate(self._parameters):
                taken.append(one.register_hook(functools.partial(self._take, number)))
        try:
            yield
        finally:
            for one in taken:
                one.remove()

    def _take(self, number: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:  # it went straight into the sums
            return None
        total = self._of_parameters[number]
        if total is None:  # a copy: autograd may hand the same tensor to somebody else
            self._of_parameters[number] = _widened(grad)
        else:
            accumulate(total, grad)
        return grad.new_zeros(()).expand(grad.shape)

    def add_product(self, parameter: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Add left @ right to the gradient of a parameter; says whether that is one of several slices'."""
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
        """Take the gradients of one slice: of the wanted inputs, and, where there is but one slice, of the
        parameters, which come after them.
        """
        rest = iter(found)
        for number, one in enumerate(self._inputs):
            grad = next(rest) if self._wanted[number] else None
            if grad is None or self._alone:
                self._of_inputs[number] = grad if self._alone else self._of_inputs[number]
            elif self._cuts.sliced[number]:
                if self._of_inputs[number] is None:
                    self._of_inputs[number] = mapped.zeros(one.shape, one.dtype, one.device)
                self._of_inputs[number].narrow(self._cuts.dims[number], start, size).copy_(grad)  # type: ignore[union-attr]
            elif (total := self._of_inputs[number]) is None:
                self._of_inputs[number] = _widened(grad)
            else:
                accumulate(total, grad)
        if self._alone:
            self._of_parameters = list(rest)

    def finished(self) -> list[torch.Tensor | None]:
        """Return the sums, each in the dtype of what it is a gradient of; they are not kept."""
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

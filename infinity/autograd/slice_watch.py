"""Which of many slices an optimizer has to look at, so that a step need not ask each.

[Note: slices that are asked]
Of 100,000 slices a step uses a few thousand; to ask each whether it has a gradient, and is trained, takes a
tenth of a microsecond where it is in the CPU's caches, and four tenths where it is not. A slice comes to a
gradient in one of three ways: autograd accumulates it, and calls the engine; code assigns it while the slice
is released, which its guard sees; or code assigns it while the slice is attached, and then it is asked when
that ends. So those that may have a gradient are known, and these alone are asked. Whether any slice has been
frozen since is found in the same places, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class SliceWatch:
    """Knows the slices of one engine that may have a gradient. Used by the thread that computes."""

    def __init__(self) -> None:
        """There are no slices."""
        self._slices: set[int] = set()
        self._may_have: dict[int, nn.Parameter] = {}
        """By id()."""
        self._attached: dict[int, list[nn.Parameter]] = {}
        """The parameters of units that are attached now, by the id() of the first: assignments to these go
        unseen.
        """
        self.freezes = 0
        """How often any slice was found frozen, or may have been frozen since it was looked at."""

    def __len__(self) -> int:
        """Return how many slices there are."""
        return len(self._slices)

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter is a slice."""
        return id(parameter) in self._slices

    def follow(self, slices: Sequence[nn.Parameter]) -> None:
        """Follow these slices, too, which may have gradients by now."""
        self._slices.update(map(id, slices))
        self._may_have.update((id(one), one) for one in slices)
        self.freezes += 1

    def assigned(self, parameter: nn.Parameter, name: str) -> None:
        """Note that an attribute of a parameter, a slice or not, was assigned: "grad" or "requires_grad"."""
        if id(parameter) not in self._slices:
            return
        if name == "grad":
            self._may_have[id(parameter)] = parameter
        else:
            self.freezes += 1

    def gradient_came(self, parameter: nn.Parameter) -> None:
        """Note that autograd has brought a gradient of a parameter, a slice or not."""
        self.assigned(parameter, "grad")

    def attached(self, parameters: list[nn.Parameter]) -> None:
        """The parameters of a unit are attached: nobody sees what is assigned to them, until they are looked
        at.
        """
        self._attached[id(parameters[0])] = parameters

    def released(self, parameters: list[nn.Parameter]) -> None:
        """Look at the parameters of a unit that is about to be released."""
        self._attached.pop(id(parameters[0]), None)
        self._look(parameters)

    def _look(self, parameters: Sequence[nn.Parameter]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a gradient is no value: no guard need be asked
            for one in parameters:
                if one.grad is not None:
                    self._may_have[id(one)] = one
                if not one.requires_grad:
                    self.freezes += 1

    def with_gradients(self) -> list[nn.Parameter]:
        """Return the slices that have a gradient, in no order."""
        for parameters in self._attached.values():
            self._look(parameters)
        with torch._C.DisableTorchFunctionSubclass():  # as above
            having = [one for one in self._may_have.values() if one.grad is not None]
        if len(having) < len(self._may_have):
            self._may_have = {id(one): one for one in having}
        return having

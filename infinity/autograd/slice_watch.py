"""Which of many slices an optimizer has to look at, so that a step need not ask each.

[Note: slices that are asked]
Of 100,000 slices a step uses a few thousand; to ask each whether it has a gradient, and is trained, takes a
tenth of a microsecond where it is in the CPU's caches, and four tenths where it is not. A slice comes to a
gradient in one of three ways: autograd accumulates it, and calls the engine; code assigns it while the slice
is released, which its guard sees; or code assigns it while the slice is attached, and then it is asked when
gradients are looked for next. So those that may have a gradient are known, and these alone are asked. Whether
any slice has been frozen since is found in the same places, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from infinity.units.unit import Unit


class SliceWatch:
    """Knows the slices of one engine that may have a gradient. Used by the thread that computes."""

    def __init__(self) -> None:
        """There are no slices."""
        self._slices: set[int] = set()
        self._may_have: dict[int, nn.Parameter] = {}
        """By id()."""
        self._used: dict[Unit, None] = {}
        """Units that are attached, or were since gradients were last looked for: what was assigned to their
        parameters meanwhile went unseen.
        """
        self.freezes = 0
        """How often any slice was found frozen, or may have been frozen, when gradients were last looked for.
        """

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
        if id(parameter) in self._slices:
            self._may_have[id(parameter)] = parameter

    def attached(self, unit: Unit) -> None:
        """The parameters of a unit are attached: nobody sees what is assigned to them from now on, so that
        they are looked at until they are released, and once more.
        """
        self._used[unit] = None

    @property
    def any_attached(self) -> bool:
        """Whether any slices are attached now: only those can be in use."""
        return any(unit.attached for unit in self._used)

    def with_gradients(self) -> list[nn.Parameter]:
        """Return the slices that have a gradient, in no order."""
        having: dict[int, nn.Parameter] = {}
        with torch._C.DisableTorchFunctionSubclass():  # a gradient is no value: no guard need be asked
            for unit in self._used:
                for one in unit.parameters:
                    if one.grad is not None:
                        having[id(one)] = one
                    if not one.requires_grad:
                        self.freezes += 1
            for key, one in self._may_have.items():
                if key not in having and one.grad is not None:
                    having[key] = one
        self._used = {unit: None for unit in self._used if unit.attached}
        self._may_have = having
        return list(having.values())

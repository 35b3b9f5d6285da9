"""Which of many slices an optimizer has to look at, so that a step need not ask each.

[Note: slices that are asked]
Of 100,000 slices a step uses a few thousand; to ask each whether it has a gradient, and is trained, takes a
tenth of a microsecond where it is in the CPU's caches, and four tenths where it is not. A slice comes to a
gradient in one of three ways: autograd accumulates it, and calls the engine; code assigns it while the slice
is released, which its guard sees; or code assigns it while the slice is attached, and then it is seen when
the slice is released, while it is in the caches, or, if it is still attached, when gradients are looked for.
So those that may have a gradient are known, and these alone are asked. Whether any slice has been frozen
since is found in the same places, and counted.

A slice is known by its number, its place among all that are followed: of numbers in order, what a step does
with each slice is one operation on arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from infinity.planning.densest import Integers
from infinity.units.unit import Unit


class SliceWatch:
    """Knows the slices of one engine that may have a gradient. Used by the thread that computes."""

    def __init__(self) -> None:
        """There are no slices."""
        self._slices: list[nn.Parameter] = []
        self._numbers: dict[int, int] = {}
        """By id()."""
        self._may_have = array("q")
        """Numbers, some more than once."""
        self._found: Integers = np.zeros(0, np.int64)
        """Those that were there when `may_have` last looked, each once, in order: a step asks thrice. There
        are others where there are more numbers.
        """
        self.gradient_came = self._may_have.append
        """Called with the number of a slice whose gradient autograd has brought: too often for a function."""
        self.attached: set[Unit] = set()
        """Units enter themselves as long as they are attached: what is assigned to their parameters goes
        unseen. After an interrupt one may be here that is not.
        """
        self.freezes = 0
        """How often any slice was found frozen, or may have been frozen, so far."""

    def __len__(self) -> int:
        """Return how many slices there are."""
        return len(self._slices)

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter is a slice."""
        return id(parameter) in self._numbers

    def number(self, parameter: nn.Parameter) -> int:
        """Return a slice's number; -1 for what is no slice."""
        return self._numbers.get(id(parameter), -1)

    def slices(self, numbers: Iterable[int]) -> Iterable[nn.Parameter]:
        """Return slices by their numbers."""
        return map(self._slices.__getitem__, numbers)

    def follow(self, slices: Sequence[nn.Parameter]) -> None:
        """Follow these slices, too, which may have gradients by now."""
        new = [one for one in slices if id(one) not in self._numbers]
        self._numbers.update((id(one), number) for number, one in enumerate(new, len(self._slices)))
        self._slices += new
        for one in slices:
            self.gradient_came(self._numbers[id(one)])
        self.freezes += 1

    def assigned(self, parameter: nn.Parameter, name: str) -> None:
        """Note that an attribute of a parameter, a slice or not, was assigned: "grad" or "requires_grad"."""
        number = self._numbers.get(id(parameter))
        if number is None:
            return
        if name == "grad":
            self.gradient_came(number)
        else:
            self.freezes += 1

    def look(self, unit: Unit) -> None:
        """See whether slices of a unit that is attached, or about to be released, have gradients, or are
        frozen.
        """
        numbers = unit.slice_numbers
        for index, one in enumerate(unit.parameters):
            if (number := numbers[index]) >= 0:
                if one.grad is not None:
                    self.gradient_came(number)
                if not one.requires_grad:
                    self.freezes += 1

    @property
    def any_attached(self) -> bool:
        """Whether any slices are attached now: only those can be in use."""
        return any(unit.attached for unit in self.attached)

    def may_have(self) -> Integers:
        """Return the numbers of the slices that may have a gradient, in order: no other has one."""
        if self.attached:
            with torch._C.DisableTorchFunctionSubclass():  # a gradient is no value: no guard need be asked
                for unit in self.attached:
                    self.look(unit)
            self.attached.intersection_update([unit for unit in self.attached if unit.attached])
        if len(self._may_have) != len(self._found):
            numbers = np.sort(np.array(self._may_have, np.int64))
            other = numbers[1:] != numbers[:-1]
            if not other.all():
                numbers = np.concatenate([numbers[:1], numbers[1:][other]])
            self._keep(numbers)
        return self._found

    def _keep(self, numbers: Integers) -> None:
        """These, in order, are all that may have a gradient."""
        self._found = numbers  # first: after an interrupt here, it is looked again
        if len(numbers) != len(self._may_have):
            self._may_have[:] = array("q", numbers.tobytes())

    def with_gradients(self) -> Integers:
        """Return the numbers of those that have one, in order."""
        asked, slices = self.may_have(), self._slices
        with torch._C.DisableTorchFunctionSubclass():  # as above
            having = [number for number in asked.tolist() if slices[number].grad is not None]
        if len(having) < len(asked):
            self._keep(np.array(having, np.int64))
        return self._found

    def dropped(self, numbers: Integers) -> None:
        """The gradients of these slices, of those that may have one, were dropped."""
        left = self.may_have()
        self._keep(np.setdiff1d(left, numbers) if len(left) > len(numbers) else left[:0])

    def note_once(self) -> None:
        """Keep each number once: backwards may have brought many gradients of a slice without a step."""
        if len(self._may_have) > len(self._slices):
            self.may_have()

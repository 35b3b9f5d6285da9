"""Updates that step() has decided and no pass over the record has applied yet."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from infinity.records.update_rules import ADAMW, Recipe
from infinity.storage.store import DONE, Future


class Update(NamedTuple):
    """The update of one parameter: the step's scalars, and where the gradient is.

    tensor: the gradient in host memory, contiguous, 16-bit or fp32, valid once `arriving` has ended. field:
    else the record's field that holds it. Neither: a gradient of zeros. key: of the random bits that round
    16- and 8-bit state; see kernels. missed, after: scalars and keys of the steps just before this one, and
    just after it, whose gradients were zeros; see [Note: missed steps] in optim. recipe: the optimizer's
    update rule.
    """

    scalars: Any
    tensor: torch.Tensor | None
    field: str | None
    key: int = 0
    arriving: Future = DONE
    missed: tuple[tuple[Any, int], ...] = ()
    recipe: Recipe = ADAMW
    holder: object = None
    """What the budget's bytes of `tensor` are charged to, or what tells one that is to be in `field`:
    p.grad may be gone before the update is applied.
    """
    on_device: bool = False
    """Whether `tensor` is on the accelerator, as those of units that live there."""
    after: tuple[tuple[Any, int], ...] = ()

    @property
    def has_gradient(self) -> bool:
        """Whether its gradient is other than zeros."""
        return self.tensor is not None or self.field is not None

    @property
    def is_plain(self) -> bool:
        """Whether its gradient lies in the record, and no steps were missed before it or after it."""
        return self.field is not None and not self.missed and not self.after

    @property
    def may_miss(self) -> bool:
        """Whether steps with gradients of zeros may wait and be made together: not where each needs the whole
        matrix that the one before has left.
        """
        return self.recipe.matrices is None

    @property
    def misses(self) -> float:
        """Steps with gradients of zeros; infinity with a gradient in host memory, which may not wait."""
        if self.tensor is not None:
            return math.inf
        return len(self.missed) + (self.field is None) + len(self.after)

    def then_missed(self, steps: Sequence[tuple[Any, int]]) -> Update:
        """Return this update with further steps, by their scalars and keys, whose gradients are zeros."""
        if self.has_gradient:
            after = (*self.after, *steps) if self.after else tuple(steps)
            values: tuple[Any, ...] = self[:-1] + (after,)  # noqa: RUF005 - in half the time
            return tuple.__new__(Update, values)  # thousands: a fifth of what _replace takes
        *missed, (scalars, key) = steps
        earlier = (*self.missed, (self.scalars, self.key), *missed)
        return self._replace(scalars=scalars, key=key, missed=earlier)

    @staticmethod
    def of_zeros(steps: Sequence[tuple[Any, int]], recipe: Recipe) -> Update:
        """Return an update of steps, by their scalars and keys, whose gradients are zeros."""
        *missed, (scalars, key) = steps
        return Update(scalars, None, None, key, missed=tuple(missed), recipe=recipe)


class MissedUpdates(Protocol):
    """Knows what parameters have missed, which is told when somebody looks at what is pending."""

    def tell(self, numbers: Iterable[int]) -> None:
        """Add the updates that parameters have missed to what is pending for their units. numbers: by which
        they are known here.
        """

    def owes(self, number: int) -> bool:
        """Whether a parameter has missed, or is to miss, updates that it was not told of."""


class PendingUpdates(dict[int, Update]):
    """A unit's updates by parameter's index, from step() until the pass that applies them is queued; and who
    knows what those of its parameters that are slices have missed, which is added when somebody looks.
    """

    __slots__ = ("_index", "_known", "_number", "_others", "_plain", "begun", "owes")

    def __init__(self, updates: Mapping[int, Update] = MappingProxyType({})) -> None:
        """Begin with `updates`, of parameters that miss none."""
        super().__init__(updates)
        self.owes = False
        """Whether any parameter has missed updates that are not here yet."""
        self.begun = 0
        """How often any began to miss updates, which changes the values that the user can see."""
        self._known: MissedUpdates | None = None
        self._index = self._number = -1
        """Who knows what a parameter has missed, its index, and the number by which it is known. A slice has
        most often a unit of its own: here, it is found with the fewest looks at memory that the CPU's
        caches do not hold.
        """
        self._others: dict[int, tuple[MissedUpdates, int]] | None = None
        """The same of further parameters."""
        self._plain = False
        """Whether each is known to be plain: thousands of slices begin to miss steps, and to look at what
        is pending for each would take most of the time.
        """

    def put(self, index: int, update: Update) -> bool:
        """Have an update be pending for a parameter; return whether it is plain. Whoever decides updates
        calls this: an assignment would go unseen.
        """
        plain = update.is_plain
        all_plain = plain and (self._plain or not self or (len(self) == 1 and index in self))
        self._plain = False  # first: a Ctrl-C may come
        self[index] = update
        self._plain = all_plain
        return plain

    def may_miss(self, index: int, missed: MissedUpdates, number: int) -> None:
        """Have `missed` asked from now on what a parameter has missed, which it knows by `number`."""
        if self.owes:
            self.tell()  # what was known of it before
        if self._known is None or self._index == index:
            self._known, self._index, self._number = missed, index, number
        else:
            self._others = {**(self._others or {}), index: (missed, number)}

    def owe(self) -> bool:
        """A parameter begins to miss updates; return whether all that is pending now is known to be plain."""
        self.begun += 1
        self.owes = True
        return self._plain

    def about_to_tell(self, numbers: defaultdict[MissedUpdates, list[int]]) -> None:
        """Add to `numbers`, by who knows what they have missed, those of parameters that are slices."""
        self._plain = False
        if self._known is not None:
            numbers[self._known].append(self._number)
        for missed, number in self._others.values() if self._others else ():
            numbers[missed].append(number)

    def tell(self) -> None:
        """Add what slices have missed."""
        numbers: defaultdict[MissedUpdates, list[int]] = defaultdict(list)
        self.about_to_tell(numbers)
        for missed, some in numbers.items():
            missed.tell(some)
        self.owes = False  # last: a Ctrl-C may come before, and what is told is told once

    @property
    def owes_all(self) -> bool:
        """Whether all that is pending is of parameters that miss more steps meanwhile."""
        return self.owes and all(map(self._owes, self))

    def _owes(self, index: int) -> bool:
        if self._known is not None and index == self._index:
            return self._known.owes(self._number)
        known = None if self._others is None else self._others.get(index)
        return known is not None and known[0].owes(known[1])

    def take(self) -> dict[int, Update]:
        """Remove all updates and return them; the caller has to apply them, or put them back."""
        taken = dict(self)
        self.clear()
        return taken

    def put_back(self, taken: Mapping[int, Update]) -> None:
        """Undo `take`, for a pass that was not queued; updates decided since then stay."""
        self._plain = False
        for index, update in taken.items():
            self.setdefault(index, update)

    @staticmethod
    def tell_together(several: Iterable[PendingUpdates]) -> None:
        """Have all of them tell what slices have missed, those of one stack at once."""
        owing = [one for one in several if one.owes]
        numbers: defaultdict[MissedUpdates, list[int]] = defaultdict(list)
        for one in owing:
            one.about_to_tell(numbers)
        for missed, some in numbers.items():
            missed.tell(some)
        for one in owing:
            one.owes = False  # last: as in `tell`

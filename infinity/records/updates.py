"""Updates that step() has decided and no pass over the record has applied yet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
            return tuple.__new__(Update, (*self[:-1], after))  # thousands: a fifth of what _replace takes
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

    def tell(self, pending: PendingUpdates, index: int, number: int) -> None:
        """Add the updates that a parameter of a unit, by its index there, has missed to what is pending for
        the unit. number: by which the parameter is known here.
        """


class PendingUpdates(dict[int, Update]):
    """A unit's updates by parameter's index, from step() until the pass that applies them is queued."""

    def take(self) -> dict[int, Update]:
        """Remove all updates and return them; the caller has to apply them, or put them back."""
        taken = dict(self)
        self.clear()
        return taken

    def put_back(self, taken: Mapping[int, Update]) -> None:
        """Undo `take`, for a pass that was not queued; updates decided since then stay."""
        for index, update in taken.items():
            self.setdefault(index, update)

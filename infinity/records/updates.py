"""What step() has decided for parameters, and no pass over their record has applied yet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infinity.records.update_rules import ADAMW, Recipe
from infinity.storage.store import DONE, Future


@dataclass(frozen=True, slots=True)
class Update:
    """What step() decided for one parameter: the step's scalars, and where the gradient is.

    tensor: the gradient in host memory, contiguous, 16-bit or fp32, once `arriving` is over. field: else the
    record's field that holds it. Neither: a gradient of zeros. key: of the random bits that round a 16- or
    8-bit state; see kernels. missed: scalars and keys of the steps before this one, whose gradients were all
    zero; see optim. recipe: of the optimizer.
    """

    scalars: Any
    tensor: torch.Tensor | None
    field: str | None
    key: int = 0
    arriving: Future = DONE
    missed: tuple[tuple[Any, int], ...] = ()
    recipe: Recipe = ADAMW

    @property
    def misses(self) -> float:
        """Steps with gradients of zeros in a row up to this one; infinity if this one has a gradient."""
        return math.inf if self.tensor is not None or self.field is not None else 1 + len(self.missed)


class PendingUpdates(dict[int, Update]):
    """A unit's updates by parameter, from step() on until the pass that applies them is queued."""

    def take(self) -> dict[int, Update]:
        """Return them all, which are its caller's from now on."""
        taken = dict(self)
        self.clear()
        return taken

    def put_back(self, taken: Mapping[int, Update]) -> None:
        """Undo `take`, where what was to apply them was not queued; what was decided since stays."""
        for index, update in taken.items():
            self.setdefault(index, update)

"""Values of released parameters, held aside for one operation alone, outside forward and backward.

PEFT's DoRA takes the norms of each weight that it adapts when the adapter is made: layer after layer, a few
operations each, in code that knows nothing of `gathered`. To gather the whole base for that would hold it in
memory. So each of these operations has the values of its layer, and what it gives is memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Aside:
    """What an owner answers with, if an operation is to run on values that are there for it alone."""

    def __init__(self, holding: Callable[[], AbstractContextManager[None]]) -> None:
        """holding: gives what keeps the values present."""
        self._holding = holding

    def answer(self, parameters: Sequence[torch.Tensor], run: Callable[[], Any]) -> Any:
        """Return what `run` gives while the parameters have their values, in memory of its own."""
        with self._holding():
            storages = {one.untyped_storage()._cdata for one in parameters}

            def own(one: Any) -> Any:
                shares = isinstance(one, torch.Tensor) and one.untyped_storage()._cdata in storages
                return one.detach().clone() if shares else one

            return pytree.tree_map(own, run())

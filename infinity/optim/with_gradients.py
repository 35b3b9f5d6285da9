"""Which parameters of an optimizer have a gradient, without asking each of many slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from infinity.autograd.slice_watch import SliceWatch

_grad: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")


class _NoneEqual(TorchFunctionMode):
    """In which no tensor equals another, whatever their values, which nobody looks at."""

    def __torch_function__(self, *_args: Any, **_named: Any) -> bool:
        return False


class WithGradients:
    """Finds them in the param groups of one optimizer; see [Note: slices that are asked] in
    autograd/slice_watch.py.
    """

    def __init__(self) -> None:
        """Know no groups."""
        self.sorts = 0
        """How often parameters were sorted, since groups or slices were others than before."""
        self._lists: list[tuple[list[nn.Parameter], list[nn.Parameter]]] = []
        """The list of each group, and what was in it."""
        self._watched: list[tuple[SliceWatch, int]] = []
        self._others: list[tuple[list[int], list[nn.Parameter]]] = []
        """Of each group what is no slice, after its place in the order of all parameters."""
        self._slices: dict[int, tuple[int, int]] = {}
        """Place and group of each slice, by its id()."""

    def of(
        self, groups: Sequence[dict[str, Any]], watches: Sequence[SliceWatch]
    ) -> list[tuple[dict[str, Any], nn.Parameter]]:
        """Return the parameters that have a gradient, with their groups, in order. watches: of all slices."""
        self.sort(groups, watches)
        return self.as_sorted(groups, watches)

    def as_sorted(
        self, groups: Sequence[dict[str, Any]], watches: Sequence[SliceWatch]
    ) -> list[tuple[dict[str, Any], nn.Parameter]]:
        """Do so right after `sort`, which compares all parameters with those that it knows."""
        having: list[tuple[int, int, nn.Parameter]] = []
        with torch._C.DisableTorchFunctionSubclass():  # a gradient is no value: no guard need be asked
            for number, (places, others) in enumerate(self._others):
                each = zip(places, others, map(_grad, others), strict=True)
                having += [(place, number, one) for place, one, grad in each if grad is not None]
        places_of = self._slices.get
        for watch in watches:
            slices = watch.with_gradients()
            having += [(*found, one) for one in slices if (found := places_of(id(one))) is not None]
        having.sort(key=itemgetter(0))
        return [(groups[number], one) for _, number, one in having]

    def in_no_order(
        self, groups: Sequence[dict[str, Any]], watches: Sequence[SliceWatch]
    ) -> list[nn.Parameter]:
        """Return the parameters that have a gradient."""
        self.sort(groups, watches)
        with torch._C.DisableTorchFunctionSubclass():  # as above
            having = [one for _, others in self._others for one in others if one.grad is not None]
        slices = [one for watch in watches for one in watch.with_gradients()]
        return having + [one for one in slices if id(one) in self._slices]

    def sort(self, groups: Sequence[dict[str, Any]], watches: Sequence[SliceWatch]) -> None:
        """Tell slices from the others, and know where each is, where anything of that has changed."""
        lists = [group["params"] for group in groups]
        if self._watched == [(one, len(one)) for one in watches] and self._are(lists):
            return
        self._others, self._slices, place = [], {}, 0
        for number, one_list in enumerate(lists):
            places: list[int] = []
            others: list[nn.Parameter] = []
            for one in one_list:
                if any(one in watch for watch in watches):
                    self._slices[id(one)] = place, number
                else:
                    places.append(place)
                    others.append(one)
                place += 1
            self._others.append((places, others))
        self._lists = [(one, list(one)) for one in lists]
        self._watched = [(one, len(one)) for one in watches]
        self.sorts += 1

    def _are(self, lists: Sequence[list[nn.Parameter]]) -> bool:
        """Whether these are the lists that were sorted, with the same members in the same order. Equal lists
        are found so without a look at any member, of which there may be many.
        """
        if len(lists) != len(self._lists):
            return False
        with _NoneEqual():
            return all(
                one is known and one == before
                for one, (known, before) in zip(lists, self._lists, strict=True)
            )

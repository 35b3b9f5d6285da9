"""Which parameters of an optimizer have a gradient, without asking each of many slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from infinity.autograd.slice_watch import SliceWatch
from infinity.planning.densest import Integers

_grad: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")


class _NoneEqual(TorchFunctionMode):
    """In which no tensor equals another, whatever their values, which nobody looks at."""

    def __torch_function__(self, *_args: Any, **_named: Any) -> bool:
        return False


class _Places:
    """Where the slices of one watch are in an optimizer, by their numbers in the watch."""

    def __init__(self, place_of: Integers, group_of: Integers) -> None:
        """place_of: in the order of all parameters; -1 for what is no member. group_of: the param group."""
        self._place_of, self._group_of = place_of, group_of
        count, first = len(place_of), int(place_of[0]) if len(place_of) else -1
        in_row = first >= 0 and bool(np.array_equal(place_of, np.arange(first, first + count)))
        self._in_row = in_row and bool((group_of == group_of[0]).all())
        """Whether all are members of one group, one behind the other: then nothing is looked up."""

    def members(self, numbers: Integers) -> Integers:
        """Return those of these slices that the optimizer has."""
        return numbers if self._in_row else numbers[self._place_of[numbers] >= 0]

    def places(self, members: Integers) -> Integers:
        """Return their places in the order of all parameters."""
        return members + self._place_of[0] if self._in_row else self._place_of[members]

    def groups(self, members: Integers) -> list[int]:
        """Return the numbers of their groups."""
        if self._in_row:
            return [int(self._group_of[0])] * len(members)
        groups: list[int] = self._group_of[members].tolist()
        return groups


class WithGradients:
    """Finds them in the param groups of one optimizer; see [Note: slices that are asked] in
    autograd/slice_watch.py.
    """

    def __init__(self) -> None:
        """Know no groups."""
        self.sorts = 0
        """How often parameters were sorted, since groups or slices were others than before."""
        self.slices: list[Integers] = []
        """Of each watch the numbers of the slices that `as_sorted` has found."""
        self._lists: list[tuple[list[nn.Parameter], list[nn.Parameter]]] = []
        """The list of each group, and what was in it."""
        self._watched: list[tuple[SliceWatch, int]] = []
        self._others: list[tuple[list[int], list[nn.Parameter]]] = []
        """Of each group what is no slice, after its place in the order of all parameters."""
        self._places: list[_Places] = []
        """Of the slices of each watch."""

    def of(
        self, groups: Sequence[dict[str, Any]], watches: Sequence[SliceWatch]
    ) -> list[tuple[dict[str, Any], nn.Parameter]]:
        """Return the parameters that have a gradient, with their groups, in order. watches: of all slices."""
        self.sort(groups, watches)
        return list(zip(*self.as_sorted(groups, watches), strict=True))

    def as_sorted(
        self, groups: Sequence[dict[str, Any]], watches: Sequence[SliceWatch], *, asks: bool = True
    ) -> tuple[list[dict[str, Any]], list[nn.Parameter]]:
        """Return the groups, and the parameters, right after `sort`, which compares all parameters with those
        that it knows. asks: each slice; else some have no gradient, where the user has dropped it, and who is
        given them asks. No pairs: of thousands Python's garbage collection takes most of the time.
        """
        having: list[nn.Parameter] = []
        places: list[int] = []
        of_group: list[int] = []
        with torch._C.DisableTorchFunctionSubclass():  # a gradient is no value: no guard need be asked
            for number, (places_of, others) in enumerate(self._others):
                found = [at for at, grad in enumerate(map(_grad, others)) if grad is not None]
                having += [others[at] for at in found]
                places += [places_of[at] for at in found]
                of_group += [number] * len(found)
        self.slices, all_places = [], [np.array(places, np.int64)]
        for watch, its_places in zip(watches, self._places, strict=True):
            numbers = its_places.members(watch.with_gradients() if asks else watch.may_have())
            self.slices.append(numbers)
            having += watch.slices(numbers.tolist())
            of_group += its_places.groups(numbers)
            all_places.append(its_places.places(numbers))
        in_order = np.concatenate(all_places)
        if (in_order[1:] < in_order[:-1]).any():
            order = np.argsort(in_order).tolist()
            having, of_group = [having[at] for at in order], [of_group[at] for at in order]
        return [groups[number] for number in of_group], having

    def that_may_have(
        self, groups: Sequence[dict[str, Any]], watches: Sequence[SliceWatch]
    ) -> list[nn.Parameter]:
        """Return parameters that may have a gradient, in no order: no other has one."""
        self.sort(groups, watches)
        may_have = [one for _, others in self._others for one in others]
        for watch, numbers in self._own(watches):
            may_have += watch.slices(numbers.tolist())
        return may_have

    def dropped(self, watches: Sequence[SliceWatch]) -> None:
        """The gradients of all these were dropped."""
        for watch, numbers in self._own(watches):
            watch.dropped(numbers)

    def _own(self, watches: Sequence[SliceWatch]) -> Iterator[tuple[SliceWatch, Integers]]:
        """Yield the watches with the numbers of those members that may have a gradient."""
        for watch, its_places in zip(watches, self._places, strict=True):
            yield watch, its_places.members(watch.may_have())

    def sort(self, groups: Sequence[dict[str, Any]], watches: Sequence[SliceWatch]) -> None:
        """Tell slices from the others, and know where each is, where anything of that has changed."""
        lists = [group["params"] for group in groups]
        if self._watched == [(one, len(one)) for one in watches] and self._are(lists):
            return
        self._others, place = [], 0
        places_of = [(np.full(len(one), -1), np.full(len(one), -1)) for one in watches]
        for number, one_list in enumerate(lists):
            places: list[int] = []
            others: list[nn.Parameter] = []
            for one in one_list:
                found = [at for at, watch in enumerate(watches) if one in watch]
                for at in found:
                    place_of, group_of = places_of[at]
                    in_watch = watches[at].number(one)
                    place_of[in_watch], group_of[in_watch] = place, number
                if not found:
                    places.append(place)
                    others.append(one)
                place += 1
            self._others.append((places, others))
        self._places = [_Places(*one) for one in places_of]
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

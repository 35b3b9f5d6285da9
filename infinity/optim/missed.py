"""Steps that slices of a stack miss: noted once for the stack, and told to a slice when somebody asks.

[Note: steps of a stack]
Where any slice of a stack gets a gradient in a step, all others have one of zeros; of 10^5 slices a step uses
a few thousand. So a step is noted once, with the options of the param groups as they then are, and a slice
only knows since which step it has missed all. It is told what it missed, as updates with its unit and as a
count of its steps, as soon as anybody looks at the unit's pending updates: at its next use, a flush, a save,
a commit, or where `optimizer.state` is read. Then it is level with its stack. What a step does with each
slice it does with those alone that were level: used since the last step, or looked at. These begin to miss
steps, and their versions are raised, so that graphs of before end. Later steps need not raise them: nobody
has seen the slice since.

A slice is told at the latest when it would have more steps to replay than it may: see [Note: missed steps] in
base. Steps that nobody still has to be told of are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity import kernels
from infinity.records.update_rules import Recipe
from infinity.records.updates import PendingUpdates, Update
from infinity.units.unit import Unit

MISSED_LIMIT = 100
"""Steps with gradients of zeros that may wait for a pass over the record: see [Note: missed steps] in base.
"""

_trained: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")


def most_misses(unit: Unit) -> int:
    """Return how many steps a unit may miss: not all the same, so that not all are fetched in one step."""
    return MISSED_LIMIT - unit.index % max(1, MISSED_LIMIT // 4)


class Slice(NamedTuple):
    """One parameter of a stack, and where it is. It leads to no engine: passes that are under way have units,
    which lead to what they have missed.
    """

    parameter: nn.Parameter
    unit: Unit
    at: int
    """Its index there."""
    group: int
    position: int
    """Of its optimizer: the param group, and the place in the order of all parameters."""
    may_wait: bool
    """Whether steps that it misses may wait and be made together: see Update.may_miss."""


class MissedStep:
    """What a step does to a slice without a gradient, by its param group and the count of its own steps."""

    def __init__(self, clip: float, seed: int) -> None:
        """clip: the factor on all gradients. seed: of the random bits that round state."""
        self._clip, self.seed = clip, seed
        self._groups: dict[int, tuple[Recipe, Mapping[str, Any]]] = {}
        self._scalars: dict[tuple[int, int], Any] = {}

    def keep(self, group: int, recipe: Recipe, options: Mapping[str, Any], count: int) -> None:
        """Keep a group's options as they are now. count: the step of one of its slices.

        Raises: ValueError for options out of range.
        """
        own = {name: _own(value) for name, value in options.items() if name != "params"}
        self._scalars[group, count] = recipe.scalars(own, count, self._clip)
        self._groups[group] = recipe, own

    def has(self, group: int) -> bool:
        """Whether a group's options are kept."""
        return group in self._groups

    def recipe(self, group: int) -> Recipe:
        """Return a group's update rule."""
        return self._groups[group][0]

    def scalars(self, group: int, count: int) -> Any:
        """Return the scalars of a slice of a group for which this is the step `count`."""
        found = self._scalars.get((group, count))
        if found is None:
            recipe, options = self._groups[group]
            found = self._scalars[group, count] = recipe.scalars(options, count, self._clip)
        return found


def _own(value: Any) -> Any:
    """Return a value that nobody else changes in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return type(value)(map(_own, value)) if type(value) in (list, tuple) else value


class Stack:
    """The slices of one stack that one optimizer has, and the steps that they miss."""

    def __init__(self, slices: Sequence[Slice], counts: dict[Any, dict[str, int]]) -> None:
        """All are level. counts: the optimizer's, by parameter, for whoever is told. A slice is known by its
        number, its place among `slices`.
        """
        self._slices, self._counts = list(slices), counts
        self._parameters = [one.parameter for one in slices]
        self._ids = list(map(id, self._parameters))
        self._numbers = {one: number for number, one in enumerate(self._ids)}
        self._limits = [most_misses(one.unit) for one in slices]
        self._alone = all(len(one.unit.parameters) == 1 for one in slices)
        """Whether no slice shares its unit with other parameters, which may miss steps, too."""
        self._all_here = not any(one.unit.record.is_elsewhere for one in slices)
        self._all_exact = all(one.unit.record.schema.is_exact for one in slices)
        """Whether the state of none is rounded at random."""
        self._groups = {one.group: one.parameter for one in reversed(slices)}
        self._steps: list[MissedStep] = []
        self._dropped = 0
        """Steps before the first of these."""
        self._all_train = False
        """Whether none was frozen when `tell_frozen` looked."""
        self._level = dict.fromkeys(range(len(self._slices)))
        self._told: list[int] = []
        """Those that have become level since `level` was called."""
        self._since: dict[int, int] = {}
        """The steps before the first that a slice has missed and not been told, by its number."""
        self._due: dict[int, list[tuple[int, int]]] = {}
        """Slices that are told then at the latest, by the number of steps; each with its `_since`."""
        self._shared: dict[tuple[int, int, int, int], tuple[Update | None, Update]] = {}
        """Updates of slices with the same past, by id() of what was pending, which is kept alive."""
        self._scalars: dict[tuple[int, int, int], list[tuple[Any, int]]] = {}
        """See `_steps_of`."""

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._parameters)

    @property
    def _now(self) -> int:
        return self._dropped + len(self._steps)

    def tell_frozen(self) -> None:
        """Have slices be level that are trained no more: they miss nothing while they are frozen."""
        with torch._C.DisableTorchFunctionSubclass():  # whether it is trained is no value: no guard is asked
            self._all_train = all(map(_trained, self._parameters))
            for number, one in () if self._all_train else enumerate(self._slices):
                if number in self._since and not one.parameter.requires_grad:
                    one.unit.pending  # noqa: B018 - tells it

    def level(self, found: Container[int]) -> list[int]:
        """Return the numbers of the trained slices that are level and have no gradient in a step. found: the
        id() of each parameter that has one.
        """
        self._told.clear()
        return self._begin_of(self._level, found)

    def told(self, found: Container[int]) -> list[int]:
        """Return those that are so since `level`, or this, was called."""
        told, self._told = self._told, []
        return self._begin_of(told, found)

    def _begin_of(self, numbers: Iterable[int], found: Container[int]) -> list[int]:
        ids, parameters = self._ids, self._parameters
        level = [number for number in numbers if ids[number] not in found]
        if self._all_train:  # each look at one of many, which the CPU has not in its caches, would cost
            return level
        with torch._C.DisableTorchFunctionSubclass():
            return [number for number in level if parameters[number].requires_grad]

    def slices(self, numbers: Iterable[int]) -> Iterable[Slice]:
        """Return slices by their numbers."""
        return map(self._slices.__getitem__, numbers)

    def due(self) -> Iterator[Unit]:
        """Yield the units of slices that have missed as many steps as they may; also where they were told of
        the last one since: which slices those are must not depend on who looked, as ranks flush together.
        """
        for number, since in self._due.get(self._now, ()):
            if self._since.get(number, since) == since:
                yield self._slices[number].unit

    def keep_options(
        self, step: MissedStep, options_of: Callable[[nn.Parameter], tuple[Recipe, Mapping[str, Any]]]
    ) -> None:
        """Keep the options of this stack's groups in `step`. options_of: a parameter's recipe and group.

        Raises: ValueError for options out of range.
        """
        for group, parameter in self._groups.items():
            if step.has(group):
                continue
            count = self._counts.get(parameter, {}).get("step", 0)
            since = self._since.get(self._numbers[id(parameter)], self._now)
            recipe, options = options_of(parameter)
            step.keep(group, recipe, options, count + 1 + self._now - since)

    def tell_beside(self, numbers: Iterable[int]) -> None:
        """Have other slices of the units of these slices be level, too, which then begin to miss steps with
        them.
        """
        for one in () if self._alone else self.slices(numbers):
            one.unit.pending  # noqa: B018 - tells them

    def begin(self, numbers: Iterable[int]) -> None:
        """Have level slices miss all steps from the next one noted on."""
        now, due, since, level = self._now, self._due, self._since, self._level
        for number in numbers:
            one, more = self._slices[number], self._limits[number]
            before = one.unit.owe(one.at, self)
            if before is not None or not one.may_wait:
                waits = 0.0 if before is None else before.misses
                more = int(more - waits) if one.may_wait and waits < more else 1
            due.setdefault(now + more, []).append((number, now))
            since[number] = now  # no call in between: a Ctrl-C finds both, or neither
            del level[number]

    def note(self, step: MissedStep) -> None:
        """Note a step for all slices that are not level."""
        self._shared.clear()
        self._scalars.clear()
        late = [one for one in self._due.pop(self._now, ()) if self._since.get(one[0]) == one[1]]
        if late:  # an error, or a Ctrl-C, has kept them from being told
            self._due.setdefault(self._now + 1, []).extend(late)
        self._steps.append(step)
        if len(self._steps) > 2 * MISSED_LIMIT:
            told = min(self._since.values(), default=self._now) - self._dropped
            del self._steps[:told]
            self._dropped += told

    def tell(self, pending: PendingUpdates, parameter: nn.Parameter) -> None:
        """Add to what is pending for a slice's unit what it has missed: it is level then."""
        number = self._numbers[id(parameter)]
        since = self._since.get(number)
        if since is None:
            return
        one, steps = self._slices[number], self._now - since
        if steps:
            count = self._counts.get(parameter)
            if count is None:
                count = self._counts[parameter] = {}
            begun = count.get("step", 0)
            decides = self._all_here or not one.unit.record.is_elsewhere  # else ranks that have it update it
            missed = self._missed(one, pending.get(one.at), since, begun) if decides else None
            count["step"] = begun + steps  # no call from here on: a Ctrl-C finds all of it, or nothing
            if missed is not None:
                pending[one.at] = missed
        self._level[number] = None
        self._told.append(number)
        del self._since[number]

    def _missed(self, one: Slice, before: Update | None, since: int, begun: int) -> Update:
        """Return what is pending for a slice with all that it missed since, before which it had `begun`."""
        group, rounds = one.group, not (self._all_exact or one.unit.record.schema.is_exact)
        past = (id(before), since, group, begun)
        if not rounds and (shared := self._shared.get(past)) is not None:
            return shared[1]
        missed = self._steps_of(one, since, begun, rounds=rounds)
        if before is None:
            after = Update.of_zeros(missed, self._steps[since - self._dropped].recipe(group))
        else:
            after = before.then_missed(missed)
        if not rounds and (before is None or not before.has_gradient):
            self._shared[past] = before, after
        return after

    def _steps_of(self, one: Slice, since: int, begun: int, *, rounds: bool) -> list[tuple[Any, int]]:
        """Return the scalars and keys of the steps that a slice missed since: the same as of many others,
        unless its state is rounded.
        """
        past = since, one.group, begun
        if not rounds and (known := self._scalars.get(past)) is not None:
            return known
        missed = []
        for count, step in enumerate(self._steps[since - self._dropped :], begun + 1):
            key = kernels.state_key(step.seed, one.position, count) if rounds else 0
            missed.append((step.scalars(one.group, count), key))
        if not rounds:
            self._scalars[past] = missed
        return missed

    def tell_all(self) -> None:
        """Have all slices be level."""
        for number in list(self._since):
            self._slices[number].unit.pending  # noqa: B018 - tells it


class MissedSteps:
    """All stacks of which one optimizer has slices."""

    def __init__(self) -> None:
        """There are none yet."""
        self._stacks: list[Stack] = []
        self._of: dict[int, Stack] = {}
        self._known: Hashable = None
        self._in_use: list[Stack] = []
        self._begin: list[tuple[Stack, list[int]]] = []
        """Of each stack in use the numbers of the slices that begin to miss steps."""
        self._found: Collection[int] = ()
        self._all_told = True
        self._frozen_as_of: dict[Stack, Hashable] = {}

    def know(
        self,
        known: Hashable,
        stacks: Callable[[], Iterable[Sequence[Slice]]],
        counts: dict[Any, dict[str, int]],
    ) -> None:
        """Follow these stacks, if they are others than before, which `known` tells."""
        if known == self._known:
            return
        self.tell_all()
        self._known, self._of, self._stacks, self._frozen_as_of = known, {}, [], {}
        for slices in stacks():
            new = [one for one in slices if id(one.parameter) not in self._of]
            if new:
                stack = Stack(new, counts)
                self._stacks.append(stack)
                self._of.update((id(one), stack) for one in stack)

    def tell_all(self) -> None:
        """Tell all slices what they have missed; often called where there is nothing to tell."""
        if not self._all_told:
            for stack in self._stacks:
                stack.tell_all()
            self._all_told = True

    def look(self, found: Collection[int], freezes: Hashable) -> list[Slice]:
        """Return the slices that begin to miss steps, in a step that gives these parameters, by id(),
        gradients. freezes: another one where any slice may have been frozen since the last time.
        """
        hit = {self._of.get(one) for one in found}
        self._found, self._in_use = found, [one for one in self._stacks if one in hit]
        for stack in self._in_use:
            if self._frozen_as_of.get(stack) != freezes:
                stack.tell_frozen()
                self._frozen_as_of[stack] = freezes
        self._begin = [(stack, stack.level(found)) for stack in self._in_use]
        return _slices(self._begin)

    def due(self) -> Iterator[Unit]:
        """Yield the units that are not to miss a further step."""
        for stack in self._stacks:
            yield from stack.due()

    def note(
        self, step: MissedStep, options_of: Callable[[nn.Parameter], tuple[Recipe, Mapping[str, Any]]]
    ) -> list[Slice]:
        """Note a step, after `look`; return the slices that begin to miss steps, also those that were told
        since then. options_of: see Stack.

        Raises: ValueError for options out of range.
        """
        for stack in self._in_use:
            stack.keep_options(step, options_of)
        for stack, numbers in self._begin:
            stack.tell_beside(numbers)
        begin = [*self._begin, *((stack, stack.told(self._found)) for stack in self._in_use)]
        self._all_told = False
        for stack, numbers in begin:
            stack.begin(numbers)
        for stack in self._in_use:
            stack.note(step)
        self._found, self._in_use, self._begin = (), [], []
        return _slices(begin)


def _slices(numbers: Iterable[tuple[Stack, Iterable[int]]]) -> list[Slice]:
    return [one for stack, some in numbers for one in stack.slices(some)]

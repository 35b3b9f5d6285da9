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

from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from infinity import kernels
from infinity.planning.densest import Integers
from infinity.records.update_rules import Recipe
from infinity.records.updates import PendingUpdates, Update
from infinity.units.unit import Unit

MISSED_LIMIT = 100
"""Steps with gradients of zeros that may wait for a pass over the record: see [Note: missed steps] in base.
"""

_LEVEL, _NEVER = -1, -1
_Missed = tuple[tuple[Any, int], ...]
"""Scalars and keys of steps."""
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
    known_as: tuple[int, int]
    """What watches slices, of those that the optimizer has, and its number there."""


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
        # What many slices are asked for in each step, apart: fewer caches are missed.
        self._parameters = [one.parameter for one in slices]
        self._units = [one.unit for one in slices]
        self._at = [one.at for one in slices]
        self._group_of = [one.group for one in slices]
        self._limits = array("q", [most_misses(one.unit) if one.may_wait else 1 for one in slices])
        self._alone = all(len(one.unit.parameters) == 1 for one in slices)
        """Whether no slice shares its unit with other parameters, which may miss steps, too."""
        self._all_here = not any(one.unit.record.is_elsewhere for one in slices)
        self._all_exact = all(one.unit.record.schema.is_exact for one in slices)
        """Whether the state of none is rounded at random."""
        self._groups = {one.group: number for number, one in reversed(list(enumerate(slices)))}
        """One slice of each group."""
        self._steps: list[MissedStep] = []
        self._dropped = self._now = 0
        """Steps before the first of these, and all so far."""
        self._all_train = False
        """Whether none was frozen when `tell_frozen` looked."""
        self._since = np.full(len(slices), _LEVEL, np.int64)
        """The steps before the first that a slice has missed and not been told."""
        self._since_of = self._since.data
        """The same: one number is read in a third of the time."""
        self._due_at = np.full(len(slices), _NEVER, np.int64)
        """The steps at which it is told at the latest; once it was told, of the last time."""
        self._due_of = self._due_at.data
        self._found_due: tuple[int, Integers] = -1, np.zeros(0, np.int64)
        """How many steps there were when `_due_now` looked, and what it found."""
        self._any_told = False
        """Whether any slice was told since `level` was called."""
        self._count_of: list[dict[str, int] | None] = [None] * len(slices)
        """Of those that were told the counts: to look for a parameter among all takes longer."""
        self._same: dict[tuple[int, int, int], _Missed] = {}
        """See `_steps_alike`."""
        self._runs: dict[tuple[int, int], tuple[int, list[tuple[Any, int]]]] = {}
        """See `_run_of`."""
        self._shared: dict[tuple[int, int, int, int], tuple[Update | None, Update]] = {}
        """Updates of slices with the same past, by id() of what was pending, which is kept alive."""

    def tell_frozen(self) -> None:
        """Have slices be level that are trained no more: they miss nothing while they are frozen."""
        with torch._C.DisableTorchFunctionSubclass():  # whether it is trained is no value: no guard is asked
            self._all_train = all(map(_trained, self._parameters))
            for number in () if self._all_train else np.flatnonzero(self._since >= 0).tolist():
                if not self._parameters[number].requires_grad:
                    self._units[number].pending  # noqa: B018 - tells it

    def level(self, having: Integers) -> Integers:
        """Return the numbers of the trained slices that are level and have no gradient in a step. having: of
        those that have one.
        """
        self._any_told = False
        level = self._since < 0
        level[having] = False
        numbers = level.nonzero()[0]
        if self._all_train:  # each look at one of many, which the CPU has not in its caches, would cost
            return numbers
        with torch._C.DisableTorchFunctionSubclass():
            parameters = self._parameters
            trained = [number for number in numbers.tolist() if parameters[number].requires_grad]
        return np.array(trained, np.int64)

    def level_now(self, having: Integers, before: Integers) -> Integers:
        """Return the same again. before: what it was."""
        return self.level(having) if self._any_told else before

    def slices(self, numbers: Integers) -> Iterable[Slice]:
        """Return slices by their numbers."""
        return map(self._slices.__getitem__, numbers.tolist())

    def for_the_first_time(self, numbers: Integers) -> Iterable[Slice]:
        """Return those of these slices that have never begun to miss steps."""
        due_at = self._due_of
        return [self._slices[number] for number in numbers.tolist() if due_at[number] < 0]

    def due(self) -> list[Unit]:
        """Return the units of slices that have missed as many steps as they may; also where they were told of
        the last one since: which slices those are must not depend on who looked, as ranks flush together.
        """
        return [self._units[number] for number in self._due_now().tolist()]

    def _due_now(self) -> Integers:
        """Return their numbers; a step asks twice."""
        before, found = self._found_due
        if before != self._now:
            found = (self._due_at == self._now).nonzero()[0]
            self._found_due = self._now, found
        return found[self._due_at[found] == self._now] if len(found) else found

    def keep_options(
        self, step: MissedStep, options_of: Callable[[nn.Parameter], tuple[Recipe, Mapping[str, Any]]]
    ) -> None:
        """Keep the options of this stack's groups in `step`. options_of: a parameter's recipe and group.

        Raises: ValueError for options out of range.
        """
        for group, number in self._groups.items():
            if step.has(group):
                continue
            parameter, since = self._parameters[number], self._since_of[number]
            count = self._counts.get(parameter, {}).get("step", 0)
            recipe, options = options_of(parameter)
            step.keep(group, recipe, options, count + 1 + (0 if since < 0 else self._now - since))

    def tell_beside(self, numbers: Integers) -> None:
        """Have other slices of the units of these slices be level, too, which then begin to miss steps with
        them.
        """
        for one in () if self._alone else self.slices(numbers):
            one.unit.pending  # noqa: B018 - tells them

    def begin(self, numbers: Integers) -> None:
        """Have level slices miss all steps from the next one noted on."""
        units, at, limits, due_at, now = self._units, self._at, self._limits, self._due_of, self._now
        for number in numbers.tolist():
            before, limit = units[number].owe(at[number], self, number), limits[number]
            if before is not None and (before.field is None or before.missed or before.after):
                waits = before.misses
                limit = limit - int(waits) if waits < limit else 1
            due_at[number] = now + limit
        self._since[numbers] = self._now  # last: after a Ctrl-C before, they are level, and owe nothing

    def that_owe_all(self, numbers: Integers) -> list[Unit]:
        """Return the units of these slices of which all that is pending is known to stacks."""
        units = [self._units[number] for number in numbers.tolist()]
        return units if self._alone else [unit for unit in units if unit.owes_all]

    def note(self, step: MissedStep) -> None:
        """Note a step for all slices that are not level."""
        self._same.clear()
        self._shared.clear()
        late = self._due_now()
        if len(late):  # an error, or a Ctrl-C, has kept some from being told
            self._due_at[late[self._since[late] >= 0]] = self._now + 1
        self._steps.append(step)
        self._now += 1
        if len(self._steps) > 2 * MISSED_LIMIT:
            owed = self._since[self._since >= 0]
            told = (int(owed.min()) if len(owed) else self._now) - self._dropped
            del self._steps[:told]
            self._dropped += told
            self._runs = {
                past: (max(start, self._dropped), run[max(0, self._dropped - start) :])
                for past, (start, run) in self._runs.items()
                if start + len(run) > self._dropped
            }

    def tell(self, pending: PendingUpdates, index: int, number: int) -> None:
        """Add to what is pending for a slice's unit what it has missed: it is level then."""
        since, now = self._since_of[number], self._now
        if since < 0:
            return
        if since < now:
            count = self._count_of[number]
            if count is None:
                count = self._count_of[number] = self._counts.setdefault(self._parameters[number], {})
            begun = count.get("step", 0)
            missed = None
            if self._all_here or not self._units[number].record.is_elsewhere:  # else its ranks update it
                missed = self._missed(number, pending.get(index), since, begun)
            count["step"] = begun + now - since  # no call from here on: a Ctrl-C finds all of it, or nothing
            if missed is not None:
                pending[index] = missed
        self._since_of[number] = _LEVEL
        self._any_told = True

    def _missed(self, number: int, before: Update | None, since: int, begun: int) -> Update:
        """Return what is pending for a slice with all that it missed since, before which it had `begun`."""
        group = self._group_of[number]
        if not (self._all_exact or self._units[number].record.schema.is_exact):
            return self._after(before, self._steps_of(number, since, begun), since, group)
        past = since, group, begun
        steps = self._same.get(past) or self._steps_alike(past)
        if before is not None and before.has_gradient:
            return before.then_missed(steps)  # its gradient is its own
        shared = self._shared.get((id(before), *past))
        if shared is None:
            update = self._after(before, steps, since, group)
            shared = self._shared[(id(before), *past)] = before, update
        return shared[1]

    def _after(self, before: Update | None, steps: _Missed, since: int, group: int) -> Update:
        if before is None:
            return Update.of_zeros(steps, self._steps[since - self._dropped].recipe(group))
        return before.then_missed(steps)

    def _steps_alike(self, past: tuple[int, int, int]) -> _Missed:
        """Return the steps that slices missed since, of a group, before which they had begun as many: the
        same for all whose state is not rounded.
        """
        since, group, begun = past
        steps = self._same[past] = tuple(self._run_of(since, group, begun - since))
        return steps

    def _run_of(self, since: int, group: int, ahead: int) -> list[tuple[Any, int]]:
        """Return the scalars and keys of the steps since then, of slices of a group whose own steps are so
        many `ahead` of the stack's. Nearly all slices are the same ahead, whenever they were used last, so
        that each step adds one to what is known of them all.
        """
        start, run = self._runs.get((group, ahead), (since, []))
        if since < start:
            start, run = since, []
        for number in range(start + len(run), self._now):
            run.append((self._steps[number - self._dropped].scalars(group, ahead + number + 1), 0))
        self._runs[group, ahead] = start, run
        return run[since - start :]

    def _steps_of(self, number: int, since: int, begun: int) -> _Missed:
        """Return the scalars and keys of the steps that a slice missed since."""
        one = self._slices[number]
        return tuple(
            (step.scalars(one.group, count), kernels.state_key(step.seed, one.position, count))
            for count, step in enumerate(self._steps[since - self._dropped :], begun + 1)
        )

    def tell_all(self) -> None:
        """Have all slices be level."""
        for number in np.flatnonzero(self._since >= 0).tolist():
            self._units[number].pending  # noqa: B018 - tells it


class MissedSteps:
    """All stacks of which one optimizer has slices."""

    def __init__(self) -> None:
        """There are none yet."""
        self._stacks: list[Stack] = []
        self._places: list[tuple[Integers, Integers]] = []
        """Of each watch the stack of each slice, by its number there, and its number in the stack."""
        self._known: Hashable = None
        self._in_use: list[tuple[Stack, Integers, Integers]] = []
        """Stacks with the slices that have gradients in a step, and with those that begin to miss steps."""
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
        self._known, self._stacks, self._frozen_as_of = known, [], {}
        places: dict[tuple[int, int], tuple[int, int]] = {}
        for slices in stacks():
            new = [one for one in slices if one.known_as not in places]
            if new:
                stack = len(self._stacks)
                self._stacks.append(Stack(new, counts))
                places.update((one.known_as, (stack, number)) for number, one in enumerate(new))
        most: dict[int, int] = {}
        for watch, number in places:
            most[watch] = max(number, most.get(watch, 0))
        self._places = [_columns(most.get(watch, -1) + 1) for watch in range(1 + max(most, default=-1))]
        for (watch, number), (stack, in_stack) in places.items():
            of_stack, at = self._places[watch]
            of_stack[number], at[number] = stack, in_stack

    def tell_all(self) -> None:
        """Tell all slices what they have missed; often called where there is nothing to tell."""
        if not self._all_told:
            for stack in self._stacks:
                stack.tell_all()
            self._all_told = True

    def look(self, found: Sequence[Integers], freezes: Hashable) -> list[Slice]:
        """Return the slices that begin to miss steps, in a step that gives others gradients. found: the
        numbers of these, of each watch. freezes: another one where any slice may have been frozen since the
        last time.
        """
        hit = self._by_stack(found)
        for stack in hit:
            if self._frozen_as_of.get(stack) != freezes:
                stack.tell_frozen()
                self._frozen_as_of[stack] = freezes
        self._in_use = [(stack, having, stack.level(having)) for stack, having in hit.items()]
        return [one for stack, _, begin in self._in_use for one in stack.slices(begin)]

    def _by_stack(self, found: Sequence[Integers]) -> dict[Stack, Integers]:
        """Return what of each stack was found, in the order of stacks."""
        parts: dict[int, Integers] = {}
        for numbers, (of_stack, at) in zip(found, self._places, strict=False):
            stacks = of_stack[numbers]
            order = np.argsort(stacks, kind="stable")
            stacks, in_stack = stacks[order], at[numbers[order]]
            begins = [0, *(np.flatnonzero(stacks[1:] != stacks[:-1]) + 1).tolist(), len(stacks)]
            for begin, end in pairwise(begins):
                if begin < end:
                    parts[int(stacks[begin])] = in_stack[begin:end]
        return {self._stacks[stack]: parts[stack] for stack in sorted(parts)}

    def for_the_first_time(self) -> list[Slice]:
        """Return those that begin to miss steps and have never done so, after `look`."""
        return [one for stack, _, begin in self._in_use for one in stack.for_the_first_time(begin)]

    def due(self) -> list[Unit]:
        """Return the units that are not to miss a further step."""
        return [unit for stack in self._stacks for unit in stack.due()]

    def note(
        self, step: MissedStep, options_of: Callable[[nn.Parameter], tuple[Recipe, Mapping[str, Any]]]
    ) -> list[Unit]:
        """Note a step, after `look`; return the units of slices that begin to miss steps, also of those that
        were told since then, where stacks know all that is pending for them. options_of: see Stack.

        Raises: ValueError for options out of range.
        """
        for stack, _, _ in self._in_use:
            stack.keep_options(step, options_of)
        for stack, _, numbers in self._in_use:
            stack.tell_beside(numbers)
        begin = [(stack, stack.level_now(having, numbers)) for stack, having, numbers in self._in_use]
        self._all_told = False
        for stack, numbers in begin:
            stack.begin(numbers)
        for stack, _ in begin:
            stack.note(step)
        self._in_use = []
        return [unit for stack, numbers in begin for unit in stack.that_owe_all(numbers)]


def _columns(count: int) -> tuple[Integers, Integers]:
    return np.zeros(count, np.int64), np.zeros(count, np.int64)

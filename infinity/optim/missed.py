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

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from infinity import kernels
from infinity.planning.densest import Booleans, Integers
from infinity.records.update_rules import Recipe
from infinity.records.updates import PendingUpdates, Update
from infinity.units.unit import Unit

MISSED_LIMIT = 100
"""Steps with gradients of zeros that may wait for a pass over the record: see [Note: missed steps] in base.
"""

_LEVEL, _NEVER = -1, -1
_Missed = tuple[tuple[Any, int], ...]
"""Scalars and keys of steps."""
_Past = tuple[int, int, int, int]
"""The first and the last of steps, by number, a group, and how many steps a slice had begun before them."""
_trained: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")


def _is_plain(unit: Unit) -> bool:
    """Whether what a slice misses is what others miss: its state is not rounded at random, and this rank has
    a part of it.
    """
    return unit.record.schema.is_exact and not unit.record.is_elsewhere


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

    def __init__(self, clip: float, seed: int, number: int = 0) -> None:
        """clip: the factor on all gradients. seed: of the random bits that round state. number: of the step
        among those that its optimizer notes.
        """
        self._clip, self.seed, self.number = clip, seed, number
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


class _Common:
    """What all stacks of one optimizer have in common."""

    def __init__(self) -> None:
        self.alike: dict[_Past, _Missed] = {}
        """See `Stack._steps_alike`."""
        self.told = False
        """Whether any slice was told since `forget_told`."""

    def has_told(self) -> None:
        """A slice is told what it has missed."""
        self.told = True

    def forget_told(self) -> None:
        """Ask whether any is from now on."""
        self.told = False


class Stack:
    """The slices of one stack that one optimizer has, and the steps that they miss."""

    def __init__(
        self, slices: Sequence[Slice], counts: dict[Any, dict[str, int]], since: Integers, common: _Common
    ) -> None:
        """counts: the optimizer's, by parameter, for whoever is told. since: of each slice the steps before
        the first that it has missed and not been told; changed here when it is told. A slice is known by its
        number, its place among `slices`.
        """
        self._slices, self._counts, self._common = list(slices), counts, common
        # What many slices are asked for in each step, apart: fewer caches are missed.
        self._parameters = [one.parameter for one in slices]
        self._units = [one.unit for one in slices]
        self._at = [one.at for one in slices]
        self._group_of = [one.group for one in slices]
        self.pending = [one.unit.may_miss(one.at, self, number) for number, one in enumerate(slices)]
        """What is pending for the unit of each."""
        self.alone = all(len(one.unit.parameters) == 1 for one in slices)
        """Whether no slice shares its unit with other parameters, which may miss steps, too."""
        self._all_plain = all(map(_is_plain, self._units))
        """Whether all miss steps alike."""
        self._groups = {one.group: number for number, one in reversed(list(enumerate(slices)))}
        """One slice of each group."""
        self._steps: list[MissedStep] = []
        self._dropped = self.now = 0
        """Steps before the first of these, and all so far."""
        self.all_train = False
        """Whether none was frozen when `tell_frozen` looked."""
        self._since, self._since_of = since, since.data
        """The same twice: of the second one number is read in a third of the time."""
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
            self.all_train = all(map(_trained, self._parameters))
            for number in () if self.all_train else np.flatnonzero(self._since >= 0).tolist():
                if not self._parameters[number].requires_grad:
                    self._units[number].pending  # noqa: B018 - tells it

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
            step.keep(group, recipe, options, count + 1 + (0 if since < 0 else self.now - since))

    def owes(self, number: int) -> bool:
        """See updates.MissedUpdates."""
        return self._since_of[number] >= 0

    def note(self, step: MissedStep) -> None:
        """Note a step for all slices that are not level."""
        self._same.clear()
        self._shared.clear()
        self._steps.append(step)
        self.now += 1
        if len(self._steps) > 2 * MISSED_LIMIT:
            owed = self._since[self._since >= 0]
            told = (int(owed.min()) if len(owed) else self.now) - self._dropped
            del self._steps[:told]
            self._dropped += told
            self._runs = {
                past: (max(start, self._dropped), run[max(0, self._dropped - start) :])
                for past, (start, run) in self._runs.items()
                if start + len(run) > self._dropped
            }

    def tell(self, numbers: Iterable[int]) -> None:
        """Add to what is pending for the units of slices what these have missed: they are level then."""
        self._common.has_told()  # first: after a Ctrl-C, too
        since_of, count_of, now = self._since_of, self._count_of, self.now
        group_of = self._group_of if len(self._groups) > 1 else None
        at_of = None if self.alone else self._at
        (group, *_), at = self._groups, 0
        for number in numbers:
            since = since_of[number]
            if since < 0:
                continue
            if since < now:
                count = count_of[number]
                if count is None:
                    count = count_of[number] = self._counts.setdefault(self._parameters[number], {})
                begun, pending = count.get("step", 0), self.pending[number]
                if at_of is not None:
                    at = at_of[number]
                if group_of is not None:
                    group = group_of[number]
                before = pending.get(at)
                if not self._all_plain and not _is_plain(self._units[number]):
                    missed = self._missed_of_its_own(number, before, since, begun)
                else:
                    past = since, group, begun
                    steps = self._same.get(past) or self._steps_alike(past)
                    if before is not None and before.has_gradient:
                        missed = before.then_missed(steps)  # its gradient is its own
                    else:
                        missed = self._missed_alike(past, before, steps)
                # No call from here on: a Ctrl-C finds all of it, or nothing.
                count["step"] = begun + now - since
                if missed is not None:
                    pending[at] = missed
            since_of[number] = _LEVEL

    def _missed_of_its_own(self, number: int, before: Update | None, since: int, begun: int) -> Update | None:
        """Return what is pending for a slice with all that it missed since, before which it had `begun`; None
        where other ranks update it.
        """
        if self._units[number].record.is_elsewhere:
            return None
        return self._after(before, self._steps_of(number, since, begun), since, self._group_of[number])

    def _missed_alike(self, past: tuple[int, int, int], before: Update | None, steps: _Missed) -> Update:
        """Return the same for slices of this past that have no gradient."""
        shared = self._shared.get((id(before), *past))
        if shared is None:
            update = self._after(before, steps, past[0], past[1])
            shared = self._shared[(id(before), *past)] = before, update
        return shared[1]

    def _after(self, before: Update | None, steps: _Missed, since: int, group: int) -> Update:
        if before is None:
            return Update.of_zeros(steps, self._steps[since - self._dropped].recipe(group))
        return before.then_missed(steps)

    def _steps_alike(self, past: tuple[int, int, int]) -> _Missed:
        """Return the steps that slices missed since, of a group, before which they had begun as many: the
        same for all whose state is not rounded. Of several stacks, too, where no step between was one of
        other stacks alone.
        """
        since, group, begun = past
        first = self._steps[since - self._dropped].number
        last = self._steps[self.now - 1 - self._dropped].number
        if last - first == self.now - 1 - since:
            alike, of_all = self._common.alike, (first, last, group, begun)
            if (steps := alike.get(of_all)) is None:
                steps = alike[of_all] = tuple(self._run_of(since, group, begun - since))
        else:
            steps = tuple(self._run_of(since, group, begun - since))
        self._same[past] = steps
        return steps

    def _run_of(self, since: int, group: int, ahead: int) -> list[tuple[Any, int]]:
        """Return the scalars and keys of the steps since then, of slices of a group whose own steps are so
        many `ahead` of the stack's. Nearly all slices are the same ahead, whenever they were used last, so
        that each step adds one to what is known of them all.
        """
        start, run = self._runs.get((group, ahead), (since, []))
        if since < start:
            start, run = since, []
        for number in range(start + len(run), self.now):
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


class AllSlices:
    """The slices of all stacks of one optimizer: one is known by its place here."""

    def __init__(self, stacks: Iterable[Sequence[Slice]] = ()) -> None:
        """Of these, stack by stack."""
        slices = [one for stack in stacks for one in stack]
        self.parameters = [one.parameter for one in slices]
        self.units = [one.unit for one in slices]
        self.at = [one.at for one in slices]
        """The index of each in its unit."""
        self.limits = np.array([most_misses(one.unit) if one.may_wait else 1 for one in slices], np.int64)
        """How many steps each may miss."""
        self.since = np.full(len(slices), _LEVEL, np.int64)
        """The steps of its stack before the first that a slice has missed and not been told."""
        self.due_at = np.full(len(slices), _NEVER, np.int64)
        """The steps of its stack at which it is told at the latest; once it was told, of the last time."""


class Beginning:
    """Slices that begin to miss steps."""

    def __init__(self, slices: AllSlices, numbers: Integers) -> None:
        """numbers: by which they are known."""
        self._slices, self.numbers = slices, numbers
        self._units: list[Unit] | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return them."""
        return map(self._slices.parameters.__getitem__, self.numbers.tolist())

    def units(self) -> list[Unit]:
        """Return the unit of each; a step asks thrice."""
        if self._units is None:
            self._units = list(map(self._slices.units.__getitem__, self.numbers.tolist()))
        return self._units

    def places(self) -> Iterator[int]:
        """Return the index of each in its unit."""
        return map(self._slices.at.__getitem__, self.numbers.tolist())

    def for_the_first_time(self) -> Beginning:
        """Return those that have never begun to miss any."""
        return Beginning(self._slices, self.numbers[self._slices.due_at[self.numbers] < 0])


class MissedSteps:
    """All stacks of which one optimizer has slices. What a step does with slices that begin to miss steps is
    done for all stacks at once: there may be hundreds of few slices.
    """

    def __init__(self) -> None:
        """There are none yet."""
        self.steps = 0
        """Steps that were noted so far."""
        self._stacks: list[Stack] = []
        self._slices, self._common = AllSlices(), _Common()
        self._pending: list[PendingUpdates] = []
        """What is pending for the unit of each slice."""
        self._stack_of: Integers = np.zeros(0, np.int64)
        self._places: list[Integers] = []
        """Of each watch, which of all slices one is by its number there."""
        self._known: Hashable = None
        self._in_use: list[int] = []
        """Stacks of which slices have gradients in a step."""
        self._having = self._stack_of
        """Slices that have gradients in it."""
        self._beginning = Beginning(self._slices, self._stack_of)
        self._found_due: tuple[int, Integers] = -1, self._stack_of
        """How many steps there were when `_due_now` looked, and what it found."""
        self._all_told = True
        self._frozen_as_of: dict[int, Hashable] = {}

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
        self._known, self._frozen_as_of, self._common = known, {}, _Common()
        places: dict[tuple[int, int], int] = {}
        each: list[list[Slice]] = []
        begins = [0]
        for slices in stacks():
            new = [one for one in slices if one.known_as not in places]
            if new:
                each.append(new)
                places.update((one.known_as, number) for number, one in enumerate(new, begins[-1]))
                begins.append(begins[-1] + len(new))
        self._slices = AllSlices(each)
        ranges = map(slice, begins, begins[1:])
        self._stacks = [
            Stack(new, counts, self._slices.since[place], self._common)
            for new, place in zip(each, ranges, strict=True)
        ]
        self._pending = [one for stack in self._stacks for one in stack.pending]
        self._stack_of = np.repeat(np.arange(len(each)), np.diff(begins))
        self._in_use, self._found_due = [], (-1, self._stack_of[:0])
        self._beginning = Beginning(self._slices, self._stack_of[:0])
        most: dict[int, int] = {}
        for watch, number in places:
            most[watch] = max(number, most.get(watch, 0))
        self._places = [
            np.zeros(most.get(watch, -1) + 1, np.int64) for watch in range(1 + max(most, default=-1))
        ]
        for (watch, number), place in places.items():
            self._places[watch][number] = place

    def tell_all(self) -> None:
        """Tell all slices what they have missed; often called where there is nothing to tell."""
        if not self._all_told:
            for number in np.flatnonzero(self._slices.since >= 0).tolist():
                self._slices.units[number].pending  # noqa: B018 - tells it
            self._all_told = True

    def look(self, found: Sequence[Integers], freezes: Hashable) -> Beginning:
        """Return the slices that begin to miss steps, in a step that gives others gradients. found: the
        numbers of these, of each watch. freezes: another one where any slice may have been frozen since the
        last time.
        """
        having = [place_of[numbers] for numbers, place_of in zip(found, self._places, strict=False)]
        self._having = np.concatenate(having) if having else self._stack_of[:0]
        self._in_use = np.bincount(self._stack_of[self._having]).nonzero()[0].tolist()
        for number in self._in_use:
            if self._frozen_as_of.get(number) != freezes:
                self._stacks[number].tell_frozen()
                self._frozen_as_of[number] = freezes
        self._beginning = Beginning(self._slices, self._level())
        return self._beginning

    def _level(self) -> Integers:
        """Return the trained slices that are level and have no gradient in a step that gives others of their
        stacks some.
        """
        self._common.forget_told()
        level = self._slices.since < 0
        level[self._having] = False
        self._leave_in_use(level)
        numbers: Integers = level.nonzero()[0]
        if all(self._stacks[one].all_train for one in self._in_use):
            return numbers  # each look at one of many, which the CPU has not in its caches, would cost
        with torch._C.DisableTorchFunctionSubclass():
            parameters = self._slices.parameters
            trained = [number for number in numbers.tolist() if parameters[number].requires_grad]
        return np.array(trained, np.int64)

    def _leave_in_use(self, slices: Booleans) -> None:
        """Leave those of these slices that are of stacks in use."""
        if len(self._in_use) < len(self._stacks):
            in_use = np.zeros(len(self._stacks), np.bool_)
            in_use[self._in_use] = True
            slices &= in_use[self._stack_of]

    def due(self) -> list[Unit]:
        """Return the units of slices that have missed as many steps as they may; also where they were told of
        the last one since: which slices those are must not depend on who looked, as ranks flush together.
        """
        return list(map(self._slices.units.__getitem__, self._due_now().tolist()))

    def _due_now(self) -> Integers:
        """Return their numbers; a step asks twice."""
        due_at, now_of = self._slices.due_at, self._now_of()
        before, found = self._found_due
        if before != self.steps:
            found = (due_at == now_of[self._stack_of]).nonzero()[0]
            self._found_due = self.steps, found
        now: Integers = found[due_at[found] == now_of[self._stack_of[found]]]
        return now

    def _now_of(self) -> Integers:
        """Return the steps of each stack so far."""
        return np.array([one.now for one in self._stacks], np.int64)

    def note(
        self, step: MissedStep, options_of: Callable[[nn.Parameter], tuple[Recipe, Mapping[str, Any]]]
    ) -> list[Unit]:
        """Note a step, after `look`; return the units of slices that begin to miss steps, also of those that
        were told since then, where stacks know all that is pending for them. options_of: see Stack.

        Raises: ValueError for options out of range.
        """
        stacks = [self._stacks[number] for number in self._in_use]
        for stack in stacks:
            stack.keep_options(step, options_of)
        alone = all(stack.alone for stack in stacks)
        for unit in () if alone else self._beginning.units():
            unit.pending  # noqa: B018 - other slices are level then, too, and begin to miss steps with these
        if self._common.told:
            self._beginning = Beginning(self._slices, self._level())
        beginning, self._all_told = self._beginning, False
        self._begin_to_miss(beginning.numbers)
        self._put_off()
        self.steps += 1  # first: what is due then is looked for anew, also after a Ctrl-C
        self._common.alike.clear()
        for stack in stacks:
            stack.note(step)
        self._in_use, self._beginning = [], Beginning(self._slices, beginning.numbers[:0])
        units = beginning.units()
        return units if alone else [unit for unit in units if unit.owes_all]

    def _begin_to_miss(self, numbers: Integers) -> None:
        """Have level slices miss all steps from the next one noted on."""
        slices, pending = self._slices, self._pending
        now = self._now_of()[self._stack_of[numbers]]
        slices.due_at[numbers] = now + slices.limits[numbers]
        known = map(PendingUpdates.owe, map(pending.__getitem__, numbers.tolist()))
        for at in np.flatnonzero(~np.fromiter(known, np.bool_, len(numbers))).tolist():
            number = numbers[at]
            before = pending[number].get(slices.at[number])
            if before is not None and not before.is_plain:
                waits, limit = before.misses, int(slices.limits[number])
                slices.due_at[number] = now[at] + (limit - int(waits) if waits < limit else 1)
        slices.since[numbers] = now  # last: after a Ctrl-C before, they are level, and owe nothing

    def _put_off(self) -> None:
        """Have slices be due again after the step that is noted next, which an error, or a Ctrl-C, has kept
        from being told.
        """
        late = self._due_now()
        late = late[self._slices.since[late] >= 0]
        if len(late):
            in_use = np.isin(self._stack_of[late], self._in_use)
            self._slices.due_at[late[in_use]] += 1

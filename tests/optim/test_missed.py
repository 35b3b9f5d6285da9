"""Steps that slices of a stack miss, noted once for all. Faked: units, which have no record."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from infinity import kernels
from infinity.optim import missed
from infinity.optim.missed import MissedStep, MissedSteps, Slice
from infinity.planning.layout import RecordSchema
from infinity.records.update_rules import ADAMW
from infinity.records.updates import PendingUpdates, Update

OPTIONS = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "params": []}


class FakeUnit:
    def __init__(self, index, state_dtype="fp32", *, is_elsewhere=False):
        self.index, self.parameters = index, [nn.Parameter(torch.zeros(1)) for _ in range(2)]
        schema = RecordSchema(state_dtype)
        self.record = SimpleNamespace(schema=schema, is_elsewhere=is_elsewhere)
        self.told = PendingUpdates()

    def may_miss(self, index, missed, number):
        self.told.may_miss(index, missed, number)
        return self.told

    @property
    def pending(self):
        if self.told.owes:
            self.told.tell()
        return self.told

    @property
    def owes_all(self):
        return self.told.owes_all


def sliced(*units, index=0, may_wait=True):
    return [
        Slice(one.parameters[index], one, index, 0, number, may_wait, (0, len(units) * index + number))
        for number, one in enumerate(units)
    ]


def numbers(*some):
    return np.array(some, np.int64)


def followed(slices, counts=None):
    steps = MissedSteps()
    steps.know(1, lambda: [slices], {} if counts is None else counts)
    return steps


def noted(steps, *found, clip=1.0, options=OPTIONS, seed=3):
    """Note a step in which these units have gradients; return the units that begin to miss steps."""
    having = numbers(*(at for at, one in enumerate(steps._slices.units) if one in found))
    begin = list(steps.look([having], steps.steps).units())
    steps.note(MissedStep(clip, seed, steps.steps), lambda _: (ADAMW, options))
    return begin


def test_a_slice_is_told_what_it_missed_when_it_is_looked_at_and_its_steps_are_counted():
    used, unused, counts = FakeUnit(0), FakeUnit(1), {}
    steps = followed(sliced(used, unused), counts)
    counts[unused.parameters[0]] = {"step": 5}
    assert [noted(steps, used, clip=clip) for clip in (1.0, 0.5, 0.25)] == [[unused], [], []]
    assert counts == {unused.parameters[0]: {"step": 5}}
    scalars = [ADAMW.scalars(OPTIONS, step, clip) for step, clip in ((6, 1.0), (7, 0.5), (8, 0.25))]
    expected = Update(scalars[2], None, None, 0, missed=((scalars[0], 0), (scalars[1], 0)), recipe=ADAMW)
    assert [dict(one.pending) for one in (unused, unused, used)] == [{0: expected}, {0: expected}, {}]
    assert counts == {unused.parameters[0]: {"step": 8}}


def test_slices_with_the_same_past_share_an_update_and_others_have_their_own():
    used, one, other, late, counts = *map(FakeUnit, range(4)), {}
    steps = followed(sliced(used, one, other, late), counts)
    noted(steps, used, late)
    noted(steps, used)
    assert one.pending[0] is other.pending[0]
    assert late.pending[0] == Update.of_zeros([(ADAMW.scalars(OPTIONS, 1, 1.0), 0)], ADAMW)
    assert one.pending[0].misses == 2


def test_options_are_those_of_each_step_whatever_becomes_of_them():
    used, unused = FakeUnit(0), FakeUnit(1)
    steps, options = followed(sliced(used, unused)), {**OPTIONS, "lr": torch.tensor(0.5)}
    for _ in range(2):
        noted(steps, used, options=options)
        options["lr"].mul_(0.5)
    options["weight_decay"] = 7.0
    first, second = (ADAMW.scalars({**OPTIONS, "lr": lr}, step, 1.0) for step, lr in ((1, 0.5), (2, 0.25)))
    assert unused.pending[0] == Update.of_zeros([(first, 0), (second, 0)], ADAMW)


def test_options_in_tensors_are_those_of_each_step_for_a_slice_of_another_count_too():
    used, unused = FakeUnit(0), FakeUnit(1)
    steps = followed(sliced(used, unused), {unused.parameters[0]: {"step": 5}})
    options = {**OPTIONS, "betas": (torch.tensor(0.5), torch.tensor(0.75))}
    noted(steps, used, options=options)
    for one in options["betas"]:
        one.mul_(0.5)
    expected = Update.of_zeros([(ADAMW.scalars({**OPTIONS, "betas": (0.5, 0.75)}, 6, 1.0), 0)], ADAMW)
    assert unused.pending[0] == expected


def test_random_bits_are_those_of_each_slice_and_step():
    used, unused = FakeUnit(0, "int8"), FakeUnit(1, "int8")
    steps = followed(sliced(used, unused))
    noted(steps, used, seed=3)
    noted(steps, used, seed=4)
    update = unused.pending[0]
    keys = [key for _, key in (*update.missed, (None, update.key))]
    assert keys == [kernels.state_key(3, 1, 1), kernels.state_key(4, 1, 2)]


def test_a_slice_whose_gradient_is_in_its_record_misses_the_steps_after_it():
    used, unused = FakeUnit(0), FakeUnit(1)
    steps = followed(sliced(used, unused))
    unused.told[0] = before = Update("its own", None, "grad16", recipe=ADAMW)
    noted(steps, used)
    noted(steps, used)
    first, second = (ADAMW.scalars(OPTIONS, step, 1.0) for step in (1, 2))
    assert unused.pending[0] == before._replace(after=((first, 0), (second, 0)))


def test_a_slice_misses_nothing_while_it_is_frozen():
    used, unused, counts = FakeUnit(0), FakeUnit(1), {}
    steps = followed(sliced(used, unused), counts)
    noted(steps, used)
    unused.parameters[0].requires_grad_(False)
    assert noted(steps, used) == []
    unused.parameters[0].requires_grad_()
    assert noted(steps, used) == [unused]
    assert (unused.pending[0].misses, counts[unused.parameters[0]]) == (2, {"step": 2})


def test_an_expert_on_other_ranks_has_its_steps_counted_and_no_update():
    used, unused, counts = FakeUnit(0), FakeUnit(1, is_elsewhere=True), {}
    steps = followed(sliced(used, unused), counts)
    noted(steps, used)
    assert (dict(unused.pending), counts[unused.parameters[0]]) == ({}, {"step": 1})


@pytest.mark.parametrize(
    ("before", "may_wait", "due"), [(0, True, 3), (2, True, 1), (math.inf, True, 1), (0, False, 1)]
)
def test_a_slice_is_due_when_it_has_missed_as_many_steps_as_it_may(monkeypatch, before, may_wait, due):
    monkeypatch.setattr(missed, "MISSED_LIMIT", 3)
    used, unused = FakeUnit(0), FakeUnit(1)
    steps = followed(sliced(used, unused, may_wait=may_wait))
    if before:
        tensor = torch.zeros(1) if before == math.inf else None
        unused.told[0] = Update(None, tensor, None, missed=((None, 0),) * 1)
    for _ in range(due):
        assert steps.due() == []
        noted(steps, used)
    assert steps.due() == [unused]
    noted(steps, used)  # nobody has told it
    assert steps.due() == [unused]
    assert unused.pending
    assert steps.due() == [unused], "whoever looked, ranks flush the same"
    unused.told.clear()
    noted(steps, used)
    assert steps.due() == ([] if may_wait else [unused])


def test_what_fails_while_a_slice_is_told_is_told_the_next_time(monkeypatch):
    used, unused, counts = FakeUnit(0), FakeUnit(1), {}
    steps = followed(sliced(used, unused), counts)
    noted(steps, used)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(MissedStep, "scalars", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        steps._stacks[0].tell([1])
    assert unused.told == {}
    steps._stacks[0].tell([1])
    steps._stacks[0].tell([1])
    assert (unused.told[0].misses, counts[unused.parameters[0]]) == (1, {"step": 1})


def test_steps_are_dropped_that_all_slices_have_been_told_of(monkeypatch):
    monkeypatch.setattr(missed, "MISSED_LIMIT", 4)
    used, unused, counts = FakeUnit(0), FakeUnit(1), {}
    steps = followed(sliced(used, unused), counts)
    for _ in range(30):
        for unit in steps.due():
            unit.pending.clear()
        noted(steps, used)
    assert len(steps._stacks[0]._steps) <= 9
    assert unused.pending
    assert counts[unused.parameters[0]] == {"step": 30}


def test_slices_that_are_told_at_different_times_miss_the_steps_of_each(monkeypatch):
    monkeypatch.setattr(missed, "MISSED_LIMIT", 5)
    used, *others = units = [FakeUnit(index) for index in range(5)]
    began = dict(zip(others, (0, 7, 0, 3), strict=True))
    steps = followed(sliced(*units), {one.parameters[0]: {"step": step} for one, step in began.items()})
    since, clips = dict.fromkeys(others, 0), []
    for number in range(40):
        for one in [one for place, one in enumerate(others) if number % (place + 2) == 0]:
            counts = range(began[one] + since[one] + 1, began[one] + number + 1)
            expected = [(ADAMW.scalars(OPTIONS, count, clips[count - began[one] - 1]), 0) for count in counts]
            assert dict(one.pending) == ({0: Update.of_zeros(expected, ADAMW)} if expected else {})
            one.told.clear()
            since[one] = number
        clips.append(1.0 / (number + 1))
        noted(steps, used, clip=clips[-1])


def test_options_out_of_range_are_an_error_of_their_step():
    used, unused = FakeUnit(0), FakeUnit(1)
    steps = followed(sliced(used, unused))
    with pytest.raises(ValueError, match="lr"):
        noted(steps, used, options={**OPTIONS, "lr": -1.0})


def test_slices_of_several_stacks_in_a_unit_miss_the_same_steps_though_they_are_told_in_the_middle_of_one():
    used, unused, counts = FakeUnit(0), FakeUnit(1), {}
    steps = MissedSteps()
    steps.know(1, lambda: [sliced(used, unused), sliced(used, unused, index=1)], counts)
    for number in range(4):
        begin = steps.look([numbers(2, 0)], 0)
        places = list(zip(begin.units(), begin.places(), strict=True))
        assert places == ([] if number else [(unused, 0), (unused, 1)])
        assert len(list(begin.for_the_first_time().units())) == len(places)
        if number == 2:
            assert unused.pending[0].misses == 2
        began = steps.note(MissedStep(1.0, 0), lambda _: (ADAMW, OPTIONS))
        assert began == ([] if number % 2 else [unused, unused])
    assert [unused.pending[index].misses for index in (0, 1)] == [4, 4]
    assert [counts[one]["step"] for one in unused.parameters] == [4, 4]


def test_other_stacks_than_before_are_followed_from_then_on_and_the_former_are_told():
    one, other, counts = FakeUnit(0), FakeUnit(1), {}
    steps = MissedSteps()
    for known in (1, 2):
        steps.know(known, lambda: [sliced(one, other)], counts)
        assert list(steps.look([numbers(0)], 0).units()) == [other]
        steps.note(MissedStep(1.0, 0), lambda _: (ADAMW, OPTIONS))
    assert counts[other.parameters[0]] == {"step": 1}
    steps.tell_all()
    assert (counts[other.parameters[0]], other.told[0].misses) == ({"step": 2}, 2)
    assert list(steps.look([numbers()], 0).units()) == []


def test_of_several_stacks_and_watches_those_alone_miss_a_step_in_which_slices_of_theirs_have_gradients():
    units, counts, steps = list(map(FakeUnit, range(6))), {}, MissedSteps()
    of_unit = [
        Slice(one.parameters[0], one, 0, 0, number, True, (number // 4, number % 4))
        for number, one in enumerate(units)
    ]
    steps.know(1, lambda: [of_unit[:2], of_unit[2:4], of_unit[4:]], counts)
    for used, found, missing in (
        ([3, 0], ([3, 0], []), [1, 2]),
        ([1], ([1], []), [0]),
        ([5], ([], [1]), [4]),
    ):
        for one in used:
            units[one].pending.clear()
        begin = steps.look([numbers(*one) for one in found], 0)
        assert [one.index for one in begin.units()] == missing, found
        assert list(map(id, begin.parameters())) == [id(units[one].parameters[0]) for one in missing]
        steps.note(MissedStep(1.0, 0), lambda _: (ADAMW, OPTIONS))
    steps.tell_all()
    assert [counts.get(one.parameters[0], {}).get("step", 0) for one in units] == [1, 1, 1, 0, 1, 0]


def test_units_of_a_layer_are_told_together_what_a_look_at_each_would_tell():
    told_apart, told_together = ([FakeUnit(index) for index in range(5)] for _ in range(2))
    for units in (told_apart, told_together):
        steps, both = MissedSteps(), [sliced(*units), sliced(*units, index=1)]
        steps.know(1, lambda both=both: both, {})
        units[2].told[0] = Update("its own", None, "grad16", recipe=ADAMW)
        for number in range(4):
            noted(steps, units[0], *units[3 : 4 if number else 5])
    owing = told_together[1].told.owes
    PendingUpdates.tell_together([one.told for one in told_together])
    assert (owing, [one.told.owes for one in told_together]) == (True, [False] * 5)
    assert [one.told for one in told_together] == [dict(one.pending) for one in told_apart]
    assert [one.misses for one in told_together[2].told.values()] == [4, 4]


def test_what_slices_of_several_stacks_miss_is_the_same_as_long_as_their_steps_are():
    units, counts, steps = list(map(FakeUnit, range(6))), {}, MissedSteps()
    second = [one._replace(known_as=(1, one.known_as[1])) for one in sliced(*units[3:])]
    steps.know(1, lambda: [sliced(*units[:3]), second], counts)
    clips, of_second = (0.5, 0.25, 0.125), (0.5, 0.125)
    for number, clip in enumerate(clips):  # the second one is of one stack alone
        steps.look([numbers(0), numbers(*([] if number == 1 else [0]))], 0)
        steps.note(MissedStep(clip, 0, steps.steps), lambda _: (ADAMW, OPTIONS))
    PendingUpdates.tell_together([one.told for one in units])
    for some, missed_clips in ((units[1:3], clips), (units[4:], of_second)):
        expected = [(ADAMW.scalars(OPTIONS, step, clip), 0) for step, clip in enumerate(missed_clips, 1)]
        assert [dict(one.told) for one in some] == [{0: Update.of_zeros(expected, ADAMW)}] * 2
    for clip in (0.75, 0.5):  # and these are of both
        steps.look([numbers(0), numbers(0)], 0)
        steps.note(MissedStep(clip, 0, steps.steps), lambda _: (ADAMW, OPTIONS))
    counts[units[4].parameters[0]]["step"] = counts[units[1].parameters[0]]["step"]
    PendingUpdates.tell_together([units[1].told, units[4].told])
    first, second = units[1].told[0], units[4].told[0]
    assert first.missed[-1] is second.missed[-1], "computed once"
    assert (first.scalars, first.misses, second.misses) == (second.scalars, 5, 4)

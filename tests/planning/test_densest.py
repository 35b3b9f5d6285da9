"""The fields that host memory keeps, chosen by arrays. Trusted: that choice, one field by one."""

import random

import numpy as np
import pytest

import plain_choice
from infinity.planning.densest import FieldColumns, Rest, numbered
from infinity.planning.frequency import Frequencies
from infinity.planning.many_slices import revise_by_likely, revise_in_host
from infinity.planning.placement import Candidate, PlacementBudget, choose, revise

FIELDS = ("hi", "lo", "m", "v")


def drawn(draw, units):
    """Fields of many sizes, whose densities are often equal, or half a hundredth from each other."""
    found = []
    for unit in range(units):
        for field in draw.sample(FIELDS, draw.randint(1, 4)):
            reads = draw.choice([0.0, 0.125, 0.285, 1.005, draw.random() * 3, draw.randrange(300) / 200])
            found.append(
                Candidate(unit, field, draw.choice([1, 20, 20, 40]), reads, draw.choice([0, 1, 2.675]))
            )
    draw.shuffle(found)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_arrays_choose_what_one_field_after_the_other_chooses(seed):
    draw = random.Random(seed)
    candidates = drawn(draw, draw.choice([1, 3, 30]))
    placed = {one.key: "host" for one in candidates if draw.random() < 0.3}
    given = draw.randrange(900), draw.choice([0, 50, 400]), placed, draw.choice([1, 20, 64])
    assert choose(candidates, *given) == plain_choice.choose(candidates, *given)


def test_nothing_is_chosen_of_nothing_and_where_nothing_fits():
    assert choose([], 100, 0) == []
    assert choose([Candidate(0, "hi", 8, 1, 1)], 7, 0) == []


def test_a_revision_by_arrays_is_that_of_one_candidate_after_the_other():
    draw, frequencies, old = random.Random(7), Frequencies(60), {}
    numbers, _ = numbered(FIELDS * 60)
    keys, moved = [(unit, name) for unit in range(60) for name in FIELDS], 0
    for _ in range(30):
        for unit in draw.choices(range(60), [1 / (one + 1) for one in range(60)], k=25):
            frequencies.used(unit)
            frequencies.updated(unit)
        frequencies.close_step()
        budget = PlacementBudget(0, draw.choice([900, 1500]), draw.choice([0, 100]))
        candidates = [
            Candidate(unit, name, 40, frequencies.fetches(unit), frequencies.updates(unit))
            for unit in range(60)
            for name in FIELDS
        ]
        of_row = np.repeat(np.arange(60), len(FIELDS))
        density = (frequencies.fetches_of_all() + frequencies.updates_of_all())[of_row]
        there = np.array([one.key in old for one in candidates])
        columns = FieldColumns(of_row, numbers, np.full(240, 40), density, there)
        found, expected = revise_in_host(old, keys, columns, budget), revise(old, candidates, budget)
        assert found == expected
        assert list(found.placement) == list(expected.placement), "in the same order"
        moved += len(found.moves)
        old = found.placement
    assert len(old) > 10 < moved


@pytest.mark.parametrize("gradient_nbytes", [0, 100, 2000])
def test_a_revision_by_the_densest_fields_is_that_of_all_or_it_is_left_to_all(gradient_nbytes):
    draw, by_some, units = random.Random(gradient_nbytes), 0, 100
    keys = [(unit, name) for unit in range(units) for name in FIELDS]
    of_row, (numbers, _) = np.repeat(np.arange(units), len(FIELDS)), numbered(FIELDS * units)
    nbytes = np.tile([20, 20, 40, 40], units)
    for _ in range(60):
        rates = np.array([3 / (1 + draw.randrange(units)) for _ in range(units)])
        density = rates[of_row] * np.tile([1.5, 1.0, 1.0, 1.0], units)
        placed = np.array([draw.random() < 0.05 for _ in keys])
        rest = float(np.quantile(density, draw.choice([0.5, 0.8, 0.95])))
        rows = np.flatnonzero((density > rest) | placed)
        budget = PlacementBudget(0, draw.choice([100, 900, 3000]), gradient_nbytes)
        old = {keys[row]: "host" for row in np.flatnonzero(placed)}
        every = FieldColumns(of_row, numbers, nbytes, density, placed)
        some = FieldColumns(of_row[rows], numbers[rows], nbytes[rows], density[rows], placed[rows])
        found = revise_by_likely(old, [keys[row] for row in rows], some, Rest(rest, 20), budget)
        if found is not None:
            expected = revise_in_host(old, keys, every, budget)
            assert found == expected
            assert list(found.placement) == list(expected.placement), "in the same order"
            by_some += 1
    assert 0 < by_some < 60


def test_fields_of_no_use_decide_nothing():
    some = FieldColumns(*(np.array([one]) for one in (0, 0, 8, 1.0, False)))
    found = revise_by_likely({}, [(0, "hi")], some, Rest(0.0, 8), PlacementBudget(0, 100, 0))
    assert found is not None
    assert list(found.placement) == [(0, "hi")]

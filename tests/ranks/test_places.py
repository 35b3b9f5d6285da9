"""What messages call ranks of a mesh, and where ranks have used other modules. Faked: the other rank."""

import pytest

from infinity.errors import RanksError
from infinity.planning.trace import Phase, Use
from infinity.ranks.mesh import data_of_groups
from infinity.ranks.places import Names, with_stages
from infinity.ranks.uses import agree_on_uses, compare_uses

UNITS = ["embedding", "blocks.0", "blocks.1", "head"]


def test_ranks_of_no_mesh_are_called_by_their_numbers_in_the_group():
    names = Names([4, 6, 8], 1)
    assert str(names) == "rank 1 of 3"
    assert names.of(0, 2) == "rank 0, 2"
    assert names.told(["a", "b", "a"]) == "rank 0, 2: a; rank 1: b"


def test_ranks_of_a_mesh_are_called_by_their_places_and_their_numbers_in_the_world():
    names = Names([1, 3], 1)
    names.lie_at({0: {"dp": 0, "tp": 0}, 1: {"dp": 0, "tp": 1}, 3: {"dp": 1, "tp": 1}})
    assert str(names) == "rank 1 of 2 (dp=1, tp=1, rank 3 of the world)"
    assert names.told(["forward a", "forward b"]) == (
        "rank 0 (dp=0, tp=1, rank 1 of the world): forward a; "
        "rank 1 (dp=1, tp=1, rank 3 of the world): forward b"
    )


def test_ranks_with_other_stages_are_where_this_one_is_but_for_the_stage():
    """A mesh (stage, data) of two by two: ranks 2 and 3 have the second stage."""
    places = with_stages({2: {"dp": 0}, 3: {"dp": 1}}, 3, [1, 3])
    assert places == {
        1: {"dp": 1, "stage": 0},
        2: {"dp": 0, "stage": 1},
        3: {"dp": 1, "stage": 1},
    }
    names = Names([1, 3], 0)
    names.lie_at(places)
    assert names.of(0) == "rank 0 (dp=1, stage 0, rank 1 of the world)"
    assert names.of(1) == "rank 1 (dp=1, stage 1, rank 3 of the world)"
    assert with_stages({}, 0, [0, 5]) == {0: {"stage": 0}, 5: {"stage": 1}}


def test_ranks_that_an_mpu_names_have_places_as_well():
    of = data_of_groups([0, 2], [[0, 1], [2, 3]], 2)
    assert of.places[1] == {"data": 0, "tensor": 1}
    assert of.places[2] == {"data": 1, "tensor": 0}


class OfTwo:
    """This rank, of two along a dimension "tp"; the other one has used what it is given."""

    def __init__(self, other):
        self.names = Names([0, 1], 0)
        self.names.lie_at({0: {"tp": 0}, 1: {"tp": 1}})
        self._other, self.asked = other, 0

    def same(self, digest, _what):
        self.asked += 1
        return digest >= 0 and self._other is UNITS

    def least(self, value, _what):
        return min(value, -len(self._other))

    def agree(self, what):
        self.asked += 1
        number = int(what.split()[1]) - 1
        text = self._other[number] if number < len(self._other) else "nothing more"
        if text not in what:
            raise RanksError(self.names.told([what, f"use {number + 1} of a step, {text}"]))


def uses(*numbers):
    return [Use(Phase.FORWARD, number) for number in numbers]


@pytest.mark.parametrize(
    ("mine", "other", "said"),
    [
        (
            (0, 1, 3),
            ["forward embedding", "forward blocks.1", "forward head"],
            (
                "rank 0 (tp=0): use 2 of a step, forward blocks.0; "
                "rank 1 (tp=1): use 2 of a step, forward blocks.1"
            ),
        ),
        (
            (0,),
            ["forward embedding", "forward head"],
            "rank 0 (tp=0): use 2 of a step, nothing more; rank 1 (tp=1): use 2 of a step, forward head",
        ),
    ],
)
def test_the_first_use_that_differs_is_named_with_the_places_of_those_that_differ(mine, other, said):
    ranks = OfTwo(other)
    with pytest.raises(RanksError) as told:
        compare_uses(ranks, uses(*mine), UNITS.__getitem__)
    assert str(told.value) == said


def test_ranks_that_have_used_the_same_exchange_one_number():
    ranks = OfTwo(UNITS)
    compare_uses(ranks, uses(0, 1, 2, 3), UNITS.__getitem__)
    assert ranks.asked == 1
    agree_on_uses(OfTwo([f"forward {name}" for name in UNITS]), uses(0, 1, 2, 3), UNITS.__getitem__)

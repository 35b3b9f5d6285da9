"""Updates between step() and the pass that applies them. Nothing is faked but their scalars."""

from infinity.records.update_rules import ADAMW
from infinity.records.updates import PendingUpdates, Update


def missed(scalars, key=0):
    return Update(scalars, None, None, key)


def test_steps_with_gradients_of_zeros_wait_in_their_order():
    steps = [("second", 2), ("third", 3), ("fourth", 4)]
    found = missed("first", 1).then_missed(steps[:1]).then_missed(steps[1:])
    assert (found.missed, found.scalars, found.key) == ((("first", 1), *steps[:2]), "fourth", 4)
    assert found == Update.of_zeros([("first", 1), *steps], ADAMW)


def test_what_a_pass_gives_back_stands_behind_what_was_decided_meanwhile():
    pending = PendingUpdates({0: missed("old"), 1: missed("other")})
    taken = pending.take()
    assert (dict(pending), taken.keys()) == ({}, {0, 1})
    pending[0] = missed("new")
    pending.put_back(taken)
    assert {index: one.scalars for index, one in pending.items()} == {0: "new", 1: "other"}

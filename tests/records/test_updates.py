"""Updates between step() and the pass that applies them. Nothing is faked but their scalars."""

from infinity.records.updates import PendingUpdates, Update


def missed(scalars, key=0):
    return Update(scalars, None, None, key)


def test_steps_with_gradients_of_zeros_wait_in_their_order():
    before = missed("first", 1).then_missed("second", 2).then_missed("third", 3)
    assert (before.missed, before.scalars, before.key) == ((("first", 1), ("second", 2)), "third", 3)


def test_what_a_pass_gives_back_stands_behind_what_was_decided_meanwhile():
    pending = PendingUpdates({0: missed("old"), 1: missed("other")})
    taken = pending.take()
    assert (dict(pending), taken.keys()) == ({}, {0, 1})
    pending[0] = missed("new")
    pending.put_back(taken)
    assert {index: one.scalars for index, one in pending.items()} == {0: "new", 1: "other"}

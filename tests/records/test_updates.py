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


class Known:
    """Stands for a stack, of whose slices one misses a step."""

    def __init__(self, pending, *, of_slice):
        self.pending, self.of_slice, self.asked = pending, of_slice, []

    def tell(self, numbers):
        for number in numbers:
            self.asked.append(number)
            if self.owes(number):
                self.pending[number] = missed("told")

    def owes(self, number):
        return number == self.of_slice


def test_updates_are_known_to_be_plain_until_others_are_put_told_or_given_back():
    plain, other = Update(None, None, "grad16"), missed("zeros")
    pending = PendingUpdates()
    assert pending.owe() is False, "nobody has looked"
    assert [pending.put(0, plain), pending.owe(), pending.put(1, plain), pending.owe()] == [True] * 4
    assert [pending.put(0, other), pending.owe(), pending.put(0, plain), pending.owe()] == [
        False,
        False,
        True,
        False,
    ], "of several, all have to be"
    taken = pending.take()
    assert (pending.put(0, plain), pending.owe()) == (True, True)
    pending.tell()
    assert pending.owe() is False
    pending.clear()
    assert (pending.put(1, plain), pending.owe()) == (True, True)
    pending.put_back(taken)
    assert (pending.owe(), pending.begun) == (False, 9)


def test_what_is_pending_is_of_slices_alone_where_these_owe_all_of_it():
    pending = PendingUpdates()
    known = Known(pending, of_slice=0)
    for number in (0, 1):
        pending.may_miss(number, known, number)
    assert (pending.owes_all, pending.owe(), pending.owes_all) == (False, False, True)
    pending.tell()
    assert (known.asked, dict(pending), pending.owes_all) == ([0, 1], {0: missed("told")}, False)
    pending.owe()
    assert pending.owes_all
    pending.put(1, missed("decided"))
    assert not pending.owes_all


def test_who_knows_anew_what_a_slice_misses_is_asked_behind_who_knew_before():
    pending = PendingUpdates()
    before, now = (Known(pending, of_slice=0) for _ in range(2))
    pending.may_miss(0, before, 0)
    pending.owe()
    pending.may_miss(0, now, 0)
    assert (before.asked, now.asked) == ([0], [])
    pending.owe()
    pending.tell()
    assert (before.asked, now.asked) == ([0], [0])

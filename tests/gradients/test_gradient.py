"""A stored gradient goes from form to form as it may, and no other way. Nothing is faked but its unit."""

import itertools

import pytest
import torch

from infinity.gradients.gradient import _NEXT, Form, Gradient
from infinity.lane.outgoing import Lease
from infinity.storage.memory import Ledger


class Unit:
    name = "layers.3"


def values():
    return torch.ones(8, dtype=torch.bfloat16)


BECOME = {
    Form.LOCAL: lambda gradient, _: gradient.be_local(),
    Form.HOST: lambda gradient, _: gradient.keep(values()),
    Form.OUTGOING: lambda gradient, share: gradient.send(values(), lease(share)),
    Form.SPILLED: lambda gradient, _: gradient.spill("grad16"),
    Form.APPLIED: lambda gradient, _: gradient.apply(),
}
WAYS = {
    Form.ZERO: [],
    Form.LOCAL: [Form.LOCAL],
    Form.HOST: [Form.HOST],
    Form.OUTGOING: [Form.OUTGOING],
    Form.SPILLED: [Form.OUTGOING, Form.SPILLED],
    Form.APPLIED: [Form.HOST, Form.APPLIED],
}


def lease(share):
    share.reserve_anyway(16)
    return Lease(share, 16)


@pytest.fixture
def unit():
    return Unit()


@pytest.mark.parametrize(("form", "then"), list(itertools.product(Form, BECOME)))
def test_a_form_is_followed_by_those_that_may_follow_it_alone(unit, form, then):
    share = Ledger(100)
    gradient = Gradient(unit, 0, Ledger(100))
    for one in WAYS[form]:
        BECOME[one](gradient, share)
    assert gradient.form is form
    if (form, then) == (Form.SPILLED, Form.OUTGOING):  # what came later waits to be added to it
        BECOME[then](gradient, share)
        assert gradient.form is Form.SPILLED
    elif then in _NEXT[form]:
        BECOME[then](gradient, share)
        assert gradient.form is then
    else:
        with pytest.raises(AssertionError, match=f"{form.value} cannot become {then.value}"):
            BECOME[then](gradient, share)
        assert gradient.form is form


def test_a_gradient_that_stays_after_all_gives_its_lease_back(unit):
    share, gradient = Ledger(100), Gradient(unit, 0, Ledger(100))
    gradient.send(values(), lease(share))
    gradient.keep(gradient.in_memory)
    assert share.held_nbytes == 0


@pytest.mark.parametrize("use", [lambda one: one.spill("grad16"), Gradient.apply])
def test_the_lease_goes_where_the_values_go(unit, use):
    share, gradient = Ledger(100), Gradient(unit, 0, Ledger(100))
    gradient.send(values(), lease(share))
    given = use(gradient)
    assert share.held_nbytes == 16
    assert gradient.tensor is None
    given.end()
    assert share.held_nbytes == 0


def test_a_gradient_that_is_dropped_on_its_way_loses_no_part_of_the_share(unit):
    share, gradient = Ledger(100), Gradient(unit, 0, Ledger(100))
    gradient.send(values(), lease(share))
    del gradient
    assert share.held_nbytes == 0


def test_a_spilled_gradient_that_is_read_back_counts_as_kept_until_it_goes(unit):
    share, kept = Ledger(100), Ledger(100)
    gradient = Gradient(unit, 0, kept)
    gradient.send(values(), lease(share))
    given = gradient.spill("grad16")
    given.end()
    gradient.bring_back(values())
    assert (gradient.form, kept.held_nbytes, share.held_nbytes) == (Form.HOST, 16, 0)
    del gradient
    assert kept.held_nbytes == 0

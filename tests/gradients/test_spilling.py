"""Which gradients a spill adds, carries and replaces. Trusted: nothing else; the decision is pure."""

import pytest

from infinity.gradients.spilling import Outbound, Spill, plan_spill

NONE: frozenset[int] = frozenset()
NEW, NEW32 = Outbound(fp32=False, adds=False), Outbound(fp32=True, adds=False)
MORE = Outbound(fp32=False, adds=True)

CASES = {
    "first gradients stay in 16 bits": ({0: NEW, 1: NEW}, {}, Spill(None, "grad16", NONE, NONE, NONE)),
    "one in fp32 widens the field": ({0: NEW, 1: NEW32}, {}, Spill(None, "grad32", NONE, NONE, NONE)),
    "a second backward adds, in fp32": (
        {0: MORE},
        {0: "grad16"},
        Spill("grad16", "grad32", frozenset({0}), NONE, NONE),
    ),
    "a sum goes on in fp32": (
        {0: MORE},
        {0: "grad32"},
        Spill("grad32", "grad32", frozenset({0}), NONE, NONE),
    ),
    "others in the record are carried along": (
        {1: NEW},
        {0: "grad16"},
        Spill("grad16", "grad16", NONE, frozenset({0}), NONE),
    ),
    "one in fp32 is carried in fp32": (
        {1: NEW},
        {0: "grad32"},
        Spill("grad32", "grad32", NONE, frozenset({0}), NONE),
    ),
    "a new gradient replaces the stored one of its parameter": (
        {0: NEW},
        {0: "grad16"},
        Spill(None, "grad16", NONE, NONE, frozenset({0})),
    ),
    "all of it at once": (
        {0: NEW, 1: MORE, 2: NEW},
        {0: "grad16", 1: "grad16", 3: "grad16"},
        Spill("grad16", "grad32", frozenset({1}), frozenset({3}), frozenset({0})),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_spill_reads_and_writes_what_its_gradients_need(name: str) -> None:
    outgoing, stored, expected = CASES[name]
    assert plan_spill(outgoing, stored) == expected

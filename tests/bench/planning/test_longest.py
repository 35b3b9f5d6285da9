"""The longest sequence that a plan has room for. Nothing is faked."""

import pytest

from infinity.bench.planning.longest import longest_sequence
from infinity.bench.planning.planned import Question, answer
from infinity.planning.activations import Method
from infinity.planning.architectures import llama
from infinity.planning.capacity import Capacity
from infinity.planning.setting import Setting

GIB = 1 << 30
MODEL = llama("small", 8, 1024, 2816, 32_000)


def asked(machine=None, tokens=2048, **method):
    sharers = method.get("sequence_parallel", 1)
    setting = Setting(GIB, ranks=sharers, method=Method(tokens // sharers, tokens, **method))
    return answer(Question(MODEL, setting, machine or Capacity(16 * GIB, lean_malloc=True)))


def fits(tokens, **method):
    return asked(tokens=tokens, **method).fits


@pytest.mark.parametrize("tokens", [1024, 1 << 20])
def test_the_longest_fits_and_one_of_a_sixteenth_more_does_not(tokens):
    found = longest_sequence(asked(tokens=tokens))
    assert found % 1024 == 0
    assert fits(found)
    assert not fits(found + max(found // 16, 1024))


def test_it_grows_with_what_is_done_for_it_and_with_ranks_that_share_it():
    plain = longest_sequence(asked())
    tiled = longest_sequence(asked(loss_tiles=True))
    by_budget = {"activation_nbytes": 12 * GIB, "loss_tiles": "auto", "sequence_tiles": "auto"}
    assert plain < tiled < longest_sequence(asked(**by_budget))
    assert longest_sequence(asked(loss_tiles=True, sequence_parallel=4)) >= 3.5 * tiled


def test_below_1024_tokens_it_is_the_planned_one_where_that_fits():
    nbytes = next(one for one in range(GIB // 8, 16 * GIB, GIB // 8) if asked(Capacity(one), tokens=64).fits)
    machine = Capacity(nbytes)
    assert not asked(machine, tokens=1024).fits
    assert longest_sequence(asked(machine, tokens=64)) == 64


def test_none_fits_where_the_model_does_not_and_nothing_is_said_of_an_unknown_machine():
    assert longest_sequence(asked(Capacity(GIB // 4))) == 0
    assert longest_sequence(asked(Capacity())) is None

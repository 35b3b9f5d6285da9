"""What ranks send each other in a step. Trusted: arithmetic by hand."""

import math
from dataclasses import replace

import pytest

from infinity.bench.planning.planned import Question, answer
from infinity.bench.planning.sketch import outline_of
from infinity.planning.activations import Activations, KeptOfToken, Method
from infinity.planning.crossing import BETWEEN, BOTH, WITHIN, crossings, place_of
from infinity.planning.divided import of_rank
from infinity.planning.outline import Outline, Stage, UnitOutline
from infinity.planning.setting import Setting
from infinity.planning.simulator import Disk, Rates

HIDDEN, TOKENS = 4, 10
MODEL = Outline(
    "two blocks",
    (UnitOutline("a", ((8, 8),)), UnitOutline("b", ((8, 8),), trainable=False)),
    (Stage((0,), recomputed=True), Stage((1,), recomputed=True)),
    Activations(HIDDEN, 100, (KeptOfToken(),) * 2),
)


def sent(**fields):
    how = {name: fields.pop(name, 1) for name in ("sequence_parallel", "copies")}
    method = Method(TOKENS, TOKENS, **how)
    setting = Setting(1, method=method, **fields)
    return {one.by: one for one in crossings(MODEL, setting)}


@pytest.mark.parametrize(
    ("size", "stride", "local", "place"),
    [
        (4, 1, 8, WITHIN),
        (8, 1, 8, WITHIN),
        (2, 4, 8, WITHIN),
        (2, 8, 8, BETWEEN),
        (4, 4, 8, BOTH),
        (16, 1, 8, BOTH),
        (3, 1, 8, BOTH),
        (4, 16, 8, BETWEEN),
        (2, 1, 1, BETWEEN),
    ],
)
def test_a_group_lies_within_machines_or_between_them(size, stride, local, place):
    assert place_of(size, stride, local) == place


def test_a_rank_alone_sends_nothing():
    assert sent() == {}


def test_weights_are_gathered_at_each_use_and_gradients_summed_once():
    found = sent(ranks=4, local_ranks=4)["data"]
    assert (found.ranks, found.place) == (4, WITHIN)
    assert found.nbytes == (2 + 2 + 1) * 64 * 2 * 3 // 4, "two uses of each, one trained"


def test_layers_are_summed_twice_in_each_pass_of_a_block():
    found = sent(ranks=2, tensor_parallel=2)["tensor"]
    row, passes = TOKENS * HIDDEN * 2, 2 * 3
    assert found.nbytes == (2 * row * (2 * passes + 2) + 2 * TOKENS * 100 * 2) // 2
    assert found.place == BETWEEN
    parts = sent(ranks=2, tensor_parallel=2, copies=2)["tensor"]
    assert parts.nbytes - found.nbytes == 2 * row // 2, "of two blocks, of which ranks keep parts"


def test_sequences_are_exchanged_four_times_in_each_pass_of_a_block():
    found = sent(ranks=2, sequence_parallel=2, local_ranks=2)
    assert found["sequence"].nbytes == 4 * (TOKENS * HIDDEN * 2) * (2 * 3) // 2
    assert found["data"].ranks == 2, "they partition weights as all do"


def test_stages_send_activations_on_and_gradients_back():
    found = sent(ranks=4, pipeline_parallel=4, micro_batches=3)["pipeline"]
    assert found.nbytes == 2 * (TOKENS * HIDDEN * 2) * 3
    assert sent(ranks=2, pipeline_parallel=2)["pipeline"].nbytes == TOKENS * HIDDEN * 2


def test_neighbours_divide_layers_and_stages_are_furthest_apart():
    found = sent(ranks=32, tensor_parallel=4, pipeline_parallel=2, local_ranks=8)
    assert {name: (one.ranks, one.place) for name, one in found.items()} == {
        "tensor": (4, WITHIN),
        "data": (4, BOTH),
        "pipeline": (2, BETWEEN),
    }


def test_what_crosses_takes_the_time_of_its_link():
    outline = of_rank(outline_of("1m"), 2, 1)
    setting = Setting(64 << 20, ranks=2, local_ranks=2, tensor_parallel=2, method=Method(64, 64))
    rates = Rates(Disk(2e9, 1e9, 1.5e9), update=1e9, checked=1e10, copied=1e10, link=1e6)
    question = Question(outline, setting, seconds=1.0, rates=rates, whole=outline_of("1m"))
    slow, fast = answer(question), answer(replace(question, links=(1e9, None)))
    (layers,) = slow.crossings
    assert slow.step_s - fast.step_s == pytest.approx(layers.nbytes * (1e-6 - 1e-9))
    assert slow.whole.parameters == outline_of("1m").parameters
    assert slow.tokens_per_s == pytest.approx(64 / slow.step_s), "both ranks have the same tokens"


def test_second_parts_let_weights_cross_once_and_frozen_ones_never():
    plain = sent(ranks=4, local_ranks=2)["data"]
    second = sent(ranks=4, local_ranks=2, secondary_shard=2)["data"]
    assert (plain.place, second.place) == (BOTH, BOTH)
    share = 64 * 2 // 4
    assert plain.between_nbytes == (2 + 2 + 1) * share
    assert second.between_nbytes == (1 + 0 + 1) * share
    assert second.seconds(math.inf, share) == pytest.approx(2)


def test_ranks_with_memory_in_common_send_nothing_on_one_machine_and_gradients_on_each_of_several():
    assert sent(ranks=4, local_ranks=4, shared_memory=True)["data"].nbytes == 0
    assert sent(ranks=4, local_ranks=2, shared_memory=True)["data"].between_nbytes == 5 * 64 * 2 // 4


def test_an_accelerators_library_is_not_known_to_go_in_two_hops():
    assert sent(ranks=4, local_ranks=2, device_nbytes=1 << 20)["data"].between_nbytes == 5 * 64 * 2 * 3 // 4

"""What one rank has of a model that ranks divide. Trusted: arithmetic by hand, and the models' own shapes."""

import pytest

from infinity.bench.planning.sketch import outline_of
from infinity.errors import ConfigError
from infinity.planning.activations import KeptOfToken, Method, usage
from infinity.planning.divided import of_rank
from infinity.planning.outline import Outline, Stage, UnitOutline
from infinity.planning.setting import Setting

EXPERTS = UnitOutline("experts", ((8, 6, 4), (8, 4, 3)), active=0.25)


def test_each_matrix_is_cut_and_vectors_and_experts_are_not():
    parts = (UnitOutline("mixer", ((8, 4), (5, 4), (4,)), attention=12), EXPERTS)
    whole = Outline("one", parts, (Stage((0, 1), recomputed=True),))
    mine = of_rank(whole, 2, 1)
    assert mine.parts[0].shapes == ((4, 4), (3, 4), (4,))
    assert mine.parts[0].attention == 6
    assert mine.parts[1] == EXPERTS
    assert of_rank(whole, 1, 1) is whole


def test_a_rank_of_a_llama_has_its_share_and_does_its_share_of_the_work():
    whole = outline_of("7b")
    mine = of_rank(whole, 4, 1)
    assert mine.parameters == pytest.approx(whole.parameters / 4, rel=1e-3)
    script, of_whole = (sum(act.amount for act in one.script(2048, 2048)) for one in (mine, whole))
    assert script == pytest.approx(of_whole / 4, rel=1e-3)
    kept, of_all = mine.activations.blocks[0], whole.activations.blocks[0]
    assert kept.mlp == of_all.mlp / 4
    assert of_all.narrow / 4 < kept.narrow < of_all.narrow


@pytest.mark.parametrize("count", [2, 3, 4])
def test_stages_are_cut_so_that_the_heaviest_is_as_light_as_it_can_be(count):
    numels = [5, 1, 9, 2, 2, 7, 3]
    parts = tuple(UnitOutline(str(number), ((1, numel),)) for number, numel in enumerate(numels))
    whole = Outline("chain", parts, tuple(Stage((number,), recomputed=True) for number in range(len(numels))))
    mine = of_rank(whole, 1, count)

    def lightest(rest, left):
        if left == 1:
            return sum(rest)
        stops = range(1, len(rest) - left + 2)
        return min(max(sum(rest[:stop]), lightest(rest[stop:], left - 1)) for stop in stops)

    assert mine.parameters == lightest(numels, count)


def test_a_stage_has_its_own_blocks_and_what_they_keep():
    whole = outline_of("7b")
    mine = of_rank(whole, 1, 4)
    blocks = len(whole.activations.blocks)
    assert len(mine.activations.blocks) == sum(one.recomputed for one in mine.stages) <= blocks / 4 + 1
    assert whole.parameters / 4 <= mine.parameters < 0.3 * whole.parameters
    with pytest.raises(ConfigError, match=f"a pipeline of {blocks + 1} stages: 7b has {blocks} blocks"):
        of_rank(whole, 1, blocks + 1)


def test_micro_batches_in_flight_keep_their_inputs_at_once():
    model = outline_of("7b").activations
    alone, flying = (usage(model, Method(256, 256, in_flight=count), 2) for count in (1, 3))
    assert (flying.inputs_nbytes, flying.block_nbytes) == (3 * alone.inputs_nbytes, alone.block_nbytes)


def test_ranks_that_cannot_be_divided_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"8 ranks, 3 that divide layers x 1 stages"):
        Setting(1, ranks=8, tensor_parallel=3)
    with pytest.raises(ConfigError, match=r"8 ranks, of which 2 have different data, 4 that divide experts"):
        Setting(1, ranks=8, tensor_parallel=4, expert_parallel=4)
    with pytest.raises(ConfigError, match="activation_memory with a pipeline"):
        Setting(1, ranks=2, pipeline_parallel=2, method=Method(activation_nbytes=1))
    assert Setting(1, ranks=8, tensor_parallel=2, pipeline_parallel=2).data_ranks == 2


def test_what_a_block_keeps_beside_its_inner_layers_stays():
    kept = KeptOfToken(narrow=10, mlp=4, pairs=8, gated=6, wide=3)
    parts = (UnitOutline("a", ((2, 2),)),)
    model = Outline("a", parts, (Stage((0,), recomputed=True),), activations=None)
    assert of_rank(model, 2, 1).activations is None
    whole = outline_of("7b")
    swapped = type(whole)(
        whole.name, parts, model.stages, type(whole.activations)(hidden=2, vocabulary=3, blocks=(kept,))
    )
    (mine,) = of_rank(swapped, 2, 1).activations.blocks
    assert (mine.narrow, mine.mlp, mine.pairs, mine.gated, mine.wide) == (8, 2, 4, 3, 3)

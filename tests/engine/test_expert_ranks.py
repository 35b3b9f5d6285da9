"""Ranks that divide the experts among them: real processes over gloo. What they do is in expert_ranks_run.py.

Bit for bit against an emulation in one process, in which threads with plain models hand each other tokens.
"""

import functools
import json

import pytest

from answers import read_answers
from infinity import ConfigError
from infinity.config.sequence_ranks import check_expert_ranks, check_experts
from launches import forked
from places import SUPPORT

pytestmark = [pytest.mark.multi, pytest.mark.disk]

EXACT = {
    2: [
        *("in memory", "nvme", "fp32", "grouped", "grouped fp32", "checkpointed", "reentrant", "lopsided"),
        *("lopsided, frozen below", "frozen experts", "stage 1", "stage 1 once", "stage 2"),
    ],
    4: ["nvme", "fp32", "grouped", "lopsided, frozen below", "stage 1 once"],
}
OTHERS = [
    *("saved", "exported", "gathered", "refused", "durable", "architectures", "traffic", "overflow"),
    *("failing", "beside"),
]
BY_DEFAULT = {
    *("nvme", "lopsided, frozen below"),
    *("saved", "gathered", "refused", "traffic"),
}
"""Of those on two ranks; all others are slow."""


def of(ranks, case):
    """Return a case on so many ranks as a parameter."""
    by_default = ranks == 2 and case in BY_DEFAULT
    return pytest.param(ranks, case, id=f"{ranks}-{case}", marks=[] if by_default else [pytest.mark.slow])


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return a function that says what each of so many ranks answers in a case."""

    @functools.cache
    def all_of(ranks, *, by_default):
        known = [*EXACT[ranks], *(OTHERS if ranks == 2 else ["gathered"])]
        cases = [one for one in known if by_default is (ranks == 2 and one in BY_DEFAULT)]
        folder = tmp_path_factory.mktemp("experts")
        forked(ranks, SUPPORT / "expert_ranks_run.py", folder, *cases, RANKS_DISK=folder)
        return read_answers(folder, ranks)

    def answer(ranks, case):
        given = [
            one.get(case, {"error": "an earlier case ended the run"})
            for one in all_of(ranks, by_default=ranks == 2 and case in BY_DEFAULT)
        ]
        assert [one.get("trace") or one["error"] for one in given if "error" in one] == []
        return given

    return answer


@pytest.mark.parametrize(("ranks", "case"), [of(ranks, one) for ranks in EXACT for one in EXACT[ranks]])
def test_ranks_that_divide_experts_train_bit_for_bit_as_their_emulation_in_one_process(answers, ranks, case):
    given = answers(ranks, case)
    assert [one["different"] for one in given] == [[]] * ranks
    assert [one["more"] for one in given] == [[]] * ranks
    assert [one["losses"] for one in given] == [one["expected"] for one in given]
    assert len({tuple(one["losses"]) for one in given}) == ranks, "each rank has tokens of its own"
    if case.startswith("lopsided"):
        assert [one["used"] > 0 for one in given] == [rank % 2 == 0 for rank in range(ranks)]
    if case == "nvme":
        assert all(one["nvme"] > 0 for one in given)


def test_a_step_sends_the_bytes_of_the_formula_and_gathers_no_expert(answers):
    given = answers(2, "traffic")
    assert sum(one["tokens"] for one in given) == given[0]["expected of all"] == given[0]["planned of all"]
    for one in given:
        assert one["numel"] == pytest.approx(one["planned numel"], rel=0.01)
    assert all(one["gathered"] <= one["at most"] for one in given)
    held = [one["held"] for one in given]
    assert sum(one != other for one, other in zip(*held, strict=True)) == 16  # each expert is on one rank


def test_checkpoints_go_to_one_rank_and_to_ranks_that_do_not_divide_experts_and_back(answers):
    for one in answers(2, "saved"):
        assert all(value for what, value in one.items() if what != "losses"), one


@pytest.mark.slow
def test_exports_load_into_plain_models_and_into_divided_ones(answers):
    for one in answers(2, "exported"):
        assert one["different"] == []
        assert one["logits"] == [True, True]
        divided, together = one["losses"]
        assert divided == pytest.approx(together, rel=1e-3)


@pytest.mark.parametrize(("ranks", "case"), [of(2, "gathered"), of(4, "gathered")])
def test_experts_of_all_ranks_and_their_gradients_are_read_written_and_measured_on_each(answers, ranks, case):
    given = answers(ranks, case)
    for one in given:
        assert all(one[what] for what in ("read", "written", "finite", "near", "edited", "halved"))
        assert one["having"] > 2
    for what in ("norms", "tokens", "having"):
        assert len({json.dumps(one[what]) for one in given}) == 1


def test_what_cannot_be_divided_is_refused_by_name_with_numbers_on_all_ranks_alike(answers):
    given = answers(2, "refused")
    expected = {
        "ranks": "ConfigError: expert_parallel=3: 2 ranks cannot be divided",
        "experts": "ConfigError: expert_parallel=2: the 7 experts of MixtralExperts.gate_up_proj",
        "none": "ConfigError: expert_parallel=2: no model",
        "whole": 'ConfigError: expert_parallel=2 with experts="whole": ranks divide expert',
        "orthogonalized": "UnsupportedError: model.layers.0.mlp.experts.tiles.",
        "orthogonalized, whole": "UnsupportedError: model.layers.0.mlp.experts.tiles.",
        "implementation": "UnsupportedError: model.layers.0.mlp.experts, a TiledMixtralExperts",
        "elsewhere": "UnsupportedError: model.layers.0.mlp.experts.tiles.",
        "assigned": "UnsupportedError: model.layers.0.mlp.experts.tiles.0.down_proj: a tensor was assigned",
    }
    for said in given:
        assert {what: said[what][: len(text)] for what, text in expected.items()} == expected
    same = [what for what in expected if given[0][what] == given[1][what]]
    assert same == [what for what in expected if what != "elsewhere"]


def test_numbers_that_work_are_named():
    with pytest.raises(ConfigError, match="Of 6 ranks, 1, 2, 3, 6 may divide experts"):
        check_expert_ranks(4, 6)
    with pytest.raises(ConfigError, match="Of 6 experts, 1, 2, 3, 6 ranks may have equal parts"):
        check_experts(6, 4, "experts.down_proj")
    check_expert_ranks(2, 6)
    check_experts(6, 2, "experts.down_proj")


@pytest.mark.slow
def test_a_durable_run_goes_on_with_each_ranks_experts(answers):
    for one in answers(2, "durable"):
        assert one["begun"][0] == 0 < one["begun"][1]
        assert one["same"]


@pytest.mark.slow
def test_an_error_on_all_ranks_in_the_middle_leaves_nothing_behind(answers):
    assert all(one["same"] for one in answers(2, "failing"))


@pytest.mark.slow
def test_architectures_give_the_losses_of_experts_that_are_not_divided(answers):
    for one in answers(2, "architectures"):
        assert len(one["far"]) == 15
        assert max(one["far"].values()) < 1e-5
        assert one["tokens"] > 0


@pytest.mark.slow
def test_a_scaled_loss_that_overflows_on_one_rank_skips_the_step_on_all(answers):
    given = answers(2, "overflow")
    assert all(one["steps"] == [3] and one["finite"] for one in given)
    assert given[0]["scales"] == given[1]["scales"] == [256.0, 128.0, 128.0, 256.0]


@pytest.mark.slow
def test_sequences_may_be_divided_as_well(answers):
    given = answers(2, "beside")
    assert given[0]["losses"] == given[1]["losses"]
    assert given[0]["eight"] != given[1]["eight"]

"""Sequences on several ranks over gloo, with the engine: processes of their own, whose answers are JSON.

What the ranks do is in sequence_ranks_run.py; the arithmetic that they are compared with, in
sequence_models.py. One launch runs many cases: starting processes costs more than they do.
"""

import functools

import pytest

import sequence_models
from answers import read_answers
from launches import forked
from places import SUPPORT

pytestmark = [pytest.mark.multi, pytest.mark.disk]

NAMES = tuple(sequence_models.MODELS)
OTHERS = ("in slices", "dropout", "refused", "deepspeed", "accelerate", "trainer", "accelerate in memory")
CASES = {
    2: [*(f"as one rank {name}" for name in NAMES), *(f"exact {name}" for name in NAMES), *OTHERS],
    4: [
        *(f"as one rank {name}" for name in NAMES),
        *(f"exact {name}" for name in NAMES),
        "two sequences",
        "accelerate",
    ],
}
BY_DEFAULT = {"as one rank gpt-oss", "exact qwen3", *OTHERS[:-2]}
"""On two ranks; four ranks, and the other models, are slow."""


def of(ranks, case):
    """Return a case on so many ranks as a parameter."""
    marks = [] if ranks == 2 and case in BY_DEFAULT else [pytest.mark.slow]
    return pytest.param(ranks, case, id=f"{ranks}-{case}", marks=marks)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return a function that says what each of so many ranks answers in a case."""

    @functools.cache
    def all_of(ranks, *, by_default):
        folder = tmp_path_factory.mktemp("sequences")
        cases = [one for one in CASES[ranks] if by_default is (ranks == 2 and one in BY_DEFAULT)]
        forked(ranks, SUPPORT / "sequence_ranks_run.py", folder, *cases, RANKS_DISK=folder)
        return read_answers(folder, ranks)

    def answer(ranks, case):
        given = [one[case] for one in all_of(ranks, by_default=ranks == 2 and case in BY_DEFAULT)]
        assert [one["trace"] for one in given if "error" in one] == []
        return given

    return answer


@pytest.mark.parametrize(
    ("ranks", "name"), [of(n, case) for n in CASES for case in CASES[n] if "one rank" in case]
)
def test_ten_steps_in_fp32_have_the_losses_of_one_rank(answers, ranks, name):
    for one in answers(ranks, name):
        assert len(one["apart"]) == 10
        assert one["apart"] == pytest.approx(one["alone"], rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "name"), [of(n, case) for n in CASES for case in CASES[n] if "exact" in case]
)
def test_steps_in_bf16_have_the_bits_of_the_same_arithmetic_in_one_process(answers, ranks, name):
    for one in answers(ranks, name):
        assert one["losses"] == one["expected"]
        assert one["different"] == []


def test_offloaded_checkpoints_sequence_slices_and_a_loss_without_logits_change_nothing_but_memory(answers):
    for one in answers(2, "in slices"):
        assert one["runs"][0] == one["runs"][1]
        assert one["runs"][0] == pytest.approx(one["plain"], rel=1e-5)


def test_dropout_in_attention_is_the_same_from_the_same_seeds_and_when_it_is_recomputed(answers):
    for one in answers(2, "dropout"):
        assert one["runs"][0] == one["runs"][1] == one["runs"][2]
        assert one["runs"][0] != one["without"]


@pytest.mark.slow
def test_two_sequences_of_two_ranks_train_as_two_ranks_with_whole_sequences(answers):
    for one in answers(4, "two sequences"):
        plain = {
            place: losses for place, losses, _ in (other["plain"] for other in answers(4, "two sequences"))
        }
        for way in ("config", "mesh"):
            place, losses, total = one[way]
            assert losses == pytest.approx(plain[place], rel=1e-5)
            assert total == pytest.approx(one["plain"][2], rel=1e-4)


def test_what_cannot_be_divided_is_refused_on_every_rank_with_numbers(answers):
    for one in answers(2, "refused"):
        assert "2 ranks cannot be divided into sequences of 3 ranks" in one["ranks"]
        assert "9 query heads and 9 key heads cannot be divided among 2 ranks" in one["heads"]
        assert 'attention="sdpa"' in one["eager"]
        assert "rank 0: 1 x 3 tokens" in one["lengths"]
        assert "rank 1: 1 x 4 tokens" in one["lengths"]


def test_deepspeeds_sequence_parallel_size_and_curriculum_by_length_are_applied(answers):
    for one in answers(2, "deepspeed"):
        assert one["shapes"] == [[2, 6], [2, 6], [2, 8], [2, 8]]
        assert one["counts"] == [2, 8]
    assert answers(2, "deepspeed")[0]["losses"] == answers(2, "deepspeed")[1]["losses"]


@pytest.mark.slow
def test_the_trainer_trains_on_parts_as_a_loop_over_whole_sequences_and_evaluates_whole_ones(answers):
    """Two accumulated batches a step; SGD, so that the scale of gradients shows. Whether its callback splits
    batches, as ParallelismConfig(sp_size=2) says, or a loader that takes the ranks' own in turn.
    """
    for one in answers(2, "trainer"):
        for way in ("callback", "loader"):
            assert one[way]["losses"] == pytest.approx(one["expected"], rel=1e-5)
            assert one[way]["apart"] < 1e-6
        assert one["callback"]["evaluated"] == pytest.approx(one["evaluated"], rel=1e-5)


@pytest.mark.slow
def test_the_trainer_resumes_in_the_middle_of_an_epoch_of_parts_and_refuses_whole_batches(answers):
    for one in answers(2, "trainer"):
        assert one["resumed"]["losses"][-1] == pytest.approx(one["expected"][-1], rel=1e-5)
        assert "give it the callback when it is made" in one["refused"]
        assert "step 1 is in the middle of an epoch of 2 steps" in one["skipped"]
        assert "sp_size=3), but 2 ranks share each sequence" in one["other"]


@pytest.mark.parametrize(
    ("ranks", "case"), [of(2, "accelerate"), of(2, "accelerate in memory"), of(4, "accelerate")]
)
def test_a_loop_of_accelerate_with_sp_size_trains_as_one_over_whole_batches(answers, ranks, case):
    """Losses, norms, rates and the last weights; models of Init, and one in DistributedDataParallel."""
    everywhere = answers(ranks, case)
    for one in everywhere:
        parts, whole = one["parts"], one["whole"]
        assert len(parts["losses"]) == 3
        for name in ("losses", "norms"):
            assert parts[name] == pytest.approx(whole[name], rel=1e-5)
        assert parts["total"] == pytest.approx(whole["total"], rel=1e-4)
        assert parts["rate"] == whole["rate"]
        assert (parts["shapes"], whole["shapes"]) == ([[2, 8]] * 3, [[2, 16]] * 3)
        assert one["left"] == [[2, 8]]
        assert one["wrapped"] == ("DistributedDataParallel" if "memory" in case else "LlamaForCausalLM")
    # every row's loss once, in the order of the data, without those that fill the last batch up
    sequences = [one["parts"]["losses"] for one in everywhere[::2]]
    rows = [loss for losses in zip(*sequences, strict=True) for loss in losses for _ in range(2)]
    assert everywhere[0]["parts"]["metrics"] == rows[: 4 * len(sequences) + 1]


def test_a_loop_of_accelerate_refuses_another_sp_size_than_the_models_on_every_rank_alike(answers):
    said = {one["other"] for one in answers(2, "accelerate")}
    assert len(said) == 1
    assert "sp_size=2), but each rank has whole sequences of LlamaForCausalLM" in said.pop()

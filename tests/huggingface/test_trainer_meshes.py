"""Hugging Face's Trainer over a mesh, whose ranks have parts of the same weights: real processes over gloo.

Trusted: the same parallel model in memory, given the same batches; what the ranks do is in
mesh_trainer_run.py. Nothing is faked.
"""

import pytest

from answers import answering, read_answers
from launches import forked
from places import SUPPORT

LAUNCHES = {"tp 2": (2, 1), "dp 2 x tp 2": (4, 2)}
"""Ranks, and how many of them have different data."""
CASES = ["fp32", "bf16", "by its keyword", "resumed", "refused"]
DIVIDED = "loaded divided"
"""By transformers, which divides among all ranks: where all have the same data."""
BEGUN = [*((one, "by its keyword") for one in LAUNCHES), ("tp 2", DIVIDED)]

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return a function that says what each rank of a launch answers in a case."""

    def launched(launch):
        ranks, data = LAUNCHES[launch]
        folder = tmp_path_factory.mktemp("mesh")
        cases = CASES if data > 1 else [*CASES, DIVIDED]
        forked(ranks, SUPPORT / "mesh_trainer_run.py", folder, data, *cases)
        return read_answers(folder, ranks)

    return answering(launched)


@slow
@pytest.mark.multi
@pytest.mark.disk
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_trainer_trains_bit_for_bit_as_the_parallel_model_in_memory(answers, launch, dtype):
    given = answers(launch, dtype)
    for one in given:
        assert one["different"] == []
        logged, expected = one["losses"]
        assert len(logged) == 4
        assert logged == pytest.approx(expected, rel=1e-3)
        assert one["norms"] == given[0]["norms"]
        assert one["nvme"] > 0


@slow
@pytest.mark.multi
@pytest.mark.disk
@pytest.mark.parametrize(("launch", "case"), BEGUN)
def test_a_tp_size_and_a_model_that_transformers_has_divided_train_to_the_same_bits(answers, launch, case):
    for one in answers(launch, case):
        assert one["different"] == []
        assert one["same in a row"]
        assert one["batches"] == 4 * 2 * LAUNCHES[launch][1]
        rows, measured, expected = one["rows"]
        assert (rows, measured) == (6, pytest.approx(expected, rel=1e-5))
        assert one["left to accelerate"] == [2, True, True]


@slow
@pytest.mark.multi
@pytest.mark.disk
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_parallelism_config_that_is_not_the_meshs_is_refused_on_all_ranks(answers, launch):
    for one in answers(launch, "refused"):
        assert "no layer of LlamaForCausalLM is divided" in one["undivided"]
        if LAUNCHES[launch][1] > 1:
            assert one["tp_size"].startswith("UnsupportedError: ParallelismConfig(tp_size=4), but 2 ranks")
            assert one["data"].endswith(
                "Set dp_shard_size=2, or give no ParallelismConfig: the Trainer needs none"
            )


@slow
@pytest.mark.multi
@pytest.mark.disk
@pytest.mark.parametrize("launch", LAUNCHES)
def test_ranks_beside_each_other_are_given_the_same_batches_and_count_once(answers, launch):
    for one in answers(launch, "fp32"):
        assert one["same in a row"]
        assert one["batches"] == 4 * 2 * LAUNCHES[launch][1]
        rows, measured, expected = one["rows"]
        assert rows == 6
        assert measured == pytest.approx(expected, rel=1e-5)
        loss, of_all_rows = one["eval loss"]
        assert loss == pytest.approx(of_all_rows, rel=0.05), "batches differ in how many labels count"


@slow
@pytest.mark.multi
@pytest.mark.disk
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_training_over_a_mesh_resumes_loads_its_best_and_saves_whole_weights(answers, launch):
    for one in answers(launch, "resumed"):
        assert one["different"] == []
        assert one["best"][0] == one["best"][1]
        assert one["names"]
        assert one["shapes"]


@slow
@pytest.mark.multi
@pytest.mark.disk
@pytest.mark.parametrize("launch", LAUNCHES)
def test_what_does_not_go_with_a_mesh_is_refused_by_name_on_all_ranks(answers, launch):
    for one in answers(launch, "refused"):
        assert "give it the callback when it is made" in one["late"]
        assert one["ordinary"].startswith(
            "UnsupportedError: the Trainer does not train own, which was not built"
        )
        assert one["objects"].startswith("UnsupportedError: TrainingArguments(eval_use_gather_object=True)")
        assert one["weights alone"].startswith("UnsupportedError: TrainingArguments(save_only_model=True)")
        assert one["by block"].startswith("UnsupportedError: LlamaForCausalLM is divided among ranks")
        assert one["apart"].startswith(
            "UnsupportedError: TrainingArguments(average_tokens_across_devices=False)"
        )
        assert one["counted"].startswith("UnsupportedError: TrainingArguments(include_num_input_tokens_seen=")
        assert "has no folder 'infinity'" in one["other place"]

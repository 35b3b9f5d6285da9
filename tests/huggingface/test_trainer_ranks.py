"""Hugging Face's Trainer and Accelerate on two ranks: real processes over gloo.

Trusted: the same Trainer, training the reference of several ranks; what the ranks do is in trainer_ranks_run.
One launch runs all that are no slow ones: starting processes costs more than they do.
"""

import functools
import importlib.util

import pytest
import torch
import transformers

import infinity
from answers import read_answers
from launches import forked
from places import SUPPORT
from trainers import ADAM
from trainers_of_ranks import OPTIONS, ROWS, build_llama

pytestmark = [pytest.mark.multi, pytest.mark.disk]

CASES = ["nvme", "joined", "built", "resumed", "accelerated", "afterwards"]
SLOW = ["best", "by block", *(["adapters"] if importlib.util.find_spec("peft") else [])]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return a function that says what both ranks answer in a case."""

    @functools.cache
    def all_of(*cases):
        folder = tmp_path_factory.mktemp("trainer")
        forked(2, SUPPORT / "trainer_ranks_run.py", folder, *cases, RANKS_DISK=folder)
        return read_answers(folder, 2)

    def answer(case):
        both = all_of(*(SLOW if case in SLOW else CASES))
        given = [one.get(case, {"error": "an earlier case ended the run"}) for one in both]
        assert [one.get("trace") or one["error"] for one in given if "error" in one] == []
        return given

    return answer


@pytest.mark.parametrize("case", ["joined", "nvme"])
def test_the_trainer_trains_with_the_references_bits_and_no_wrapper(answers, case):
    """Accumulation, clipping, schedules, checkpointing, smoothing, evaluation; labels that do not count."""
    for one in answers(case):
        assert one["different"] == []
        plain, ours = one["logs"]
        assert len(ours[0]) == 4
        assert ours[:2] == plain[:2]
        norms = [[row[0] for row in logs[2]] for logs in (ours, plain)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        assert one["wrapped"] == {"joined": "LlamaForCausalLM", "nvme": "GPT2LMHeadModel"}[case]
        assert one["autocast"] == (case == "joined")
        assert (one["nvme"] > 0) == (case == "nvme")


def test_a_model_that_a_function_builds_anew_trains_as_the_model_itself(answers):
    for one in answers("built"):
        first, again, itself = one["logs"]
        assert len(first) == 4
        assert first == again == itself
        assert one["different"] == []
        assert one["wrapped"] == "LlamaForCausalLM"


@pytest.mark.filterwarnings(
    "ignore:.*pin_memory.*:UserWarning", "ignore:`gradient_checkpointing:FutureWarning"
)
def test_two_ranks_train_as_one_with_the_joined_batch(answers, tmp_path, repeatable):
    """Within what bf16 gradients, rounded on each rank, explain; each token counts the same."""
    torch.manual_seed(0)
    with infinity.Init(host_memory="64MiB"):
        model = build_llama()
    options = {**OPTIONS, "per_device_train_batch_size": 2, "gradient_checkpointing": True}
    args = transformers.TrainingArguments(str(tmp_path), **options)
    trainer = transformers.Trainer(
        model,
        args,
        train_dataset=ROWS,
        optimizer_cls_and_kwargs=(infinity.AdamW, {**ADAM, "weight_decay": 0.1}),
        callbacks=[infinity.huggingface.TrainerCallback()],
    )
    torch.manual_seed(7)  # of the order of rows, as on the ranks
    trainer.train()
    alone = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    together = [row[0] for row in answers("joined")[0]["logs"][1][0]]
    assert together == pytest.approx(alone, rel=2e-3)


def test_a_training_of_two_ranks_resumes_and_saves_whole_weights(answers):
    for one in answers("resumed"):
        assert one["different"] == []
        assert one["saved"] == [], "from_pretrained reads what the ranks have written together"
        assert one["losses"][1] == one["losses"][0]
        assert {"infinity", "model.safetensors", "rng_state_0.pth", "rng_state_1.pth"} <= set(one["files"])


@pytest.mark.slow
def test_the_best_checkpoint_is_loaded_on_all_ranks_and_a_run_repeated_has_its_bits(answers):
    for one, other in zip(answers("best"), answers("resumed"), strict=True):
        assert one["best step"] == 2
        assert one["evaluated"] == one["best"]
        assert one["losses"] == other["losses"][0]


@pytest.mark.slow
def test_micro_batches_of_two_ranks_share_one_fetch_and_learn_what_they_learn_apart(answers):
    """In fp32. Ranks whose batches are of other lengths, and one whose micro-batches are no batch: then none
    of the ranks runs them together.
    """
    for one in answers("by block"):
        together, apart = one["together"], one["apart"]
        assert len(together["logs"]) == 4
        assert torch.tensor(together["logs"]) == pytest.approx(torch.tensor(apart["logs"]), rel=1e-4)
        assert together["nbytes"] < 0.6 * apart["nbytes"]
        for name in ("other lengths", "apart here"):
            assert one[name][1] == pytest.approx(one[name][0], rel=1e-5)


def test_ranks_generate_texts_of_different_lengths(answers):
    given = answers("afterwards")
    assert [one["same"] for one in given] == [True, True]
    assert [one["length"] for one in given] == [7, 11]


def test_a_loop_of_accelerate_has_the_references_bits_and_its_state_is_saved_and_loaded(answers):
    for one in answers("accelerated"):
        assert one["different"] == []
        assert one["changed"] > 10
        assert one["lost"] == []
        assert len(set(one["losses"])) == 4


def test_records_of_the_log_say_their_rank(answers):
    assert [one["rank in the log"] for one in answers("afterwards")] == [0, 1]


def test_saving_on_one_rank_alone_is_refused_with_what_to_call_instead(answers):
    first, second = answers("afterwards")
    assert "Call infinity.save_pretrained(model, " in first["said"]
    assert second["said"] == ""
    assert "model.safetensors" in first["files"]


@pytest.mark.slow
@pytest.mark.skipif("adapters" not in SLOW, reason="peft is not installed")
def test_adapters_that_are_ordinary_train_as_on_a_base_in_memory(answers):
    """They alone are wrapped in DistributedDataParallel, which gives every rank rank 0's."""
    for one in answers("adapters"):
        assert one["different"] == []
        assert one["own"] == []
        assert one["wrapped"] == "DistributedDataParallel"
        assert "adapter_model.safetensors" in one["files"]
        assert not {"infinity", "model.safetensors"} & set(one["files"])

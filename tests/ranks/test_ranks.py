"""Several ranks train one model: real processes over gloo. What they do is in ranks_run.py.

Bit for bit against plain data parallelism in memory, whose gradients are means summed in fp32 in the order of
ranks. One launch runs many cases: starting processes costs more than they do.
"""

import functools
import json
import re

import pytest
import torch

from answers import read_answers
from infinity import __main__ as cli
from launches import forked, python_of_ranks, torchrun
from places import SUPPORT

EXACT = [
    "llama",
    "gpt2",
    "dropout",
    "mixtral",
    "experts",
    "experts, checkpointed",
    "20 steps of experts",
    "20 steps, checkpointed",
    "max_norm",
    "clip_grad_norm_",
    "accumulated",
    "edited",
    "nvme edited",
    "stage 1 edited",
    "no_sync",
    "backward",
    "reentrant",
    "checkpointed",
    "frozen",
    "nvme",
    "nvme backward",
    "nvme accumulated",
    "blocks",
    "nvme blocks",
    "stage 1",
    "stage 2",
    "stage 2 backward",
    "fp32",
    "nvme fp32",
    "a head in fp32",
    "nvme, a head in fp32",
    "overflow",
    "overflow on nvme",
    "deepspeed",
    "muon",
    "muon clipped",
    "muon fp32",
    "muon backward",
    "muon of experts",
    "muon in bf16 state",
    "muon stage 2",
    "nvme muon",
    "nvme muon in int4",
    "nvme muon in int8",
    "nvme muon backward",
    "mesh",
    "grid",
]
ON_THREE = ["gpt2", "mixtral", "no_sync", "nvme accumulated", "stage 1", "muon"]
ON_FOUR = ["llama", "max_norm", "frozen", "nvme", "nvme muon", "mesh", "grid"]
"""On either there are both optimizers, memory and NVMe."""
NOT_ON_TWO = {"llama", "gpt2", "mixtral", "max_norm", "nvme", "muon", "nvme muon", "grid"}
"""Those of them that on two ranks are parts of other cases."""
CHOSEN = ["chosen", "chosen, checkpointed", "chosen, nvme", "chosen, stage 1", "chosen, stage 2"]
CHOSEN += ["chosen, muon", "chosen, muon checkpointed", "chosen, muon in memory", "chosen, muon forward"]
OTHERS = [
    "chosen",
    "chosen, checkpointed",
    "dropped",
    "evaluating",
    "rounds",
    "alone",
    "gathered",
    "edited differently",
    "seeds",
    "traffic",
    "nvme traffic",
    "memory",
    "node",
    "partitioned",
    "partitioned nvme",
    "activation memory",
    "nvme activation memory",
    "fragments",
    "in files",
    "changed by one",
    "surgery",
    "sweep",
    "gathered differently",
    "different ways",
    "failing",
    "counted",
    "leaving",
    "leaving behind",
    "leaving together",
    "killed",
]
JOINED = ["joined llama", "joined gpt2", "joined mixtral", "joined frozen"]
CASES = {
    2: [
        "cut by budget",
        *(one for one in EXACT if one not in NOT_ON_TWO),
        *(*OTHERS, *CHOSEN[2:], "nvme traffic of 25m", "whole surgery", *JOINED),
    ],
    3: [*ON_THREE, *JOINED[::2], "counted", "leaving", "killed"],
    4: [*ON_FOUR, "chosen, nvme", *JOINED[1::2], "counted", "leaving", "killed"],
}
BY_DEFAULT = {
    *("no_sync", "frozen", "nvme accumulated", "stage 1", "stage 2 backward", "a head in fp32"),
    *("experts", "edited", "overflow on nvme", "deepspeed", "mesh", "joined llama", *OTHERS),
    *("nvme muon backward", "nvme muon in int4"),
} - {"chosen", "partitioned", "nvme activation memory"}  # of each of these there is another
"""Of those on two ranks: every mechanism once; each launch of more ranks, and the other cases, are slow."""


def of(ranks, case):
    """Return a case on so many ranks as a parameter."""
    by_default = ranks == 2 and case in BY_DEFAULT
    return pytest.param(ranks, case, id=f"{ranks}-{case}", marks=[] if by_default else [pytest.mark.slow])


pytestmark = [pytest.mark.multi, pytest.mark.disk]


def launch(folder, ranks, cases):
    """Run cases; return the ranks' answers."""
    forked(ranks, SUPPORT / "ranks_run.py", folder, *cases, RANKS_DISK=folder)
    return read_answers(folder, ranks)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return a function that says what each of so many ranks answers in a case."""

    @functools.cache
    def all_of(ranks, *, by_default):
        cases = [one for one in CASES[ranks] if by_default is (ranks == 2 and one in BY_DEFAULT)]
        return launch(tmp_path_factory.mktemp("ranks"), ranks, cases)

    def answer(ranks, case, *, fails=False):
        answers = all_of(ranks, by_default=ranks == 2 and case in BY_DEFAULT)
        given = [one.get(case, {"error": "an earlier case ended the run"}) for one in answers]
        wrong = [one.get("trace") or one["error"] for one in given if "error" in one]
        assert fails or wrong == []
        return given

    return answer


@pytest.mark.parametrize(
    ("ranks", "case"), [of(ranks, one) for ranks in CASES for one in CASES[ranks] if one in EXACT]
)
def test_ranks_train_bit_for_bit_as_plain_data_parallelism(answers, ranks, case):
    given = answers(ranks, case)
    assert [one["different"] for one in given] == [[]] * ranks
    losses = [tuple(one["losses"]) for one in given]
    assert len(set(losses)) == ranks, "each rank has batches of its own"
    if case.startswith("nvme"):
        assert all(one["nvme"] > 0 for one in given)
    if case == "nvme accumulated" and ranks == 2:  # a smaller share's gradients fit
        assert any(one["spilled"] > 0 for one in given)


@pytest.mark.parametrize(
    ("ranks", "case"),
    [of(ranks, one) for ranks in CASES for one in EXACT if "muon" in one and one in CASES[ranks]],
)
def test_each_matrix_of_muons_has_one_owner_which_sends_its_direction_to_the_others(answers, ranks, case):
    given = answers(ranks, case)
    assert sum(one["orthogonalized"] for one in given) == given[0]["matrices"]
    assert all(one["orthogonalized"] > 0 for one in given), "owners take turns"
    assert {one["exchanged"] for one in given} == {4 * given[0]["elements"]}
    assert [one["momenta"] for one in given] == [given[0]["weights"]] * ranks


@pytest.mark.parametrize(("ranks", "case"), [of(2, "activation memory"), of(2, "nvme activation memory")])
def test_ranks_decide_alike_what_blocks_keep_though_their_batches_differ(answers, ranks, case):
    given = answers(ranks, case)
    assert [one["different"] for one in given] == [[]] * 2
    assert {one["measured"] for one in given} == {2}  # each length of the longest rank
    (reason,) = {one["activations"] for one in given}
    assert reason.startswith("1 of 2 blocks kept")


@pytest.mark.slow
def test_ranks_cut_alike_though_one_has_more_tokens_and_evaluate_with_lengths_of_their_own(answers):
    given = answers(2, "cut by budget")
    for one in given:
        assert one["runs"][0] == one["runs"][1]
        assert "make no logits of 256 words, of 820 tokens for one" in one["activations"]
        assert "each LlamaMLP runs in" in one["activations"]


@pytest.mark.parametrize(("ranks", "case"), [of(2, "experts"), of(2, "experts, checkpointed")])
def test_ranks_that_route_differently_fetch_the_experts_that_any_of_them_needs_and_no_others(
    answers, ranks, case
):
    one, other = answers(ranks, case)
    assert one["used"] == other["used"] < one["units"]


@pytest.mark.parametrize(("ranks", "case"), [*(of(2, one) for one in CHOSEN), of(4, "chosen, nvme")])
def test_ranks_that_call_different_experts_of_a_list_train_as_data_parallelism_does(answers, ranks, case):
    given = answers(ranks, case)
    assert [(one["different"], one["as expected"]) for one in given] == [([], True)] * ranks
    assert len({str(one["called"]) for one in given}) == ranks, "each rank calls experts of its own"


@pytest.mark.slow
def test_a_rank_of_a_group_that_does_not_come_to_init_is_named(answers):
    given = answers(4, "grid")
    assert "rank 1 of the world did not come to Init within 1 s" in given[0]["absent"]


@pytest.mark.parametrize(("ranks", "case"), [of(2, "overflow"), of(2, "overflow on nvme")])
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(answers, ranks, case):
    assert [one["scales"] for one in answers(ranks, case)] == [[256.0, 128.0, 128.0, 256.0]] * 2


def test_deepspeeds_engine_counts_and_deals_for_all_ranks(answers):
    given = answers(2, "deepspeed")
    assert [one["counts"] for one in given] == [[8, 24, 3]] * 2
    rows = [one["rows"] for one in given]
    assert sorted(rows[0] + rows[1]) == list(range(12))


def test_deepspeeds_engine_goes_on_from_a_checkpoint_of_all_ranks(answers):
    assert [one["resumed"] for one in answers(2, "deepspeed")] == [True, True]


def test_a_checkpointed_step_exchanges_every_weight_twice_and_every_gradient_once(answers):
    for one in answers(2, "traffic"):
        assert one["reduce"] == 2 * one["weights"]
        assert one["gather"] <= 2 * 2 * one["weights"]
        assert one["gather"] > 1.8 * 2 * one["weights"] * 0.9  # an embedding's weight is not read in backward
        assert one["read"] == 0


@pytest.mark.parametrize(("ranks", "case"), [of(2, "nvme traffic"), of(2, "nvme traffic of 25m")])
def test_a_ranks_disk_moves_the_bytes_of_its_own_share(answers, ranks, case):
    """26 B per parameter of the share and step, less what is pinned; with spilled gradients 4 more."""
    for one in answers(ranks, case):
        assert 20 < one["backward"] <= 26.5
        assert one["backward"] < one["forward"] <= 30.5
        assert one["pinned"] < 0.1


@pytest.mark.parametrize(
    ("ranks", "case"), [of(ranks, one) for ranks in CASES for one in CASES[ranks] if one in JOINED]
)
def test_ranks_train_the_weights_of_one_rank_with_their_batches_as_one(answers, ranks, case):
    """In fp32, to a thousandth of a learning rate in three steps: only the order of summation differs."""
    assert all(one["apart"] < 1e-3 for one in answers(ranks, case))


@pytest.mark.parametrize(("ranks", "case"), [of(2, "partitioned"), of(2, "partitioned nvme")])
def test_ranks_with_copies_of_activations_keep_a_part_each_and_train_the_same_bits(answers, ranks, case):
    for one in answers(ranks, case):
        assert one["equal"]
        assert len(one["kept"]) >= 3 * 2, "an input of each of two blocks, in three steps"
        assert set(one["kept"]) == {0.5}


def test_a_rank_keeps_what_its_stage_says(answers):
    """ZeRO's formulas with K = 12, of which 2 bytes are the 16-bit weights themselves where those are cut."""
    for one in answers(2, "memory"):
        assert one["1"] == pytest.approx(2 + 2 + 12 / 2, rel=0.05)
        assert one["2"] == pytest.approx(2 + (2 + 12) / 2, rel=0.05)
        assert one["3"] == pytest.approx((2 + 12) / 2, rel=0.05)


def test_the_memory_of_a_machine_and_what_is_in_flight_on_a_disk_are_divided_by_its_ranks(answers):
    for rank, one in enumerate(answers(2, "node")):
        (all_memory, all_depth, _), (memory, depth, folders) = one["alone"], one["shared"]
        assert (memory, depth, folders) == (all_memory // 2, -(-all_depth // 2), ["a"])
        assert all_depth > 1
        memory, _, folders = one["dealt"]
        assert (memory, folders) == (all_memory // 2, ["ab"[rank]])


def test_values_written_in_gathered_are_every_ranks(answers):
    assert [one["values"] for one in answers(2, "gathered")] == [[3.0]] * 2


def test_each_rank_reads_its_own_share_of_a_checkpoints_files(answers):
    given = answers(2, "in files")
    assert all(one["same"] for one in given)
    assert all(one["own"] == ["lm_head"] for one in given)
    assert given[0]["losses"] == given[1]["losses"]
    windows = 2 * 4096 * 31  # of its first and last block at most, for each unit and one more
    assert all(one["read"] < 2 * (one["numel"] + windows) for one in given)


def test_ranks_that_change_a_gradient_differently_are_refused_and_broadcasting_what_one_draws_works(answers):
    for one in answers(2, "edited differently"):
        assert "broadcast" in one["said"]
        assert one["values"] == [1.0, 3.0]


def test_ranks_that_write_different_values_are_refused(answers):
    for one in answers(2, "gathered differently", fails=True):
        assert "the ranks have made different values" in one["error"]


def test_what_deepspeeds_modifier_rank_changes_is_every_ranks_and_what_others_do_is_refused_on_all(answers):
    one, other = (given["found"] for given in answers(2, "changed by one"))
    assert [step["values"] for step in one] == [step["values"] for step in other]
    assert [step["values"] for step in one] == [[[3.0], [3.0]]] + [[[4.0], [4.0]]] * 4
    assert all(step["prompt"] for step in one + other)
    assert [step["said"] for step in one[:2] + other[:2]] == [""] * 4
    for given in (one, other):
        assert "0.weight was changed inside GatheredParameters(modifier_rank=0) by rank 1" in given[2]["said"]
    assert one[3]["said"].startswith("TypeError")
    assert "failed elsewhere: rank 0: TypeError" in other[3]["said"]
    assert "failed elsewhere: rank 1: UnsupportedError: 0.weight was changed" in one[4]["said"]
    assert "0.weight was changed" in other[4]["said"]


def test_user_backward_and_deepspeeds_fragments_are_those_of_all_ranks(answers):
    ranks = answers(2, "fragments")
    assert all(one["same"] and one["whole"] for one in ranks), "loss.backward() is engine.backward(loss)"
    for number, whole in enumerate(ranks[0]["of"]):
        parts = [one["own"][number] for one in ranks]
        assert parts[0] + parts[1] == whole
        assert all(parts)
    cut = len(ranks[0]["own"][0])
    for one in ranks:
        assert (one["set"], one["grad"]) == ([0.25], [torch.tensor(1 / 3).item()])
        assert one["moment"] == [1.0] * cut + [2.0] * (5000 - cut)


def test_a_model_is_drawn_as_rank_0_draws_it_and_each_rank_goes_on_with_its_own_numbers(answers):
    given = answers(2, "seeds")
    assert [one["as rank 0 draws"] for one in given] == [True, True]
    assert given[1]["its own afterwards"] == given[1]["expected afterwards"]


def test_ranks_that_take_different_ways_are_told_which(answers):
    for one in answers(2, "different ways", fails=True):
        error = one["error"]
        assert "rank 0: " in error
        assert "rank 1: " in error
        assert "do different things" in error


@pytest.mark.parametrize(("ranks", "case"), [of(ranks, "counted") for ranks in CASES])
def test_a_step_of_many_layers_needs_a_few_collectives_and_no_agreement(answers, ranks, case):
    """One by one it takes 111 of either kind; it took an agreement before each, too: 444. On more than two
    ranks the model has four layers.
    """
    each = 3 + 9 * (12 if ranks == 2 else 4)
    for one in answers(ranks, case):
        counts = one["buckets"]["collectives"]
        assert 2 <= counts["gather"] + counts["reduce"] <= 8
        assert counts["agree"] == 0
        assert one["one by one"]["collectives"] == {"gather": each, "reduce": each, "agree": 0}
        assert one["buckets"]["bytes"] == one["one by one"]["bytes"]
        assert one["buckets"]["bytes"]["reduce"] > 0
        assert one["same"]


@pytest.mark.parametrize(("ranks", "case"), [of(ranks, "leaving") for ranks in CASES])
def test_ranks_that_leave_what_was_foreseen_are_told_which(answers, ranks, case):
    others = ", ".join(map(str, range(ranks - 1)))
    for one in answers(ranks, case, fails=True):
        assert f"rank {others}: assemble 1; rank {ranks - 1}: assemble 2" in one["error"]


def test_a_rank_that_left_at_an_earlier_place_than_others_wait_at_is_heard(answers):
    for one in answers(2, "leaving behind", fails=True):
        assert "rank 0: assemble 3; rank 1: assemble 2" in one["error"]


def test_ranks_leave_together_what_was_foreseen_and_agree_until_steps_repeat_again(answers):
    one, other = answers(2, "leaving together")
    assert one["weights"] == other["weights"]
    for rank in (one, other):
        *_, longer, shorter = rank["agreed"]
        assert (longer, shorter) == (0, 0)
        assert max(rank["agreed"]) > 0


@pytest.mark.parametrize(("ranks", "case"), [of(ranks, "killed") for ranks in CASES])
def test_a_rank_that_is_killed_when_steps_are_foreseen_is_named(answers, ranks, case):
    *others, _ = answers(ranks, case, fails=True)
    for one in others:
        assert f"rank {ranks - 1} did not answer" in one["error"]


def test_a_rank_that_waits_in_vain_says_for_what_and_who_is_missing(answers):
    """A whole process group that ends is not needed: rank 1 sleeps until rank 0 has said it."""
    waiting, _ = answers(2, "alone", fails=True)
    error = waiting["error"]
    assert "read Linear.weight" in error
    assert "timeout 3 s" in error
    assert "rank 1 did not answer" in error


def test_models_that_are_dropped_leave_no_engine_thread_or_descriptor_on_any_rank(answers):
    for rank in answers(2, "dropped"):
        first, *later = rank["left"][1:]  # what gloo and torch open at the first use they keep
        assert first[0] == 0
        assert [one[:2] for one in later] == [first[:2]] * len(later)
        assert max(one[2] for one in later) <= first[2]


def test_a_rank_that_others_leave_alone_says_so_in_seconds_and_goes_on_when_they_come(answers):
    """And not where one of them does what it does alone by Infinity's own rules."""
    waiting, late = answers(2, "evaluating")
    assert waiting["quiet"] == late["quiet"] == late["told"] == []
    (told,) = waiting["told"]
    assert re.match(
        r"rank 0 of 2 has waited 1 s at compare plans: rank 1 has not come\. Likely cause: ", told
    )
    assert "if rank == 0: model(x)" in told
    assert "timeout of 60 s" in told


def test_rounds_of_two_ranks_are_plain_ones_and_exchange_nothing_once_all_has_come(answers):
    one, other = answers(2, "rounds")
    for rank in (one, other):
        assert rank["same"]
        assert rank["rounds"] == 4
        assert rank["moved"][0] > 0
        assert rank["moved"][1:] == [0, 0, 0]
    assert one["loss"] == other["loss"]


def test_a_rank_that_fails_tells_the_others_why(answers):
    given = answers(2, "failing", fails=True)
    assert "rank 1: " in given[0]["error"]
    assert "planted" in given[0]["error"]
    assert "planted" in given[1]["error"]


@pytest.mark.parametrize("case", ["surgery", pytest.param("whole surgery", marks=pytest.mark.slow)])
def test_surgery_on_two_ranks_is_that_of_torch(answers, case):
    assert [one["wrong"] for one in answers(2, case)] == [[], []]


def test_a_sample_of_a_tensors_methods_does_on_two_ranks_as_in_torch_or_its_refusal_says_what_works(answers):
    """One of 24, each at one budget."""
    assert [one["wrong"] for one in answers(2, "sweep")] == [[], []]


@pytest.mark.slow
def test_every_method_of_a_tensor_does_so_on_two_ranks_at_one_budget(tmp_path):
    """At each of three by turns; in one process each method does at every budget."""
    assert [one["whole sweep"]["wrong"] for one in launch(tmp_path, 2, ["whole sweep"])] == [[], []]


@pytest.mark.parametrize("way", ["forked", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_the_command_trains_on_two_ranks_with_one_log_as_on_one_with_twice_the_batch(
    tmp_path, monkeypatch, capfd, repeatable, way
):
    """Losses within what bf16 sums of other orders explain; the table has both's figures."""
    monkeypatch.setenv("COLUMNS", "200")
    options = ["--preset", "1m", "--steps", "2", "--sequence", "32", "--no-nvme", "--host-memory", "256MiB"]
    runs = {2: ["--batch", "1", "--out", f"{tmp_path}/two"], 1: ["--batch", "2", "--out", f"{tmp_path}/one"]}
    for ranks, own in runs.items():
        if ranks == 2:
            command = ["-m", "infinity", "train", *options, *own]
            if way == "forked":
                ended = python_of_ranks(ranks, *command, folder=tmp_path)
            else:
                ended = [torchrun(ranks, *command)]
            code = max(abs(one.returncode) for one in ended)
            out, err = ("".join(getattr(one, name) for one in ended) for name in ("stdout", "stderr"))
        else:
            code = cli.main(["train", *options, *own])
            out, err = capfd.readouterr()
        assert code == 0, err[-3000:]
        assert out.count("log: ") == 1
        assert out.count("peak memory used") == 1, "one closing table"
        assert err.count("step 2/2: ") == 1, "one progress bar, here as lines"
        rows = re.findall(r"rank (\d)\W+peak memory [\d.]+ .iB; a step reads", out)
        assert rows == (["0", "1"] if ranks == 2 else [])
        shared = r"units 0\.0 MB \(([\d.]+) MB in memory they share\)"
        exchanged = re.findall(rf"exchanged by ranks per step\W+{shared}, gradients 0\.0 MB", out)
        assert len(exchanged) == ranks - 1
        assert all(float(nbytes) > 1 for nbytes in exchanged), "a million parameters of 2 B"
    two, one = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("two", "one")
    )
    assert len(two) == 2
    assert two == pytest.approx(one, rel=2e-3)

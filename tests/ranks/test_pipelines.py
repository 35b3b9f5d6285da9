"""Stages of torch's pipelines, an engine for each rank's: real processes over gloo. What they do is in
pipeline_run.py.

Losses, weights and moments of all stages are compared bit for bit with the same pipeline in memory. Nothing
is faked.
"""

import pytest

from answers import answering, read_answers
from launches import forked
from places import SUPPORT

EXACT = [
    "gpipe, fp32, tight, max_norm",
    "1f1b, bf16, tight, clip_grad_norm_, checkpointed",
    "interleaved, bf16, tight, looked at",
    "zero bubble, fp32, clip_grad_norm_, frozen",
    "zbv, fp32, tied",
]
KINDS = ("gpipe", "1f1b", "interleaved", "looped", "zero bubble", "zbv", "dual pipe")
OPTIONS = (", tight", ", tight, max_norm, accumulated", ", clip_grad_norm_")
MORE = [
    "zero bubble, bf16, tight, max_norm",
    "1f1b, bf16, accumulated",
    "dual pipe, bf16, frozen",
    *(
        f"{kind}, {'bf16' if (number + place) % 2 else 'fp32'}{options}"
        for number, kind in enumerate(KINDS)
        for place, options in enumerate(OPTIONS)
    ),
]
"""Each kind with all of OPTIONS, and either with both types."""
DIVIDED = [
    "gpipe, fp32, max_norm",
    "1f1b, bf16, tight, clip_grad_norm_",
    "interleaved, bf16, tight, max_norm",
]
DEEP = ["1f1b, bf16, tight, max_norm", "zero bubble, bf16, tight, clip_grad_norm_", "zbv, fp32, max_norm"]
OTHERS = ["unnamed", "wrong", "resumed", "overflow", "shared", "forgotten", "disagreeing", "default device"]
EVALUATED = [
    f"evaluated {kind}, {dtype}"
    for kind, dtype in (
        ("gpipe", "fp32"),
        ("1f1b", "bf16"),
        ("interleaved", "bf16"),
        ("looped", "fp32"),
        ("zero bubble", "fp32"),
    )
]
ASSIGNED = ["assigned", "assigned one by one"]
FROZEN = ["frozen first", "frozen last"]
TOGETHER = ["together", "together unlike"]
LAUNCHES = {
    "two ranks": (2, 1, [*EXACT, *OTHERS, *ASSIGNED, *FROZEN, *TOGETHER, *EVALUATED[1:2]]),
    "more": (2, 1, [*MORE, "resumed zero bubble", *EVALUATED]),
    "dying": (2, 1, ["dying"]),
    "at once": (2, 1, ["at once"]),
    "two stages of two ranks": (
        4,
        2,
        [*DIVIDED, "resumed", "shared", *FROZEN, *EVALUATED[1:3], "other paths", "divided"],
    ),
    "four ranks": (4, 1, DEEP),
}
"""Ranks, ranks that share a stage, and cases of each launch. A rank that raises amid a schedule ends it."""

pytestmark = [pytest.mark.multi, pytest.mark.disk]


def of(launch):
    """Return the cases of a launch that train, as parameters."""
    marks = [] if launch == "two ranks" else [pytest.mark.slow]
    trained = [one for one in LAUNCHES[launch][2] if ", " in one and one not in EVALUATED]
    return [pytest.param(launch, case, id=f"{launch}-{case}", marks=marks) for case in trained]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return a function that says what each rank of a launch answers in a case."""

    def launched(launch):
        ranks, data, cases = LAUNCHES[launch]
        folder = tmp_path_factory.mktemp("pipeline")
        forked(ranks, SUPPORT / "pipeline_run.py", folder, data, *cases)
        return read_answers(folder, ranks, missing=True)

    return answering(launched)


@pytest.mark.parametrize(("launch", "case"), [one for launch in LAUNCHES for one in of(launch)])
def test_a_pipeline_trains_bit_for_bit_as_in_memory(answers, launch, case):
    given = answers(launch, case)
    assert [one["different"] for one in given] == [[]] * len(given)
    assert all(one["losses"] for one in given)
    if "tight" in case:
        assert min(one["nvme"] for one in given) > 0


@pytest.mark.parametrize(("launch", "case"), [one for launch in LAUNCHES for one in of(launch)])
def test_each_stage_fetches_what_its_schedule_uses_next(answers, launch, case):
    """The third step is as the second, so that its plan knows every use."""
    for one in answers(launch, case):
        assert one["uses"] > 0
        assert one["hits"] >= one["uses"]


@pytest.mark.parametrize("case", [one for one in EXACT if "norm" in one])
def test_the_norm_is_of_the_gradients_of_all_stages(answers, case):
    one, other = answers("two ranks", case)
    assert one["norms"] == pytest.approx(other["norms"], rel=1e-12)
    assert max(one["norms differ"], other["norms differ"]) < 1e-12


@pytest.mark.parametrize("case", FROZEN)
@pytest.mark.parametrize(
    "launch", ["two ranks", pytest.param("two stages of two ranks", marks=pytest.mark.slow)]
)
def test_a_stage_that_trains_nothing_has_no_part_in_the_norm_of_the_others(answers, launch, case):
    given = answers(launch, case)
    assert [one["different"] for one in given] == [[]] * len(given)
    assert all((one["norm"] is None) == bool(one["late"]) for one in given)
    for one in given:
        if one["late"]:
            assert one["late"].startswith("UnsupportedError: a norm over all stages: rank ")
            assert "trained no parameter in its first forward" in one["late"]


def test_norms_and_scalers_are_refused_where_no_group_names_the_other_stages(answers):
    for rank, one in enumerate(answers("two ranks", "unnamed")):
        assert set(one) == {"max_norm", "clip_grad_norm_", "GradScaler"}
        for text in one.values():
            assert text.startswith("UnsupportedError")
            assert f"stage {rank} of 2 on 2 ranks" in text
            assert 'pipeline_group=mesh["pp"]' in text


def test_what_does_not_fit_a_pipeline_is_refused_by_name_on_all_ranks(answers):
    first, second = answers("two ranks", "wrong")
    assert (
        "ConfigError: stage 1 of 2 in pipeline_group (rank 1 of the world) has built no param"
        in second["empty"]
    )
    assert "RanksError" in first["empty"]
    assert "rank 1 (stage 1): ConfigError: stage 1 of 2" in first["empty"]
    for one in (first, second):
        assert one["durable"].startswith("ConfigError: durable=True with a pipeline")
        assert "have ranks [0, 1] in common" in one["one group"]
        assert one["one folder"].startswith("ConfigError: ranks 0, 1 of pipeline_group save to one folder")
        assert one["order"].startswith("UnsupportedError: clipping by the norm of order inf over a pipeline")


@pytest.mark.parametrize("case", ["other stage", "other rank"])
def test_an_error_while_a_rank_builds_is_told_to_those_that_wait_for_it(answers, case):
    first, second = answers("two ranks", "wrong")
    assert second[case] == "KeyError: 'no weights'"
    assert "RanksError" in first[case]
    where = " (stage 1)" if case == "other stage" else ""
    assert f"rank 1{where}: KeyError: 'no weights'" in first[case]


def test_ranks_that_build_different_models_in_one_group_are_told_of_stages(answers):
    for one in answers("two ranks", "forgotten"):
        assert one["error"].startswith("RanksError: the ranks that share a model have built different ones")
        assert 'pipeline_group=mesh["pp"]' in one["error"]


def test_every_stage_goes_on_from_a_checkpoint_of_its_own(answers):
    assert [one["different"] for one in answers("two ranks", "resumed")] == [[], []]


def test_stages_with_the_names_of_the_whole_save_it_to_one_folder(answers):
    assert [one["different"] for one in answers("two ranks", "together")] == [[], []]


def test_stages_in_one_folder_may_lack_an_optimizer_or_parameters_of_a_group_and_fail_together(answers):
    given = answers("two ranks", "together unlike")
    assert [one["frozen"] for one in given] == [None, 3.0]
    assert all("builtins.object, which a checkpoint cannot hold" in one["error"] for one in given)
    assert [one["alike"] for one in given] == ["no error"] * 2
    differ = "CheckpointError: the tensors of stages in 'mine' of param group 0 differ"
    assert all(one["tensors"].startswith(differ) for one in given)
    assert all(one["soon"] for one in given)


def test_an_overflow_in_one_stage_leaves_the_step_out_in_all(answers):
    for one in answers("two ranks", "overflow"):
        assert one == {"scales": [256.0, 128.0, 128.0, 256.0], "steps": [3]}


def test_stages_on_one_machine_divide_its_memory_and_drives(answers):
    given = answers("two ranks", "shared")
    assert [one["local"] for one in given] == [[0, 2], [1, 2]]
    assert {(one["budget"], one["ranks"]) for one in given} == {(32 << 20, 1)}


@pytest.mark.slow
def test_a_rank_that_dies_is_named_where_stages_meet(answers):
    (left,) = answers("dying", "dying")
    assert "RanksError: rank 0 of 2 (stage 0): the norm of the gradients over all" in left["error"]
    assert "rank 1 (stage 1) did not answer" in left["error"]


@pytest.mark.parametrize("case", ASSIGNED)
def test_clipping_refuses_gradients_of_which_other_stages_would_not_know(answers, case):
    for one in answers("two ranks", case):
        assert one["error"].startswith("UnsupportedError: clip_grad_norm_ or GradScaler over a pipeline")
        assert "1 ordinary tensors" in one["error"]


def test_stages_that_ask_for_different_things_are_told(answers):
    for one in answers("two ranks", "disagreeing"):
        assert "rank 0 (stage 0): loss scaling over all stages; rank 1 (stage 1): clip_gr" in one["error"]


def test_schedules_without_bubbles_train_under_a_default_device(answers):
    assert [one["different"] for one in answers("two ranks", "default device")] == [[], []]


@pytest.mark.slow
def test_updates_in_the_backward_are_refused_where_another_microbatch_is_in_flight(answers):
    assert "its parameters were changed" in answers("at once", "at once")[1]["error"]


@pytest.mark.slow
def test_ranks_that_share_a_stage_divide_the_machine_and_go_on_from_its_checkpoint(answers):
    given = answers("two stages of two ranks", "shared")
    assert sorted(one["local"] for one in given) == [[0, 4], [1, 4], [2, 4], [3, 4]]
    assert {(one["budget"], one["ranks"]) for one in given} == {(16 << 20, 2)}
    assert [one["different"] for one in answers("two stages of two ranks", "resumed")] == [[]] * 4


@pytest.mark.slow
def test_schedules_without_bubbles_are_refused_where_ranks_share_a_stage(answers):
    for one in answers("two stages of two ranks", "divided"):
        assert "brings them in an order that differs between ranks" in one["error"]


@pytest.mark.slow
def test_every_stage_of_a_schedule_without_bubbles_goes_on_from_a_checkpoint(answers):
    assert [one["different"] for one in answers("more", "resumed zero bubble")] == [[], []]


@pytest.mark.parametrize(
    ("launch", "case"),
    [
        pytest.param(
            launch, case, id=f"{launch}-{case}", marks=[] if launch == "two ranks" else pytest.mark.slow
        )
        for launch in LAUNCHES
        for case in LAUNCHES[launch][2]
        if case in EVALUATED
    ],
)
def test_evaluations_by_a_schedule_change_no_bit_of_the_training_and_have_those_in_memory(
    answers, launch, case
):
    for one in answers(launch, case):
        assert one["different"] == []
        assert one["nothing"] == []
        here, in_memory = one["evaluated"]
        assert here == in_memory
        assert len(here) == 4 * 2 * 4, "before each of three steps and behind them, with graphs and without"
        assert one["nvme"] > 0


@pytest.mark.slow
def test_ranks_of_a_stage_that_do_different_things_are_named_by_stage_and_dimension(answers):
    given = [one["error"] for one in answers("two stages of two ranks", "other paths")]
    assert given[::2] == ["", ""], "the ranks of the other stage are told nothing, and wait for nothing"
    for text in given[1::2]:
        assert text.startswith("RanksError: the ranks are about to do different things: ")
        assert "rank 0 (data=0, stage 1, rank 1 of the world): assemble 0.block.up" in text
        assert "rank 1 (data=1, stage 1, rank 3 of the world): assemble 0.block.gate" in text

"""Ranks that share their machine's memory: real processes over gloo. What they do is in shared_run.py; most
of it are the cases of ranks that share none, which compare with plain ranks.
"""

import functools

import pytest

from answers import read_answers
from infinity.bench.engine.runs import OWN, Model
from infinity.bench.ranks.launch import measure_ranks
from infinity.bench.ranks.ranks import RankCase
from infinity.ranks.machines import LOCAL_SIZE
from launches import forked
from places import SUPPORT

pytestmark = [pytest.mark.multi, pytest.mark.disk]

MOST = ["mixtral", "max_norm", "no_sync", "frozen", "nvme accumulated", "stage 1", "nvme muon", "dropout"]
MOST += ["experts, checkpointed", "clip_grad_norm_", "nvme edited", "stage 1 edited", "reentrant"]
MOST += ["checkpointed", "nvme backward", "blocks", "nvme blocks", "stage 2 backward", "nvme fp32"]
MOST += ["nvme, a head in fp32", "overflow on nvme", "deepspeed", "muon backward", "muon stage 2"]
MOST += ["chosen, checkpointed", "chosen, nvme", "chosen, stage 1", "chosen, stage 2", "mesh"]
"""Cases whose answers say what is different from plain ranks: each thing that ranks do, in one of them."""
ON_THREE = ["llama", "mixtral", "nvme accumulated", "muon", "chosen, nvme"]
ON_FOUR = ["max_norm", "nvme muon", "mesh", "grid"]
"""On either there are both optimizers, memory and NVMe."""
ON_MACHINES = ["llama", "mixtral", "no_sync", "frozen", "nvme accumulated", "nvme edited"]
ON_MACHINES += ["stage 2 backward", "fp32", "nvme muon"]
"""Of two ranks each: what is sent once for each machine, in every form."""
BESIDE = ["beside plain", "beside plain, nvme"]
PATHS = {2: [*MOST, *BESIDE], 3: [*ON_THREE, BESIDE[0]], 4: [*ON_FOUR, BESIDE[1]]}
OTHERS = [
    "dropped",
    "evaluating",
    "rounds",
    "alone",
    "gathered",
    "edited differently",
    "seeds",
    "nvme traffic",
]
OTHERS += ["memory", "node", "activation memory", "nvme activation memory"]
OTHERS += ["fragments", "in files", "changed by one", "surgery", "sweep", "gathered differently"]
OTHERS += ["different ways", "failing", "counted", "leaving", "leaving together", "cut by budget", "changes"]
FAIL = {"alone", "gathered differently", "different ways", "failing", "leaving"}
"""Those of them that end with an error on a rank, or on all."""
SHOWN = ["gathered", "edited differently", "in files", "leaving together", "activation memory"]
SHOWN += ["nvme activation memory"]
"""Those that answer what they have trained or seen."""
DEATHS = ["killed in forward", "killed in backward", "stopped"]


def answers(folder, ranks, cases, **more):
    forked(ranks, SUPPORT / "shared_run.py", folder, *cases, RANKS_DISK=folder, **more)
    return read_answers(folder, ranks)


def assert_beside_plain(one, machines=1):
    assert one["different"] == []
    plain, ours = one["crossed"]
    assert ours == pytest.approx(plain, rel=0.1), "but for what is on its way for the next step"
    assert (ours > 0) == (one["exchanged"]["gather"] > 0) == (machines > 1)
    assert (one["exchanged"]["reduce"] > 0) == (machines > 1)
    assert one["shared"] > 0
    assert one["said"]
    assert one["flags"], "every mapping is left out of core dumps and forks"
    assert one["left"] == []


def assert_as_plain(one, cases, machines=1):
    for case in cases:
        if case in BESIDE:
            assert_beside_plain(one[case], machines)
        else:
            assert one[case].get("different", one[case]) == [], case
    assert one["kept views"] == {**one["kept views"], "wrong": []}


def test_two_ranks_send_no_weights_and_train_the_same_bits_and_leave_nothing(tmp_path):
    cases = ["beside plain", "by itself", "refused on one", "kept views", "buffers", "other settings"]
    given = answers(tmp_path, 2, cases)
    for one in given:
        assert_beside_plain(one["beside plain"])
        assert one["by itself"]["said"].startswith("chosen")
        assert one["by itself"]["shared"] > 0 == one["by itself"]["exchanged"]["gather"]
        assert one["refused on one"] == {
            **one["refused on one"],
            "different": [],
            "shared": 0,
            "said": "not possible: planted",
            "left": [],
        }
        assert one["kept views"] == {**one["kept views"], "wrong": []}
        assert one["buffers"] == {**one["buffers"], "wrong": [], "left": []}
        assert "rank 0: shared_memory=True; rank 1: shared_memory=False" in one["other settings"]["said"]


@pytest.mark.slow
def test_where_one_rank_has_no_futexes_all_meet_and_sum_over_gloo_and_say_so(tmp_path):
    for one in answers(tmp_path, 2, ["no futexes on one"]):
        found = one["no futexes on one"]
        assert found["different"] == []
        assert found["exchanged"]["reduce"] > 0 == found["exchanged"]["gather"]
        (said,) = found["said"]
        assert said.startswith("ranks meet, and exchange gradients, over gloo: ")
        assert "rank 1: OSError: [Errno 38] the number of futex(2)" in said


@pytest.mark.slow
@pytest.mark.parametrize("ranks", PATHS)
def test_every_path_of_a_training_has_the_bits_of_plain_ranks(tmp_path, ranks):
    for one in answers(tmp_path, ranks, [*PATHS[ranks], "kept views"]):
        assert_as_plain(one, PATHS[ranks])


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Return what two ranks answer in OTHERS with memory in common, and without it in those of SHOWN."""
    folders = [tmp_path_factory.mktemp(name) for name in ("shared", "plain")]
    shared = answers(folders[0], 2, OTHERS)
    forked(2, SUPPORT / "ranks_run.py", folders[1], *SHOWN, RANKS_DISK=folders[1])
    plain = read_answers(folders[1], 2)
    return list(zip(shared, plain, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_what_else_two_ranks_do_ends_as_without(others, case):
    """In the words of the cases themselves: what they answer, but for seconds and bytes."""
    assert any("error" in one[case] for one, _ in others) == (case in FAIL), [one[case] for one, _ in others]
    for one, plain in others:
        expected = {"wrong": [], "different": [], "same": True, **plain.get(case, {})}
        for name in {"wrong", "different", "losses", "same", "weights", "values"} & one[case].keys():
            assert one[case][name] == expected[name]
        assert one[case].get("apart", 0) < 1e-3


@pytest.mark.slow
def test_ranks_of_two_machines_share_within_each_and_each_weight_crosses_as_often_as_without(tmp_path):
    cases = [*ON_MACHINES, *BESIDE]
    for one in answers(tmp_path, 4, [*cases, "kept views", "buffers"], **{LOCAL_SIZE: "2"}):
        assert_as_plain(one, cases, machines=2)
        assert one["buffers"] == {**one["buffers"], "wrong": [], "left": []}


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    """Return a function that says what so many ranks answer when one ends, stops, or does otherwise."""

    @functools.cache
    def all_of(ranks, local):
        cases = [*DEATHS, *(["fewer batches", "changed past autograd"] if ranks == 2 else [])]
        return answers(tmp_path_factory.mktemp("deaths"), ranks, cases, **{LOCAL_SIZE: str(local)})

    return all_of


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "local"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("case", DEATHS)
def test_a_rank_that_ends_or_stops_is_named_and_leaves_nothing(deaths, case, ranks, local):
    for rank, one in enumerate(deaths(ranks, local)):
        if rank != 1:
            assert "rank 1 did not answer" in one[case]["said"]
            assert one[case]["told_s"] < 5 + 8
            assert one[case]["left"] == []


@pytest.mark.slow
def test_what_one_rank_changes_past_autograd_no_other_computes_with_and_all_are_told(deaths):
    plain, changed = (one["changed past autograd"] for one in deaths(2, 2))
    assert plain["most"] < 10
    assert changed["most"] > 900
    assert "q_proj.weight was changed in place" in changed["error_of_rank"]
    assert "q_proj.weight was changed in place" in plain["error_of_rank"]


@pytest.mark.slow
def test_ranks_of_machines_with_different_numbers_of_them_are_refused_on_all(tmp_path):
    given = answers(tmp_path, 4, ["other machines"], **{LOCAL_SIZE: "3"})
    assert {one["other machines"]["said"] for one in given} == {given[0]["other machines"]["said"]}
    assert "ranks on the machine of each: 3, 3, 3, 1" in given[0]["other machines"]["said"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return a function that measures so many ranks that train 25 million parameters."""
    model = Model("25m", 16, 4)

    @functools.cache
    def measure(ranks, *, shared=False):
        case = RankCase("infinity", ranks, "256MiB", shared=shared)
        folder = tmp_path_factory.mktemp("measured")
        return measure_ranks(OWN, "infinity", ranks, model, folder, case.settings("25m", "backward"))

    return measure


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_machine_takes_the_memory_of_one_rank_and_100_mib_for_each(measured, ranks):
    """All that the processes take, shared pages once, above what they import."""
    one, shared = measured(1), measured(ranks, shared=True)
    assert shared.peak_machine_nbytes <= 1.05 * one.peak_machine_nbytes + ranks * (100 << 20)


@pytest.mark.slow
def test_that_is_less_than_ranks_take_that_share_none_and_so_is_what_they_send(measured):
    plain, shared = measured(2), measured(2, shared=True)
    assert shared.peak_machine_nbytes < plain.peak_machine_nbytes
    assert shared.loss == plain.loss
    assert shared.sent_nbytes < 0.02 * plain.sent_nbytes


@pytest.mark.slow
def test_a_rank_whose_batches_have_ended_is_named_with_its_steps(deaths):
    waiting, ended = (one["fewer batches"]["said"] for one in deaths(2, 2))
    assert ended == "none"
    assert "rank 1 has begun 2 forwards, this rank 3: it may have had fewer batches" in waiting


@pytest.mark.slow
def test_a_rank_that_stops_a_step_by_itself_tells_the_others_why(tmp_path):
    waiting, stopped = (one["stops alone"]["said"] for one in answers(tmp_path, 2, ["stops alone"]))
    assert stopped.startswith("UnsupportedError: ")
    assert "its gradient was dropped between the backward and step()" in stopped
    assert waiting.startswith("RanksError: ")
    assert "rank 1: UnsupportedError: " in waiting
    assert "its gradient was dropped between the backward and step()" in waiting

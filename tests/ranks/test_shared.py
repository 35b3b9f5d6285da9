"""Ranks that share their machine's memory: real processes over gloo. What they do is in shared_run.py; most
of it are the cases of ranks that share none, which compare with plain ranks.
"""

import json

import pytest

from infinity.bench.engine.runs import OWN, Model
from infinity.bench.ranks.launch import measure_ranks
from infinity.bench.ranks.ranks import RankCase
from infinity.ranks.machines import LOCAL_SIZE
from launches import forked
from places import SUPPORT

pytestmark = [pytest.mark.multi, pytest.mark.disk]

FEW = ["llama", "gpt2", "mixtral", "max_norm", "no_sync", "frozen", "nvme", "nvme accumulated", "stage 1"]
FEW += ["muon", "nvme muon", "chosen, nvme"]
MOST = [*FEW, "dropout", "experts", "experts, checkpointed", "clip_grad_norm_", "accumulated", "edited"]
MOST += ["nvme edited", "stage 1 edited", "backward", "reentrant", "checkpointed", "nvme backward", "blocks"]
MOST += ["nvme blocks", "stage 2", "stage 2 backward", "fp32", "nvme fp32", "a head in fp32"]
MOST += ["nvme, a head in fp32", "overflow", "overflow on nvme", "deepspeed", "muon backward", "muon stage 2"]
MOST += ["chosen", "chosen, checkpointed", "chosen, stage 1", "chosen, stage 2"]
"""Cases whose answers say what is different from plain ranks."""
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
OTHERS += ["memory", "node", "partitioned", "partitioned nvme", "activation memory", "nvme activation memory"]
OTHERS += ["fragments", "in files", "changed by one", "surgery", "sweep", "gathered differently"]
OTHERS += ["different ways", "failing", "counted", "leaving", "leaving behind", "leaving together"]
OTHERS += ["cut by budget", "changes", "joined llama", "joined mixtral"]


def answers(folder, ranks, cases, **more):
    forked(ranks, SUPPORT / "shared_run.py", folder, *cases, RANKS_DISK=folder, **more)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def assert_beside_plain(one, machines=1):
    assert one["different"] == []
    plain, ours = one["crossed"]
    assert ours == pytest.approx(plain, rel=0.1), "but for what is on its way for the next step"
    assert (ours > 0) == (one["exchanged"]["gather"] > 0) == (machines > 1)
    assert one["exchanged"]["reduce"] > 0
    assert one["shared"] > 0
    assert one["said"]
    assert one["flags"], "every mapping is left out of core dumps and forks"
    assert one["left"] == []


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
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_path_of_a_training_has_the_bits_of_plain_ranks(tmp_path, ranks):
    cases = [*MOST, "mesh"] if ranks == 2 else [*FEW, *(["mesh", "grid"] if ranks == 4 else [])]
    more = ["beside plain", "beside plain, nvme", "kept views"]
    for rank, one in enumerate(answers(tmp_path, ranks, [*cases, *more])):
        for case in cases:
            assert one[case].get("different", one[case]) == [], (rank, case)
        assert_beside_plain(one["beside plain"])
        assert_beside_plain(one["beside plain, nvme"])
        assert one["kept views"] == {**one["kept views"], "wrong": []}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_what_else_two_ranks_do_ends_as_without(tmp_path, case):
    """In the words of the cases themselves: what they answer, but for seconds and bytes."""
    folders = [tmp_path / name for name in ("plain", "shared")]
    for folder in folders:
        folder.mkdir()
    program = SUPPORT / "ranks_run.py"
    forked(2, program, folders[0], case, RANKS_DISK=folders[0])
    texts = [(folders[0] / f"{rank}.json").read_text(encoding="utf-8") for rank in range(2)]
    for plain, one in zip(map(json.loads, texts), answers(folders[1], 2, [case]), strict=True):
        assert plain.keys() == one.keys()
        assert plain.get(case, {}).keys() == one.get(case, {}).keys(), one
        for name in ("wrong", "different", "losses", "same", "weights", "values"):
            assert plain.get(case, {}).get(name) == one.get(case, {}).get(name)


@pytest.mark.slow
def test_ranks_of_two_machines_share_within_each_and_each_weight_crosses_as_often_as_without(tmp_path):
    cases = [one for one in FEW if "chosen" not in one]  # whose reference knows one machine
    cases += ["dropout", "experts", "accumulated", "nvme edited", "stage 2", "backward", "fp32"]
    more = ["beside plain", "beside plain, nvme", "kept views", "buffers"]
    for rank, one in enumerate(answers(tmp_path, 4, [*cases, *more], **{LOCAL_SIZE: "2"})):
        for case in cases:
            assert one[case].get("different", one[case]) == [], (rank, case)
        assert_beside_plain(one["beside plain"], machines=2)
        assert_beside_plain(one["beside plain, nvme"], machines=2)
        assert one["kept views"] == {**one["kept views"], "wrong": []}
        assert one["buffers"] == {**one["buffers"], "wrong": [], "left": []}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "local"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("case", ["killed in forward", "killed in backward", "stopped"])
def test_a_rank_that_ends_or_stops_is_named_and_leaves_nothing(tmp_path, case, ranks, local):
    for rank, one in enumerate(answers(tmp_path, ranks, [case], **{LOCAL_SIZE: str(local)})):
        if rank != 1:
            assert "rank 1 did not answer" in one[case]["said"]
            assert one[case]["took_s"] < 8 + 8
            assert one[case]["left"] == []


@pytest.mark.slow
def test_what_one_rank_changes_past_autograd_no_other_computes_with_and_all_are_told(tmp_path):
    plain, changed = (one["changed past autograd"] for one in answers(tmp_path, 2, ["changed past autograd"]))
    assert plain["most"] < 10
    assert changed["most"] > 900
    assert "q_proj.weight was changed in place" in changed["error_of_rank"]
    assert "q_proj.weight was changed in place" in plain["error_of_rank"]


@pytest.mark.slow
def test_ranks_of_machines_with_different_numbers_of_them_are_refused_on_all(tmp_path):
    given = answers(tmp_path, 4, ["other machines"], **{LOCAL_SIZE: "3"})
    assert {one["other machines"]["said"] for one in given} == {given[0]["other machines"]["said"]}
    assert "ranks on the machine of each: 3, 3, 3, 1" in given[0]["other machines"]["said"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_machine_takes_the_memory_of_one_rank_and_100_mib_for_each(tmp_path, ranks):
    """All that the processes take, shared pages once, above what they import."""
    model = Model("25m", 16, 5)
    found = [
        measure_ranks(OWN, "infinity", case.ranks, model, tmp_path, case.settings("25m", "backward"))
        for case in (
            RankCase("infinity", 1, "256MiB"),
            RankCase("infinity", ranks, "256MiB"),
            RankCase("infinity", ranks, "256MiB", shared=True),
        )
    ]
    one, plain, shared = found
    assert shared.peak_machine_nbytes <= 1.05 * one.peak_machine_nbytes + ranks * (100 << 20)
    assert shared.peak_machine_nbytes < plain.peak_machine_nbytes
    assert shared.loss == plain.loss
    assert shared.sent_nbytes < 0.6 * plain.sent_nbytes


@pytest.mark.slow
def test_a_rank_whose_batches_have_ended_is_named_with_its_steps(tmp_path):
    waiting, ended = (one["fewer batches"]["said"] for one in answers(tmp_path, 2, ["fewer batches"]))
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

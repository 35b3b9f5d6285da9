"""Checkpoints of several ranks: real processes over gloo, many cases to a launch; see checkpoint_ranks_run.

Trusted: the hashes of whole tensors, from_pretrained of transformers, torch's readers, DeepSpeed's layout.
"""

import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import deepspeed_checkpoints
from launches import environment, forked, python_of_ranks, torchrun
from places import SUPPORT, disk

pytestmark = [pytest.mark.disk, pytest.mark.multi, pytest.mark.timeout(900)]
classes = deepspeed_checkpoints.classes


def answers(ranks, folder, *cases):
    """Run cases; return for each what every rank of it answered."""
    forked(ranks, SUPPORT / "checkpoint_ranks_run.py", folder, *cases)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    failed = [one["trace"] for of_rank in found for one in of_rank.values() if "error" in one]
    assert not failed, failed[0]
    return {case: [of_rank[case] for of_rank in found if case in of_rank] for case in cases}


def moves(start, name, state_dtype):
    """Return the cases that take a checkpoint of `start` ranks to other numbers of ranks."""
    others = [ranks for ranks in (2, 1, 3) if ranks != start]
    ways = ["stage2/forward", "disk/backward", "stage1/forward"]
    return [
        f"{start}/first/{name}/{state_dtype}",
        *(
            f"{ranks}/again/{name}/{state_dtype}/{number}/{way}"
            for number, (ranks, way) in enumerate(zip(others, ways, strict=False))
        ),
    ]


@pytest.fixture(scope="module")
def by_default(tmp_path_factory):
    """Return what the ranks of one launch answer in every case that needs none of its own."""
    cases = [*moves(3, "llama", "int8"), "2/goes_on/gpt2-dropout", "2/exports/mixtral/bf16", "3/fails"]
    with tempfile.TemporaryDirectory(prefix="infinity-", dir=disk()) as folder:
        return answers(3, Path(folder), *cases)


def check_moves(found, cases):
    expected = found[cases[0]][0]["state"]
    assert all(hashes != [] for hashes in expected["stored"].values())
    for case in cases:
        for rank, answer in enumerate(found[case]):
            assert answer["state"] == expected, (case, rank)
    assert [one["extra"] for one in found[cases[1]]] == [[0, 0]] * 2
    of_parts = [one["parts"] for one in found[cases[0]]]
    assert any(some for _, some, _ in of_parts), "no parameter was in parts"
    assert any(none for _, _, none in of_parts), "no rank was without a parameter"


def test_saved_on_3_loaded_on_2_saved_and_loaded_on_1(by_default):
    check_moves(by_default, moves(3, "llama", "int8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "state_dtype"),
    [("llama", "fp32"), ("llama", "int8"), ("llama", "int4"), ("mixtral", "bf16"), ("gpt2", "fp32")],
)
def test_saved_on_4_loaded_on_2_saved_loaded_on_1_and_saved_and_loaded_on_3(folder, name, state_dtype):
    cases = moves(4, name, state_dtype)
    check_moves(answers(4, folder, *cases), cases)


def check_dropout(of_case):
    for answer in of_case:
        assert answer["losses"] == answer["expected"]
        assert answer["same"]
    assert len({json.dumps(answer["losses"]) for answer in of_case}) == len(of_case)


def test_the_same_ranks_go_on_bit_for_bit_each_with_its_own_dropout(by_default):
    check_dropout(by_default["2/goes_on/gpt2-dropout"])


@pytest.mark.slow
def test_three_ranks_go_on_so_too(folder):
    check_dropout(answers(3, folder, "3/goes_on/gpt2-dropout")["3/goes_on/gpt2-dropout"])


def test_a_rank_that_fails_is_named_and_the_last_checkpoint_stays(by_default):
    found = by_default["3/fails"]
    for number, answer in enumerate(found):
        raised = answer["raised"]
        for failing, why in (
            ("posix_fallocate on rank 1", "No space left"),
            ("pwrite on rank 2", "No space left"),
            ("fsync on rank 1", "No space left"),
            ("fsync on rank 0", "No space left"),
            ("_exchange on rank 0", "No space left"),
            ("preadv on rank 1", "Input/output error"),
        ):
            rank = int(failing[-1])
            assert why in raised[failing], (number, failing)
            assert (f"failed elsewhere: rank {rank}: " in raised[failing]) is (number != rank)
        assert raised["extra"] == "new"
        assert "extra is a builtins.builtin_function" in raised["not plain"]
        assert "is not the folder that rank 0 writes to" in raised["not shared"]
    assert found[0]["raised"]["found"] == "old"
    assert found[0]["raised"]["left"] == ["fails"]


def check_exports(of_case):
    for answer in of_case:
        assert answer.pop("parts")[1], "no parameter was in parts"
        assert answer.pop("state")
        assert not any(answer.values()), answer


def test_everybody_elses_files_hold_every_value(by_default):
    check_exports(by_default["2/exports/mixtral/bf16"])


@pytest.mark.slow
def test_everybody_elses_files_of_three_ranks_hold_every_value(folder):
    check_exports(answers(3, folder, "3/exports/llama/fp32")["3/exports/llama/fp32"])


@pytest.mark.slow
@pytest.mark.parametrize("theirs", [1, 3])
def test_a_checkpoint_of_deepspeed_is_read_by_any_number_of_ranks(folder, classes, theirs):
    masters, m, v = deepspeed_checkpoints.write(folder / "ds", theirs, classes)
    expected = {f"master.{name}": one for name, one in masters.items()}
    for field, values in (("m", m), ("v", v)):
        expected |= {f"{field}.{name}": one for name, one in values.items()}
    save_file({name: one.contiguous() for name, one in expected.items()}, folder / "expected.safetensors")
    (found,) = answers(2, folder, "2/deepspeed").values()
    assert [one["different"] for one in found] == [[], []]


@pytest.mark.slow
def test_killed_at_any_moment_of_a_save_a_rank_is_named_and_the_last_checkpoint_goes_on(folder, seed):
    """Two attempts count the calls; then a rank dies at a random one of each kind and rank."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "killed_save_run.py"), str(folder), str(seed)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second, *killed, on_two, on_one = map(json.loads, done.stdout.splitlines())
    counts = [one["counts"] for one in second["answers"]]
    assert set(counts[0]) == {
        "meet",
        "pwrite",
        "fsync",
        "manifest",
        "link",
        "exchange",
        "remove",
    }
    assert all(set(one) == {"meet", "pwrite", "fsync"} for one in counts[1:]), "a rank that writes nothing"
    assert len(killed) == sum(map(len, counts))
    last = second["number"]
    for one in killed:
        rank, ends = one["killed"], one["ends"]
        assert ends.pop(rank) == -signal.SIGKILL, one
        assert set(ends) <= {0, 1}, one  # 1: an error of ours
        for answer in one["answers"]:
            named = re.search(r"rank ([\d, ]+) did not answer", (answer or {}).get("error", ""))
            assert answer is None or "counts" in answer or str(rank) in named[1].split(", "), one
        assert one["saved"] in (last, one["number"]), one
        assert one["note"] == "mine", one
        assert 0 not in ends or one["saved"] == one["number"], one
        last = one["saved"]
    for one in (first, second, on_two, on_one):
        assert set(one["ends"]) == {0}, one
        assert one["saved"] == one["number"]
        assert one["left"] == ["saved"]


def losses(folder, rank):
    """Return the last loss that a rank has had in each step."""
    return dict(json.loads(line) for line in (folder / f"{rank}.losses").read_text().splitlines())


@pytest.mark.slow
def test_a_killed_rank_is_named_by_the_others(folder):
    program = SUPPORT / "restart_run.py"
    codes = [one.returncode for one in python_of_ranks(3, program, folder, 3, folder=folder)]
    assert codes == [1, 1, -signal.SIGKILL]
    for rank in (0, 1):
        told = json.loads((folder / f"{rank}.error").read_text())
        assert "rank 2 did not answer" in told["error"], told
        assert set(losses(folder, rank)) == {0, 1, 2}


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_save_and_the_losses_go_on_bit_for_bit(folder):
    shown = {}
    for name, kill in (("whole", -1), ("killed", 4)):
        below = folder / name
        below.mkdir()
        if kill < 0:  # nothing is restarted
            forked(2, SUPPORT / "restart_run.py", below, kill)
        else:
            run = torchrun(2, SUPPORT / "restart_run.py", below, kill, restarts=1)
            assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
        shown[name] = [losses(below, rank) for rank in range(2)]
    assert shown["killed"] == shown["whole"]
    assert len(shown["whole"][0]) == 6
    assert torch.tensor(list(shown["whole"][0].values())).isfinite().all()

"""Steps of several ranks. Faked: what ranks measure, what trains. Real: processes; in a slow test, all."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from contestants import forked_ranks
from infinity import __main__ as cli
from infinity.bench.engine.runs import OWN, Model, RunError
from infinity.bench.ranks import launch, ranks
from infinity.bench.ranks.launch import RankRun, measure_ranks, run_of
from infinity.bench.ranks.ranks import RankCase, beside_one, cases, findings_of, row_of

MODEL = Model("1m", 16, 5)
RUN = RankRun(
    parameters=1000,
    seconds=2.0,
    sent_nbytes=4000.0,
    between_nbytes=1000.0,
    moved_nbytes=0.0,
    collectives=7,
    peak_rank_nbytes=100,
    peak_machine_nbytes=150,
    loss=1.0,
    all_seconds=[],
    versions={},
)


def result(rank, seconds, error=None):
    """What a rank of two writes: `seconds` of its steps."""
    if error:
        return {"error": error}
    traffic = {"read": 10, "written": 5}
    sent = {f"{rank}-{1 - rank}": 90, "7-8": 10}
    steps = [{"seconds": one, "sent": sent, "traffic": traffic, "loss": float(rank)} for one in seconds]
    peaks = {"peak_nbytes": 50 + rank, "build_peak_nbytes": 40, "baseline_pss_nbytes": 30}
    return {"parameters": 8, "steps": steps, "collectives": 3, "versions": {}, **peaks}


def test_a_step_lasts_as_long_as_its_slowest_rank_and_bytes_are_those_of_all():
    found = run_of([result(0, [9, 9, 9, 1, 5]), result(1, [9, 9, 9, 3, 4])], 200, 2)
    assert found.all_seconds == [9, 9, 9, 3, 5]
    assert (found.seconds, found.sent_nbytes, found.moved_nbytes) == (4.0, 200.0, 30.0)
    assert (found.peak_rank_nbytes, found.peak_machine_nbytes) == (51, 140)
    assert (found.loss, found.collectives) == (0.5, 3)


def test_bytes_between_machines_are_those_of_connections_whose_ends_are_on_two():
    """Of four ranks on two machines 0 and 1 are connected, and 1 and 2, each by its own port."""
    ends = [{"0-1": 1}, {"1-0": 2, "10-20": 4}, {"20-10": 8}, {}]
    traffic = {"read": 0, "written": 0}
    results = [result(rank, []) for rank in range(4)]
    for one, sent in zip(results, ends, strict=True):
        one["steps"] = 4 * [{"seconds": 1.0, "sent": sent, "traffic": traffic, "loss": 0.0}]
    found = run_of(results, 200, 2)
    assert (found.sent_nbytes, found.between_nbytes) == (15, 12)
    assert run_of(results, 200, 4).between_nbytes == 0


def test_each_number_of_ranks_has_its_peers_and_ours_once():
    assert cases([2, 4], ["1GiB", "1GiB"], ["fsdp2", "ddp"]) == [
        *(RankCase("ddp", 2), RankCase("fsdp2", 2), RankCase("infinity", 2, "1GiB")),
        *(RankCase("ddp", 4), RankCase("fsdp2", 4), RankCase("infinity", 4, "1GiB")),
    ]


def test_each_budget_is_also_measured_with_memory_in_common():
    _, ours = cases([2], ["1GiB"], [], shared=True)
    assert ours == RankCase("infinity", 2, "1GiB", shared=True)
    assert ours.settings("1m", "backward")["shared_memory"]
    assert ours.name == "Infinity, 1GiB, memory in common"


def test_of_one_rank_there_is_ours_alone_with_which_the_memory_of_several_is_compared():
    found = cases([1, 2], ["1GiB"], ["ddp"], shared=True)
    shared = RankCase("infinity", 2, "1GiB", shared=True)
    assert found == [
        *(RankCase("infinity", 1, "1GiB"), RankCase("ddp", 2), RankCase("infinity", 2, "1GiB"), shared)
    ]
    mib = 1 << 20
    one = row_of(RankCase("infinity", 1, "1GiB"), MODEL, [replace(RUN, peak_machine_nbytes=200 * mib)], {})
    for nbytes, word in ((409 * mib, "within"), (411 * mib, "MORE than")):
        row = row_of(shared, MODEL, [replace(RUN, peak_machine_nbytes=nbytes)], {})
        (said,) = beside_one([one, row])
        assert f"{word} one rank's + 5 % + 100 MiB a rank, 410.0 MiB" in said
        assert beside_one([row]) == [], "there is nothing to compare it with"


def test_a_budget_for_all_holds_the_state_of_all_ranks():
    enough = RankCase("infinity", 2, "all").settings("1m", "backward")["host_memory"]
    assert enough > 16 * 900_000 + (2 << 30)
    assert RankCase("ddp", 2).settings("1m", "backward") == {}


def test_ours_is_compared_with_the_peers_on_as_many_ranks():
    row = row_of(RankCase("infinity", 2, "1GiB"), MODEL, [RUN, replace(RUN, seconds=4.0)], {"ddp": 6.0})
    assert (row["seconds"], row["times_as_fast"], row["sent_per_parameter"]) == (3.0, {"ddp": 2.0}, 4.0)

    class Options:
        rounds = 1
        local_size = None

    found = {
        RankCase("ddp", 2): [replace(RUN, seconds=1.0)],
        RankCase("ddp", 4): [replace(RUN, seconds=5.0)],
        RankCase("infinity", 4, "1GiB"): [RUN],
    }
    assert findings_of(found, MODEL, Options()).verdicts[0] == (
        "4 ranks, Infinity, 1GiB: 2.50 times as fast as DDP, in memory"
    )


PROGRAM = """
import json, os, sys, time
spec = json.loads(sys.argv[1])
rank = int(os.environ["RANK"])
assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("2", str(rank))
print("rank", rank, "speaks", flush=True)
pid = spec["nvme"] + "/../pid"
if spec["kind"] in ("fails", "waits") and rank == 0:
    open(f"{pid} of rank 0", "w").write(str(os.getpid()))
    os.rename(f"{pid} of rank 0", pid)
if spec["kind"] == "fails" and rank == 1:
    while not os.path.exists(pid):
        time.sleep(0.01)
    sys.exit(3)
if spec["kind"] in ("fails", "waits"):
    time.sleep(600)
answer = json.loads(spec["settings"]["answers"])[rank]
open(spec["out"], "w").write(json.dumps(answer))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program in place of what trains."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    monkeypatch.setattr(launch.contestant, "__file__", str(file))
    monkeypatch.setattr(launch, "LOOKS_S", 0.02)
    return tmp_path


def test_ranks_are_started_together_and_what_they_measured_is_put_together(program):
    answers = json.dumps([result(0, [1, 1, 1, 2]), result(1, [1, 1, 1, 3])])
    found = measure_ranks(OWN, "ends", 2, MODEL, program, {"answers": answers})
    assert (found.seconds, found.parameters) == (3.0, 8)
    assert [one.name for one in program.iterdir()] == ["program.py"]


def test_the_error_of_a_rank_is_told(program):
    answers = json.dumps([result(0, [1, 1, 1, 2]), result(1, [], error="OSError: full")])
    with pytest.raises(RunError, match="ends on 2 ranks, 1m: OSError: full"):
        measure_ranks(OWN, "ends", 2, MODEL, program, {"answers": answers})


def test_where_a_rank_dies_the_others_are_ended_and_its_last_lines_are_told(program):
    with pytest.raises(RunError, match="rank 1 of 2 of fails on 1m ended with exit code 3; its") as told:
        measure_ranks(OWN, "fails", 2, MODEL, program, {})
    assert "speaks" in str(told.value)
    pid = (program / "pid").read_text()
    assert not Path("/proc", pid).exists()


def test_an_interrupt_leaves_no_process(program, monkeypatch):
    def interrupted(_):
        while not (program / "pid").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_ranks(OWN, "waits", 2, MODEL, program, {})
    pid = int((program / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_bad_options_are_refused_before_anything_runs(tmp_path, capsys):
    for arguments, told in (
        (["--ranks", "1"], "one rank is what `infinity bench step` measures"),
        (["--ranks", "3", "--local-size", "2"], "name a divisor of all"),
        (["--steps", "3"], "the first 3 are not counted"),
        (["--peer", "deepspeed"], "needs --venv"),
        (["--host-memory", "some"], "some"),
    ):
        with pytest.raises(SystemExit) as ended:
            raise SystemExit(cli.main(["bench", "ranks", "--nvme", str(tmp_path), *arguments]))
        assert ended.value.code
        assert told in "".join(capsys.readouterr())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.disk
def test_two_ranks_are_measured_beside_ddp_and_fsdp2(folder, monkeypatch):
    """All are started as by the command, but for one peer, whose ranks are forked."""
    assert ranks.HELP
    real = launch._started

    def started(environment, spec, *more):
        return (forked_ranks if spec["kind"] == "fsdp2" else real)(environment, spec, *more)

    monkeypatch.setattr(launch, "_started", started)
    out = folder / "ranks.json"
    few = ["--model", "1m", "--rounds", "1", "--steps", "4", "--host-memory", "8MiB"]
    peers = ["--peer", "ddp", "--peer", "fsdp2"]
    assert cli.main(["bench", "ranks", "--nvme", str(folder), *few, *peers, "--json", str(out)]) == 0
    ddp, fsdp2, ours = json.loads(out.read_text())["rows"]
    nbytes = 2 * ddp["parameters"]
    assert 2 * nbytes <= ddp["sent_nbytes"] < 2.1 * nbytes  # a ring of two sends each gradient twice
    assert fsdp2["sent_nbytes"] > 3.5 * nbytes
    assert ours["moved_nbytes"] > 0
    assert ours["collectives"] > 0
    assert ours["peak_machine_nbytes"] > 0
    assert ours["loss"] == pytest.approx(ddp["loss"], rel=0.02)

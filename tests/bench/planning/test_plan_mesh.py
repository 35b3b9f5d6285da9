"""`infinity plan` of tensor and pipeline parallelism. Faked: what would be measured."""

import json
import re
import shlex

import pytest

from infinity.bench.planning import cores
from infinity.errors import ConfigError
from places import ROOT
from plan_calls import RATES, ask

pytestmark = pytest.mark.usefixtures("unhurried")

TRAINING = ["check", "--model", "25m", "--host-memory", "64MiB", "--tokens", "1x64", *RATES]
LINKS = ["--link", "1", "--local-link", "100", "--micro-batches", "4"]
MESH = ["--ranks", "16", "--local-ranks", "4", "--tensor-parallel", "2", "--pipeline-parallel", "2"]


def test_a_plan_of_a_mesh_says_what_a_rank_has_and_what_crosses_which_link(tmp_path):
    code, said = ask(*TRAINING, *MESH, *LINKS, "--json", tmp_path / "plan.json")
    assert code == 0
    for part in (
        "data 4 x tensor 2 x pipeline 2",
        "1/2 of each matrix, the heaviest of 2 stages",
        "tensor, 2 ranks",
        "data, 4 ranks",
        "pipeline, 2 ranks",
        "within machines",
        "between machines",
    ):
        assert part in said
    found = json.loads((tmp_path / "plan.json").read_text())["rows"][0]["facts"]
    assert found["data_ranks"] == 4
    assert [one["by"] for one in found["sent"]] == ["tensor", "data", "pipeline"]


def test_without_a_number_there_are_as_many_ranks_as_divide_the_model():
    _, said = ask(*TRAINING, *LINKS, "--tensor-parallel", "2", "--pipeline-parallel", "2")
    assert "25.6 M parameters on 4 ranks" in said
    assert "data 1 x tensor 2 x pipeline 2" in said


def test_ranks_that_are_no_mesh_are_refused():
    with pytest.raises(ConfigError, match=r"--ranks 6: expected a multiple of --tensor-parallel 4 x --pipe"):
        ask(*TRAINING, *LINKS, "--ranks", "6", "--tensor-parallel", "4")


def test_what_ranks_do_together_is_planned_with_what_crosses_each_link(tmp_path):
    ranks = ["--ranks", "4", "--local-ranks", "2", "--link", "1", "--local-link", "100"]
    found = {}
    for name, more in {
        "plain": [],
        "second": ["--secondary-shard", "machine"],
        "common": ["--shared-memory"],
        "one bit": ["--one-bit"],
        "fed back": ["--quantized-gradients", "int4", "--error-feedback"],
    }.items():
        _, said = ask(*TRAINING[:3], "--host-memory", "512MiB", *TRAINING[5:], *ranks, *more)
        assert "within and between machines (" in said
        found[name] = said
    assert "second parts of weights" in found["second"]
    _, said = ask(
        *TRAINING[:3],
        "--host-memory",
        "512MiB",
        *TRAINING[5:],
        *LINKS,
        "--ranks",
        "2",
        "--local-ranks",
        "2",
        "--secondary-shard",
        "machine",
    )
    assert "second parts" not in said, "all ranks keep parts together anyway"
    with pytest.raises(ConfigError, match="shared_memory=True with secondary_shard=2"):
        ask(*TRAINING, *ranks, "--shared-memory", "--secondary-shard", "2")


def test_ranks_of_one_machine_are_planned_with_memory_in_common_unless_told_otherwise():
    ranks = [*TRAINING, "--link", "1", "--ranks", "2"]
    for more, shared in (
        (["--local-ranks", "2"], True),
        (["--local-ranks", "2", "--no-shared-memory"], False),
        (["--local-ranks", "2", "--quantized-weights", "int8"], False),
        (["--local-ranks", "1"], False),
    ):
        _, said = ask(*ranks, *more)
        assert ("on each machine, with memory in common" in said) == shared, more


def test_the_number_of_ranks_with_different_data_may_be_given_in_place_of_all(tmp_path):
    divided = ["--tensor-parallel", "2", "--pipeline-parallel", "2", "--sequence-parallel", "2"]
    _, said = ask(*TRAINING, *LINKS, *divided, "--data-parallel", "2", "--local-ranks", "4")
    assert "25.6 M parameters on 16 ranks" in said
    with pytest.raises(ConfigError, match="--ranks 8: data x sequence x tensor x pipeline are 2 x 2 x 2 x 2"):
        ask(*TRAINING, *LINKS, *divided, "--data-parallel", "2", "--ranks", "8")


# The tables of docs/how-large.md

PAGE = (ROOT / "docs/how-large.md").read_text(encoding="utf-8")
ON_A_MESH = PAGE.split("## On a mesh\n")[1].split("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("| \n").split(" | ")]
    for line in ON_A_MESH.splitlines()
    if re.match(r"\| [\d,]+ \|", line)
]
BINARY = {"GiB": 2**30, "TiB": 2**40}


def command_of(row):
    """Return the arguments of a row: those of the command above the table, with what the row names."""
    (command,) = [one for one in ON_A_MESH.splitlines() if one.startswith("infinity plan check")]
    words = shlex.split(command)[2:]
    given = dict(zip(words[1::2], words[2::2], strict=True))
    ranks, mesh, options = row[0].replace(",", ""), row[1], row[2].strip("`")
    given["--ranks"] = ranks
    for kind in ("tensor", "pipeline", "sequence"):
        found = re.search(rf"{kind} (\d+)", mesh)
        given.pop(f"--{kind}-parallel", None)
        given |= {f"--{kind}-parallel": found[1]} if found else {}
    if options != "as above":
        given.pop("--micro-batches", None)
        named = shlex.split(options)
        given |= dict(zip(named[::2], named[1::2], strict=True))
    return [words[0], *(word for pair in given.items() for word in pair)]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS])
def test_a_table_of_10_to_the_12_parameters_is_what_its_command_plans(tmp_path, monkeypatch, row):
    monkeypatch.setattr(cores, "update_rate", lambda _: 1e10)
    code, _ = ask(*command_of(row), "--json", tmp_path / "plan.json")
    assert code == 0
    found = json.loads((tmp_path / "plan.json").read_text())["rows"][0]["facts"]

    def told(cell):
        return float(re.match(r"[\d,.]+", cell)[0].replace(",", ""))

    _, _, _, nvme, step, computes, tokens, sent = row
    assert found["seconds"] == pytest.approx(told(step), rel=0.005)
    assert found["compute_s"] == pytest.approx(told(computes), rel=0.005)
    assert found["tokens_per_s"] == pytest.approx(told(tokens), rel=0.005)
    assert found["nvme_nbytes"] / BINARY["TiB"] == pytest.approx(told(nvme), abs=0.051)
    for one in found["sent"]:
        size, unit = re.search(rf"{one['by']} ([\d.]+) (GiB|TiB)", sent).groups()
        assert one["nbytes"] / BINARY[unit] == pytest.approx(float(size), abs=0.051)
        assert one["place"] in sent

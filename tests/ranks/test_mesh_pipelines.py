"""Stages whose layers are DTensors, on a mesh with data and without: real processes over gloo. What they do
is in mesh_pipeline_run.py.

Losses, weights and moments are compared bit for bit with the same pipeline of the same DTensors in memory.
Nothing is faked.
"""

import pytest

from answers import answering, read_answers
from launches import forked
from places import SUPPORT

CASES = [
    "fp32, tight, max_norm",
    "bf16, tight, clip_grad_norm_",
    "fp32, clip_grad_norm_",
    "bf16, max_norm",
]
MESHES = {
    "tp 2 x pp 2": (4, 1, 2, CASES),
    "dp 2 x pp 2": (4, 2, 1, CASES),
    "dp 2 x tp 2 x pp 2": (8, 2, 2, CASES[:2]),
}
"""Ranks, how many of them have different data, how many divide layers, and cases."""
SAVES = "dp 2 x pp 2"

pytestmark = [pytest.mark.multi, pytest.mark.disk, pytest.mark.slow]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return a function that says what each rank of a mesh answers in a case."""

    def launched(mesh):
        ranks, data, tensor, cases = MESHES[mesh]
        folder = tmp_path_factory.mktemp("mesh")
        more = ["checkpoints"] if mesh == SAVES else []
        forked(ranks, SUPPORT / "mesh_pipeline_run.py", folder, data, tensor, *cases, *more)
        return read_answers(folder, ranks)

    return answering(launched)


@pytest.mark.parametrize(("mesh", "case"), [(mesh, case) for mesh in MESHES for case in MESHES[mesh][3]])
def test_stages_of_divided_layers_train_bit_for_bit_as_in_memory(answers, mesh, case):
    given = answers(mesh, case)
    assert [one["different"] for one in given] == [[]] * len(given)
    assert [one["norm"] for one in given] == pytest.approx([given[0]["norm"]] * len(given), rel=1e-12)
    assert max(one["norms differ"] for one in given) < 1e-12
    if "tight" in case:
        assert min(one["nvme"] for one in given) > 0


def test_stages_load_a_checkpoint_of_a_mesh_without_stages_and_save_one_that_it_loads(answers):
    for one in answers(SAVES, "checkpoints"):
        assert one["wrong"] == []
        assert one["refused"][0] == ""
        assert "CheckpointError: " in one["refused"][1]
        assert "nothing was loaded:" in one["refused"][1]

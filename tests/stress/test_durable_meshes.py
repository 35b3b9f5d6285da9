"""Durable runs on a mesh of data and tensor dimensions: real processes over gloo, of which one kills itself.

Trusted: a run of the same ranks that nothing disturbed. What each rank does is in mesh_durable_run.py.
"""

import json
import re
import signal

import pytest

from launches import python_of_ranks
from places import SUPPORT

pytestmark = [pytest.mark.disk, pytest.mark.multi, pytest.mark.slow, pytest.mark.timeout(600)]
RANKS, DATA = 4, 2


def launch(folder, *killed, data=DATA):
    """Run all ranks; return how each has ended, and what it has told."""
    (folder / "run").mkdir(exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    program = SUPPORT / "mesh_durable_run.py"
    ended = python_of_ranks(RANKS, program, folder, data, *(killed or (-1, 0, 0)), folder=folder)
    told = [folder / f"{rank}.json" for rank in range(RANKS)]
    return [one.returncode for one in ended], [json.loads(one.read_text()) for one in told if one.exists()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return where a run that nothing disturbs has ended, and what it has told."""
    folder = tmp_path_factory.mktemp("undisturbed")
    codes, told = launch(folder)
    assert codes == [0] * RANKS, told
    assert [one["first"] for one in told] == [0] * RANKS
    return folder, told


@pytest.mark.parametrize(("rank", "after", "first"), [(3, False, 2), (0, False, 2), (1, True, 3)])
def test_after_a_kill_all_dimensions_go_on_from_the_step_that_all_have_committed(
    tmp_path, undisturbed, rank, after, first
):
    codes, told = launch(tmp_path, rank, 3, int(after))
    errors = "\n".join(one["error"] for one in told)
    assert re.search(rf"dp={rank // 2}, tp={rank % 2}[^;.]* did not answer", errors), errors
    assert codes[rank] == -signal.SIGKILL
    assert [code for number, code in enumerate(codes) if number != rank] == [1] * (RANKS - 1)
    codes, told = launch(tmp_path)
    assert codes == [0] * RANKS, told
    assert [one["first"] for one in told] == [first] * RANKS
    for one, expected in zip(told, undisturbed[1], strict=True):
        assert one["state"] == expected["state"]
        assert one["losses"] == {step: expected["losses"][step] for step in one["losses"]}
        assert len(one["losses"]) == 5 - first


def test_a_run_is_not_resumed_on_a_mesh_of_another_shape(undisturbed):
    codes, told = launch(undisturbed[0], data=1)
    assert codes == [1] * RANKS
    for one in told:
        assert "CheckpointError" in one["error"]
        assert "infinity.save and load change it" in one["error"] or "failed elsewhere" in one["error"]
    assert any("start the run on a mesh of the shape that it had" in one["error"] for one in told)

"""torchrun's restarts of a training on a mesh, and its end on another number of ranks. Nothing is faked.

Trusted: the losses of a run in which no rank dies. That one and the end are forked, without torchrun: they
restart nothing. What each rank does is in mesh_restart_run.py.
"""

import json
import math

import pytest

from launches import forked, torchrun
from places import SUPPORT

NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else a restarted mesh looks for the processes that have ended: torchrun keeps their addresses."""

pytestmark = [pytest.mark.disk, pytest.mark.multi, pytest.mark.slow, pytest.mark.timeout(600)]


def losses(folder, ranks):
    """Return the last loss that each rank has had in each step."""
    lines = [(folder / f"{rank}.losses").read_text().splitlines() for rank in range(ranks)]
    return [dict(map(json.loads, of_rank)) for of_rank in lines]


def test_a_mesh_goes_on_after_a_restart_and_then_with_more_ranks(tmp_path):
    program, shown = SUPPORT / "mesh_restart_run.py", {}
    for name, kill in (("whole", -1), ("killed", 2)):
        folder = tmp_path / name
        folder.mkdir()
        if kill < 0:
            forked(2, program, folder, kill, 4)
        else:
            run = torchrun(2, program, folder, kill, 4, restarts=1, **NEW_STORE)
            assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
        shown[name] = losses(folder, 2)
    assert shown["killed"] == shown["whole"]
    assert [sorted(one) for one in shown["whole"]] == [[0, 1, 2, 3]] * 2
    for one in folder.glob("*.losses"):
        one.unlink()
    forked(4, program, folder, -1, 6)
    one, beside_one, other, beside_other = losses(folder, 4)
    assert one == beside_one
    assert other == beside_other
    assert one != other, "they have different data"
    assert sorted(one) == [4, 5]
    assert all(map(math.isfinite, [*one.values(), *other.values()]))

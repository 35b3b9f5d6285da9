"""Durable runs whose updates are made before step() decides them, killed by SIGKILL around that. Trusted: the
same run, not interrupted.
"""

import json
import signal

import pytest
import torch

from launches import python
from places import SUPPORT

pytestmark = [pytest.mark.disk, pytest.mark.slow, pytest.mark.timeout(400)]


def run(folder, every, kill=-1, where="none"):
    folder.mkdir(exist_ok=True)
    return python(SUPPORT / "killed_speculation_run.py", folder, every, kill, where, folder=folder)


def lines(folder):
    return list(map(json.loads, (folder / "losses").read_text().splitlines()))


def losses(folder):
    """Return the loss of each step, the last one that was said of it."""
    return {step: loss for step, loss, _ in lines(folder)}


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_that_is_killed_between_speculation_and_confirmation_goes_on_with_its_bits(folder, every):
    whole = run(folder / "whole", every)
    assert whole.returncode == 0, whole.stderr[-2000:]
    assert lines(folder / "whole")[-1][2] > 4, "units whose updates were confirmed"
    for where in ("backward", "between", "drained", "step"):
        place = folder / where
        killed = run(place, every, 5, where)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
        resumed = run(place, every)
        assert resumed.returncode == 0, resumed.stderr[-2000:]
        assert losses(place) == losses(folder / "whole")
        expected, found = (torch.load(one / "end.pt") for one in (folder / "whole", place))
        assert [
            name for name, one in expected["weights"].items() if not torch.equal(found["weights"][name], one)
        ] == []
        for number, state in expected["state"].items():
            assert all(torch.equal(found["state"][number][name], one) for name, one in state.items())

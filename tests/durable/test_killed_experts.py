"""Durable runs whose experts are fetched one by one, killed by SIGKILL. Trusted: the same run with whole
stacks, not interrupted.
"""

import functools
import json
import signal

import pytest
import torch

from covers import matrix
from launches import python
from places import SUPPORT

pytestmark = [pytest.mark.disk, pytest.mark.slow, pytest.mark.timeout(400)]


def run(folder, architecture, experts="slices", update="forward", kill=0):
    folder.mkdir(exist_ok=True)
    return python(
        SUPPORT / "killed_experts_run.py", folder, architecture, experts, update, kill, folder=folder
    )


def losses(folder):
    """Return the loss of each step, the last one that was said of it."""
    return dict(map(json.loads, (folder / "losses").read_text().splitlines()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that trains whole stacks, once for each architecture, and says where."""

    @functools.cache
    def trained(architecture):
        folder = tmp_path_factory.mktemp(architecture)
        ended = run(folder, architecture, "whole")
        assert ended.returncode == 0, ended.stderr[-2000:]
        return folder

    return trained


@pytest.mark.parametrize(
    *matrix(in_all=2, architecture=["mixtral", "deepseek_v3"], update=["forward", "backward"], kill=[3, -3])
)
def test_a_killed_run_of_slices_goes_on_with_the_bits_of_whole_stacks(
    folder, whole, architecture, update, kill
):
    killed = run(folder / "killed", architecture, update=update, kill=kill)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert list(losses(folder / "killed")) == [0, 1, 2]
    assert not (folder / "killed" / "end.pt").exists()
    resumed = run(folder / "killed", architecture, update=update)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert losses(folder / "killed") == losses(whole(architecture))
    expected, found = (torch.load(one / "end.pt") for one in (whole(architecture), folder / "killed"))
    for kind in ("weights", "moments"):
        assert list(expected[kind]) == list(found[kind])
        assert [name for name, one in expected[kind].items() if not torch.equal(found[kind][name], one)] == []

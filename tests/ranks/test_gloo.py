"""Groups over gloo that share a device: two real processes. Planted: a torch without what that takes."""

import json

import pytest

from launches import forked
from places import SUPPORT

pytestmark = pytest.mark.multi


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    forked(2, SUPPORT / "gloo_run.py", folder)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def test_groups_share_the_devices_that_torch_chooses_by_its_variables(answers):
    for one in answers:
        assert one["devices"] == 1
        assert one["threads"] == 1 + 2 + 5, "the device's, two of the first group, and one of each other"
        assert one["of two more"] == 2, "of two interfaces, which the three groups share"
        assert one["said"] == []


def test_collectives_of_groups_that_share_devices_wait_for_no_other_group(answers):
    for one in answers:
        assert one["at once"] == [[10 * number, 10 * number + 1] for number in range(6)]
        assert one["at once, of two"] == [[10 * number, 10 * number + 1] for number in range(3)]
        assert one["after the first is closed"] == [[0, 1]] * 5


def test_torch_knows_them_as_groups_of_its_own_and_their_waits_end(answers):
    for rank, one in enumerate(answers):
        assert one["known"] == ["gloo", "a 5", [0, 1], rank]
        assert (one["late"] == "nothing") == (rank == 1)


def test_a_forked_process_has_a_device_of_its_own(answers):
    assert [one["in a child"] for one in answers] == [[1, 2]] * 2


def test_a_torch_that_lets_groups_share_nothing_is_said_and_they_work_as_before(answers):
    for one in answers:
        assert one["alone"] == [[0, 1]] * 2
        (said,) = one["said then"]
        assert said.startswith("each group over gloo has a device of its own")
        assert said.endswith("has no planted")

"""Ranks that keep second parts of weights within machines, which INFINITY_LOCAL_SIZE makes of this one: real
processes over gloo. What they do is in secondary_run.py.

Bit for bit against the same training without them.
"""

import re

import pytest

from answers import assert_as_reference, read_answers
from infinity.ranks.machines import LOCAL_SIZE
from launches import forked, python_of_ranks
from places import SUPPORT

STORED = ["stored", "stored, one by one", "stored, qwZ", "stored, backward"]
"""Cases whose second parts lie on NVMe."""
EVERY = {
    2: [
        *("layers", "qwZ", "nvme", "backward, qwZ", "accumulated", "max_norm", "frozen", "blocks"),
        *("one by one", "checkpointed", "reentrant", "mixtral", "chosen, checkpointed", "fp32"),
        *("fp32 beside qgZ", *STORED, "edited", "mesh"),
    ],
    3: ["llama", "nvme, qwZ", "no_sync", "frozen", "routed", "stored", "mesh"],
}
"""Cases that are compared with a training without second parts, by the number of machines."""
ONCE = ["llama", "nvme", "accumulated", "no_sync", "max_norm", "blocks", "one by one", "reentrant", "fp32"]
"""Those of which every weight is used in each step, trained, and sent as it is."""


def answers(folder, ranks, cases, **more):
    forked(ranks, SUPPORT / "secondary_run.py", folder, *cases, RANKS_DISK=folder, **more)
    return read_answers(folder, ranks)


def assert_crosses_once(one):
    of_all, near, crossed = one["a step"]
    assert of_all == one["weights"], "one forward's, whatever the backward and recomputation use"
    assert crossed == one["crosses"]
    assert near >= one["weights"] // 2
    assert of_all + near == one["a step without"][0]
    assert one["a step without"][2] > crossed


@pytest.mark.multi
@pytest.mark.disk
def test_weights_cross_between_two_machines_once_in_a_step_with_the_same_bits(tmp_path):
    given = answers(tmp_path, 4, ["one by one", "stored", "different"], **{LOCAL_SIZE: "2"})
    assert_as_reference(given, ["one by one", "stored"])
    for one in given:
        assert_crosses_once(one["one by one"])
        assert_crosses_once(one["stored"])
        assert one["stored"]["stored"] > 0, "host memory had no room for them"
        assert one["one by one"]["kept"] == one["one by one"]["weights"] // 2
        assert one["different"] == given[0]["different"]
        assert "rank 0: secondary_shard='machine'; rank 1: secondary_shard=2" in one["different"]["error"]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.disk
@pytest.mark.parametrize("machines", [2, 3])
def test_every_path_of_a_training_has_the_bits_of_one_without_second_parts(tmp_path, machines):
    refusals, cases = ["does not divide", "of several machines"], EVERY[machines]
    given = answers(tmp_path, 2 * machines, [*cases, "no room", *refusals], **{LOCAL_SIZE: "2"})
    assert_as_reference(given, cases)
    for one in given:
        for case in {*ONCE} & {*cases}:
            assert_crosses_once(one[case])
        for case in (one for one in STORED if one in cases):
            assert one[case]["stored"] > 0, "host memory had no room for them"
        assert_crosses_once(one["stored"])
        frozen = one["frozen"]
        assert frozen["a step"][0] == frozen["trained"] < frozen["weights"], (
            "frozen ones crossed in the first"
        )
        assert one["mesh"]["near"] > 0
        small, works = one["no room"]["errors"]
        assert "secondary_shard: each rank keeps 1/2 of the weights" in small
        assert works == "none"
        for case in refusals:
            assert one[case] == given[0][case]
        assert f"secondary_shard={2 * machines - 1} does not divide" in one["does not divide"]["error"]
    if machines == 3:
        assert "ranks 0 to 2 are on several machines" in given[0]["of several machines"]["error"]


@pytest.mark.slow
@pytest.mark.multi
def test_a_rank_that_is_killed_in_a_backward_is_named_on_all_machines(tmp_path):
    python_of_ranks(4, SUPPORT / "secondary_run.py", tmp_path, "killed", folder=tmp_path, **{LOCAL_SIZE: "2"})
    given = read_answers(tmp_path, 3)
    for one in given:
        assert re.search(r"rank [\d, ]*3 did not answer", one["killed"]["error"])

"""1-bit Adam on several ranks: real processes over gloo. What they do is in one_bit_run.py.

Bit for bit against one process that keeps the momenta and errors of all workers, of any number of ranks and
machines.
"""

import pytest

from answers import assert_as_reference, read_answers
from infinity.ranks.machines import LOCAL_SIZE
from launches import forked
from places import SUPPORT

EVERY = [
    *("layers", "one by one", "llama", "nvme", "no_sync", "frozen", "blocks", "fp32", "stage 1", "stage 2"),
    *("durable", "dropped", "thawed", "resumed and loaded", "beside one rank"),
    *("bf16", "int8", "int8 on nvme", "int4", "int8, durable"),
]
"""Cases that are compared with the reference, on two ranks."""
ON_THREE = ["layers", "llama", "nvme", "no_sync", "frozen", "blocks", "stage 2", "dropped", "thawed", "int8"]
"""Those of them on three."""
OTHERS = ["loaded", "twice", "clipped", "json"]


def answers(folder, ranks, cases, **more):
    forked(ranks, SUPPORT / "one_bit_run.py", folder, *cases, RANKS_DISK=folder, **more)
    return read_answers(folder, ranks)


@pytest.mark.multi
def test_after_the_freeze_ranks_send_a_14th_of_the_bytes_with_the_bits_of_one_process(tmp_path):
    cases = ["one by one", "dropped", "int8"]
    given = answers(tmp_path, 2, cases)
    assert_as_reference(given, cases)
    for one in given:
        warm, frozen = one["one by one"]["reduced"][1:3]
        assert frozen <= warm / 14


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.disk
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_path_of_a_training_has_the_bits_of_one_process(tmp_path, ranks):
    same, others = (EVERY, OTHERS) if ranks == 2 else (ON_THREE, [])
    given = answers(tmp_path, ranks, [*same, *others])
    assert_as_reference(given, same)
    for one in given:
        for case in ("layers", "llama", "nvme", "frozen", "blocks"):
            assert one[case]["reduced"][-1] <= one[case]["reduced"][1] / 14, case
        assert one["nvme"]["read"] > 0
    for one in given if others else ():
        assert one["loaded"]["first"], "weights are those that were saved"
        assert 0 < one["loaded"]["apart"] < 0.1, "errors began anew"
        assert "a second backward before step(), after freeze_step=1" in one["twice"]["error"]
        assert "gradients were scaled by" in one["clipped"]["error"]
        assert one["json"][0] == {"error": "none", "steps": 3}
        assert "OneBitAdam with gradient_accumulation_steps=2" in one["json"][1]["error"]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.disk
@pytest.mark.parametrize("machines", [2, 3])
def test_between_machines_goes_a_14th_of_the_bytes(tmp_path, machines):
    cases = ["layers", "llama", "nvme", "no_sync", "qwZ and second parts", "int8"]
    given = answers(tmp_path, 2 * machines, [*cases, "crossed"], **{LOCAL_SIZE: "2"})
    assert_as_reference(given, cases)
    for one in given:
        warm, frozen = one["crossed"]["steps"][1:3]
        assert 0 < frozen <= warm / 14

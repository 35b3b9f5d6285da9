"""Ranks that send weights in 8 bits and gradients in 8 or 4: real processes over gloo. What they do is in
coded_run.py.

Bit for bit against one process that codes what ranks send, of any number of ranks and machines.
"""

import pytest

from answers import assert_as_reference, read_answers
from infinity.ranks.machines import LOCAL_SIZE
from launches import forked
from places import SUPPORT

INT8, INT4 = 0.53, 0.28
"""The most of the bytes of 16-bit weights and gradients that codes and their scales may take."""
EVERY = [
    *("layers", "llama", "llama, int4", "llama, weights", "nvme", "nvme, backward", "nvme, accumulated"),
    *("accumulated", "max_norm", "frozen", "blocks", "mixtral", "routed, nvme", "chosen, checkpointed"),
    *("chosen, nvme", "checkpointed", "reentrant", "stage 2", "stage 1", "no_sync"),
]
"""Cases that are compared with the reference, on two ranks."""
ON_THREE = ["llama, int4", "nvme", "gpt2, backward", "chosen, nvme"]
"""Likewise, on three."""
MORE = {
    2: ["again", "again, nvme", "gathered", "in files", "overflow", "overflow, int4", "other weights"],
    3: ["again", "overflow, int4", "other weights"],
}
OVERFLOWS = ("overflow", "overflow, int4")
FED = [
    *("llama", "nvme", "backward", "no_sync", "stage 1", "routed", "frozen", "again", "int8 state"),
    *("durable", "loaded"),
]
"""Likewise, with error feedback, on two ranks."""
FED_ON = {
    (2, 2): FED,
    (3, 3): ["llama", "nvme", "routed"],
    (4, 2): ["llama", "backward", "stage 1", "durable"],
}
"""Those of them on so many ranks, of which so many are on a machine: each on either three or two machines."""


def answers(folder, ranks, cases, **more):
    forked(ranks, SUPPORT / "coded_run.py", folder, *cases, RANKS_DISK=folder, **more)
    return read_answers(folder, ranks)


@pytest.mark.multi
def test_ranks_train_as_one_process_that_codes_and_gathered_has_the_masters_halves(tmp_path):
    cases = ["layers, int4", "feedback", "feedback, loaded", "gathered"]
    given = answers(tmp_path, 2, [*cases, "other gradients"])
    assert_as_reference(given, cases)
    for one in given:
        ratios = one["layers, int4"]["ratios"]
        assert ratios["gather"] <= INT8
        assert ratios["reduce"] <= INT4
        assert ratios["read"] == 1
        assert "rank 1: quantized_gradients='int4'" in one["other gradients"]["error"]
    assert given[0]["other gradients"] == given[1]["other gradients"]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.disk
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_path_of_a_training_has_the_bits_of_one_process_that_codes(tmp_path, ranks):
    cases = [*(EVERY if ranks == 2 else ON_THREE), *MORE[ranks]]
    given = answers(tmp_path, ranks, cases)
    assert_as_reference(given, [one for one in cases if one not in {*OVERFLOWS, "other weights"}])
    for one in given:
        assert one["nvme"]["ratios"]["gather"] <= INT8
        assert one["nvme"]["ratios"]["reduce"] <= INT8
        assert one["llama, int4"]["ratios"]["reduce"] <= INT4
        for case in {*OVERFLOWS} & {*cases}:
            assert one[case]["scales"] == [256.0, 128.0, 128.0, 256.0], (
                "the step that overflowed was left out"
            )
        assert one["other weights"] == given[0]["other weights"]
        assert "rank 1: quantized_weights=None" in one["other weights"]["error"]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.disk
@pytest.mark.parametrize(("ranks", "local"), FED_ON)
def test_what_codes_leave_out_is_added_to_the_next_gradients_as_in_one_process(tmp_path, ranks, local):
    cases = [f"feedback, {name}" for name in FED_ON[ranks, local]]
    given = answers(tmp_path, ranks, ["feedback", *cases], **{LOCAL_SIZE: str(local)})
    assert_as_reference(given, ["feedback", *cases])
    assert all(one["feedback, llama"]["ratios"]["reduce"] <= INT4 for one in given)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.disk
def test_between_two_machines_of_two_ranks_go_half_or_a_quarter_of_the_bytes(tmp_path):
    cases = ["llama", "llama, int4", "nvme, accumulated", "gpt2, backward", "experts divided"]
    given = answers(tmp_path, 4, [*cases, "hops"], **{LOCAL_SIZE: "2"})
    assert_as_reference(given, cases)
    for one in given:
        assert one["llama"]["ratios"]["between machines"] <= INT8
        both, int4, plain = one["hops"]["moved"]
        for moved in (both, int4, plain):
            assert moved["between machines"] == (moved["gather"] + moved["reduce"]) // 4
        assert both["gather"] <= INT8 * plain["gather"]
        assert both["reduce"] <= INT8 * plain["reduce"]
        assert int4["reduce"] <= INT4 * plain["reduce"]


@pytest.mark.slow
@pytest.mark.multi
def test_on_a_mesh_copies_stay_copies_and_a_run_is_repeatable(tmp_path):
    given = answers(tmp_path, 4, ["mesh"])
    assert_as_reference(given, ["mesh"])
    for one in (one["mesh"] for one in given):
        assert one["copies"] > 0
        assert not one["same"], "nothing was coded"
        assert one["apart"] < 0.02

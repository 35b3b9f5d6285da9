"""What ranks are sent of weights and gradients, by links. Trusted: arithmetic by hand."""

import pytest

from infinity.errors import ConfigError
from infinity.planning.coded import coded_nbytes
from infinity.planning.exchange import Exchanges, Links
from infinity.planning.setting import Setting

SHARE = 1024


def of(ranks=4, local=4, **fields):
    return Exchanges(Setting(1 << 30, ranks=ranks, local_ranks=local, **fields), 2, ranks)


@pytest.mark.parametrize(
    ("ranks", "local", "expected"),
    [
        (4, 4, Links(3 * 2 * SHARE, 0)),
        (4, 1, Links(0, 3 * 2 * SHARE)),
        (4, 2, Links(2 * 2 * SHARE, 2 * SHARE)),
        (6, 2, Links(3 * 2 * SHARE, 2 * 2 * SHARE)),
        (1, 1, Links()),
    ],
)
def test_a_byte_crosses_between_two_machines_once_and_all_shares_come(ranks, local, expected):
    found = of(ranks, local)
    assert found.gathered(SHARE) == found.reduced(SHARE) == expected
    assert expected.nbytes == (ranks - 1) * 2 * SHARE


def test_ranks_with_memory_in_common_are_sent_nothing_on_their_machine():
    assert of(shared_memory=True).gathered(SHARE) == Links()
    assert of(4, 2, shared_memory=True).gathered(SHARE) == Links(0, 2 * SHARE)
    assert of(shared_memory=True).reduced(SHARE) == Links()
    assert of(4, 2, shared_memory=True).reduced(SHARE) == of(4, 2).reduced(SHARE)
    for coded in ({"quantized_gradients": "int8"}, {"one_bit": True}):
        assert of(shared_memory=True, **coded).reduced(SHARE) == of(**coded).reduced(SHARE) != Links()


def test_ranks_of_one_machine_choose_memory_in_common_by_themselves_where_nothing_excludes_it():
    def chosen(ranks, local, **fields):
        return Setting(1 << 30, ranks=ranks, local_ranks=local, **fields).by_itself().shared_memory

    assert chosen(2, 2)
    assert chosen(4, 4)
    assert not chosen(1, 1)
    assert not chosen(4, 2)
    for excluding in (
        {"secondary_shard": 2},
        {"quantized_weights": "int8"},
        {"expert_parallel": 2},
        {"device_nbytes": 1 << 20},
    ):
        assert not chosen(4, 4, **excluding), excluding


def test_neighbours_assemble_from_halves_what_four_ranks_have_in_quarters():
    two = of(4, 2, secondary_shard=2)
    assert two.gathered(SHARE) == of(4, 2).gathered(SHARE)
    assert two.gathered_again(SHARE) == Links(2 * 2 * SHARE, 0)
    assert two.second_nbytes(4 * 2 * SHARE) == 2 * 2 * SHARE
    assert of(4, 2).gathered_again(SHARE) is None
    assert of(4, 2).second_nbytes(4 * 2 * SHARE) == 0


def test_codes_are_sent_over_both_links():
    coded = of(4, 2, quantized_weights="int8", quantized_gradients="int4")
    one = coded_nbytes(SHARE, 8)
    assert coded.gathered(SHARE) == Links(2 * one, one)
    assert coded.reduced(SHARE) == Links(2 * coded_nbytes(SHARE, 4), coded_nbytes(SHARE, 4))


def test_one_bit_goes_between_machines_or_between_ranks_of_one():
    bits = 4 * SHARE // 256 + SHARE // 8
    assert of(4, 2, one_bit=True).reduced(SHARE) == Links(2 * 2 * SHARE, bits)
    assert of(4, 4, one_bit=True).reduced(SHARE) == Links(3 * bits, 0)
    assert of(4, 1, one_bit=True).reduced(SHARE) == Links(0, 3 * bits)


def test_a_worker_has_a_momentum_and_an_error_of_every_part():
    assert of(4, 4, one_bit=True).worker_nbytes(SHARE) == 8 * 4 * SHARE
    assert of(4, 2, one_bit=True).worker_nbytes(SHARE) == 8 * 2 * SHARE, "ranks of a machine divide them"
    assert of(4, 4).worker_nbytes(SHARE) == of(1, 1, one_bit=True).worker_nbytes(SHARE) == 0


def test_errors_are_kept_of_every_ranks_part_and_of_several_machines_of_the_sums_for_each():
    fed = {"quantized_gradients": "int4", "error_feedback": True}
    assert of(4, 4, **fed).worker_nbytes(SHARE) == of(4, 1, **fed).worker_nbytes(SHARE) == 4 * 4 * SHARE
    assert of(4, 2, **fed).worker_nbytes(SHARE) == 4 * (4 + 2) * SHARE
    assert of(1, 1, **fed).worker_nbytes(SHARE) == 0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"secondary_shard": 3}, "secondary_shard=3: 4 ranks of a machine share a model"),
        ({"secondary_shard": 2, "shared_memory": True}, "shared_memory=True with secondary_shard=2"),
        ({"one_bit": True, "quantized_gradients": "int8"}, "one_bit=True with quantized_gradients='int8'"),
        ({"one_bit": True, "dtype": "fp16"}, "one_bit with dtype='fp16'"),
        ({"one_bit": True, "master_dtype": "fp24"}, "one_bit with dtype='bf16', master_dtype='fp24'"),
        ({"error_feedback": True}, "error_feedback without quantized_gradients"),
        (
            {"error_feedback": True, "quantized_gradients": "int8", "dtype": "fp16"},
            'error_feedback=True with dtype="fp16"',
        ),
        ({"one_bit": True, "device_nbytes": 1 << 20}, "one_bit=True with device_nbytes=1048576"),
        ({"shared_memory": True, "expert_parallel": 2}, "shared_memory=True with expert_parallel=2"),
    ],
)
def test_a_plan_refuses_what_a_run_does(fields, told):
    with pytest.raises(ConfigError, match=told):
        of(**fields)

"""What Config and DeepSpeed's JSON say of second parts of weights. Nothing is faked."""

import pytest

from infinity import Config, ConfigError

ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"secondary_shard": "node"}, "secondary_shard='node': expected \"machine\", a number of ranks"),
        ({"secondary_shard": 0}, "secondary_shard=0: expected"),
        ({"secondary_shard": True}, "secondary_shard=True: expected"),
        ({"secondary_shard": 2, "stage": 2}, "secondary_shard=2 with stage=2: every rank"),
        ({"secondary_shard": "machine", "expert_parallel": 2}, "with expert_parallel=2"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(fields, said):
    with pytest.raises(ConfigError, match=said):
        Config(**fields)


@pytest.mark.parametrize(("size", "expected"), [(4, 4), (1, None), (0, None)])
def test_deepspeeds_partition_size_is_the_number_of_neighbours(size, expected):
    content = {"bf16": {"enabled": True}, ZERO: {"stage": 3, "zero_hpz_partition_size": size}}
    assert Config.from_deepspeed(content).secondary_shard == expected

"""Settings are checked where they are written. Nothing is faked."""

import dataclasses

import pytest
import torch

from infinity import Config, ConfigError


def test_sizes_and_dtypes_may_be_written_in_every_usual_way():
    config = Config(nvme=["/nvme"], host_memory="1GiB", dtype=torch.bfloat16)
    assert (config.nvme_folder, config.host_nbytes, config.dtype) == ("/nvme", 1 << 30, "bf16")
    assert Config(dtype="bfloat16") == Config(dtype="bf16")


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().nvme = "/elsewhere"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"host_memory": 0}, "host_memory=0"),
        ({"host_memory": "much"}, "host_memory"),
        ({"host_memory": -5}, "host_memory"),
        ({"nvme": ["/a", "/b"]}, "one folder"),
        ({"nvme": ""}, "nvme"),
        ({"dtype": torch.float16}, "dtype"),
        ({"aio": "libaio"}, "aio"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        Config(**fields)


def test_an_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="host_memroy"):
        Config(host_memroy="1GiB")

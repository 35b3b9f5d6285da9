"""Settings are checked where they are written. Nothing is faked."""

import dataclasses
from pathlib import Path

import pytest
import torch

import infinity
from infinity import Config, ConfigError


def test_sizes_and_dtypes_may_be_written_in_every_usual_way():
    config = Config(nvme=["/nvme"], host_memory="1GiB", dtype=torch.bfloat16)
    assert (config.nvme_folders, config.host_nbytes, config.dtype) == (("/nvme",), 1 << 30, "bf16")
    assert Config(dtype="bfloat16") == Config(dtype="bf16")
    assert [Config(dtype=one).dtype for one in (torch.float16, "half", torch.float32)] == [
        "fp16",
        "fp16",
        "fp32",
    ]


def test_the_device_has_a_budget_of_its_own_where_it_has_memory_of_its_own():
    config = Config(device="cuda:1", device_memory="1.5 GiB")
    buckets = Config(gather_bucket="1MiB", reduce_bucket=0)
    assert (buckets.gather_bucket_nbytes, buckets.reduce_bucket_nbytes) == (1 << 20, 0)
    assert (config.device_nbytes, Config(device="cuda").device_nbytes) == (3 << 29, None)
    assert "device=cuda:1 (1.5 GiB)" in str(config)


@pytest.mark.parametrize(
    ("nvme", "folders"),
    [
        (None, ()),
        ("/a", ("/a",)),
        (Path("/a"), ("/a",)),
        (["/a", Path("/b")], ("/a", "/b")),
        (("/b", "/a", "/a/c"), ("/b", "/a", "/a/c")),
    ],
)
def test_nvme_may_be_none_one_folder_or_several(nvme, folders):
    assert Config(nvme=nvme).nvme_folders == folders


def test_moments_are_exact_unless_asked_otherwise():
    assert (Config().state_dtype, Config(state_dtype="int8").state_dtype) == ("fp32", "int8")


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().nvme = "/elsewhere"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"host_memory": 0}, "host_memory=0"),
        ({"host_memory": "much"}, "host_memory"),
        ({"host_memory": -5}, "host_memory"),
        ({"nvme": ["/a", "/b", "/x/../a/"]}, r"nvme=.*'/a' is named twice"),
        ({"nvme": ""}, "nvme="),
        ({"nvme": []}, "nvme="),
        ({"nvme": ["/a", ""]}, "nvme="),
        ({"device_memory": "1GiB", "device": "cpu"}, "device_memory='1GiB'.*host_memory"),
        ({"device_memory": "1GiB", "device": "cpu:0"}, "device_memory='1GiB'"),
        ({"device_memory": 0, "device": "cuda"}, "device_memory=0"),
        ({"device_memory": "much", "device": "cuda"}, "device_memory"),
        ({"state_dtype": "fp8"}, "state_dtype='fp8'.*'fp32', 'bf16', 'int8', 'int4'"),
        ({"dtype": torch.float64}, 'dtype=torch.float64: expected "bf16", "fp16" or "fp32"'),
        ({"aio": "libaio"}, "aio"),
        ({"device": "tpu"}, "device"),
        ({"expert_parallel": 2, "device": "cuda"}, "expert_parallel=2 with device='cuda'"),
        ({"gather_bucket": -1}, "gather_bucket: -1 is negative; 0: units go one by one"),
        ({"reduce_bucket": "much"}, "reduce_bucket: 'much' is not a size"),
        ({"reduce_bucket": None}, "reduce_bucket: expected bytes"),
        ({"expert_parallel": 0}, "expert_parallel=0: expected a number of ranks"),
        ({"expert_parallel": 2, "experts": "whole"}, 'expert_parallel=2.*experts="whole"'),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        Config(**fields)


def test_an_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="no setting 'host_memroy'; did you mean 'host_memory'"):
        Config(host_memroy="1GiB")
    with pytest.raises(TypeError, match=r"no setting 'gpu'. It has nvme, host_memory, .*wipe"):
        Config(gpu=1)
    with pytest.raises(TypeError, match="did you mean 'host_memory'"):
        infinity.Init(host_mem="1GiB")
    with pytest.raises(TypeError, match="did you mean 'process_group'"):
        infinity.Init(process_groups=None)

"""DeepSpeed's section tensor_parallel, and what else says how ranks are divided. Nothing is faked."""

import pytest

from infinity import Config, ConfigError
from infinity.config.deepspeed_keys import Verdict
from infinity.config.tensor_ranks import divide_layers, tensor_ranks
from infinity.deepspeed.launch import read

FILE = {"train_batch_size": 16, "gradient_accumulation_steps": 2}


def test_ranks_that_divide_layers_count_as_one_in_the_relation_of_batches():
    settings = read({**FILE, "tensor_parallel": {"autotp_size": 4}}, world_size=8)
    assert settings.tensor_parallel == 4
    assert (settings.batches.micro, settings.batches.ranks) == (4, 2)
    both = {**FILE, "tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}
    assert read(both, world_size=8).batches.ranks == 2


@pytest.mark.parametrize("size", [0, 1, None])
def test_no_size_divides_nothing_and_switches_the_section_off(size):
    section = {"autotp_size": size, "partition_config": {"layer_specs": [{}]}, "preset_model": "llama"}
    settings = read({**FILE, "tensor_parallel": section})
    assert settings.tensor_parallel == 1
    lines = settings.report.of(Verdict.OFF)
    assert {one.key for one in lines} >= {"tensor_parallel.preset_model"}


def test_a_partition_of_deepspeeds_own_is_refused_with_what_to_use():
    section = {"autotp_size": 2, "partition_config": {"use_default_specs": False}}
    with pytest.raises(ConfigError, match=r"tensor_parallel\.partition_config.*model\.tp_plan = "):
        read({**FILE, "tensor_parallel": section}, world_size=2)


def test_ranks_that_cannot_be_divided_are_refused():
    with pytest.raises(ConfigError, match=r"autotp_size=4: 6 ranks cannot be divided"):
        read({**FILE, "tensor_parallel": {"autotp_size": 4}}, world_size=6)
    assert divide_layers({"tensor_parallel.autotp_size": 4}, 1) == 1, "read before there are ranks"
    assert tensor_ranks({"tensor_parallel.autotp_size": "auto"}) == 1


def test_the_number_of_sequences_is_compared_with_the_ranks():
    file = {**FILE, "sequence_parallel_size": 2, "data_parallel_size": 4}
    assert read(file, world_size=8).batches.ranks == 4
    with pytest.raises(ConfigError, match="data_parallel_size=4, but the ranks train 2 sequences at once"):
        read(file, world_size=4)


def test_a_config_alone_divides_no_layers():
    with pytest.raises(ConfigError, match=r"autotp_size=2: no field of Config divides layers"):
        Config.from_deepspeed({**FILE, "tensor_parallel": {"autotp_size": 2}})


def test_a_pipeline_is_refused_with_what_to_use():
    with pytest.raises(ConfigError, match=r"pipeline = .*torch\.distributed\.pipelining.*examples/mesh\.py"):
        read({**FILE, "pipeline": {"stages": 2}})

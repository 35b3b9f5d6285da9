"""Settings of what ranks send in fewer bits, and DeepSpeed's keys. Trusted: what those mean there."""

import pytest

from infinity import Config, ConfigError
from infinity.config.deepspeed_json import translate
from infinity.config.deepspeed_keys import Verdict

ZERO = "zero_optimization.zero_quantized_"


def read(world_size=1, dtype="bf16", more=None, **zero):
    content = {
        "train_batch_size": world_size,
        dtype: {"enabled": True},
        "zero_optimization": {"stage": 3, **zero},
    }
    return translate(content, Config, world_size=world_size, infinity=more)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantized_weights": "int4"}, "quantized_weights='int4': expected one of None, 'int8'"),
        ({"quantized_weights": True}, "quantized_weights=True: expected one of None, 'int8'"),
        (
            {"quantized_gradients": "fp8"},
            "quantized_gradients='fp8': expected one of None, 'int8', 'int4'",
        ),
        (
            {"quantized_weights": "int8", "dtype": "fp32"},
            'quantized_weights=\'int8\' with dtype="fp32": .* masters themselves.* use dtype="bf16"',
        ),
        (
            {"quantized_weights": "int8", "stage": 1},
            "quantized_weights='int8' with stage=1: every rank",
        ),
        ({"quantized_weights": "int8", "stage": 2}, "stage=2.*quantized_gradients works at every stage"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(fields, said):
    with pytest.raises(ConfigError, match=said):
        Config(**fields)


@pytest.mark.parametrize("fields", [{"dtype": "fp32"}, {"stage": 1}, {"stage": 2}, {"dtype": "fp16"}])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_gradients_are_quantised_in_every_type_and_at_every_stage(fields, kind):
    assert Config(quantized_gradients=kind, **fields).quantized_gradients == kind


def test_deepspeeds_weights_have_8_bits_and_its_gradients_4():
    settings = read(zero_quantized_weights=True, zero_quantized_gradients=True)
    config = settings.config
    assert (config.quantized_weights, config.quantized_gradients) == ("int8", "int4")
    lines = {line.key: line.verdict for line in settings.report.lines}
    assert lines[ZERO + "weights"] == lines[ZERO + "gradients"] == Verdict.HONOURED
    for off in (False, None, 0):
        config = read(zero_quantized_weights=off, zero_quantized_gradients=off).config
        assert (config.quantized_weights, config.quantized_gradients) == (None, None)


def test_a_field_of_ours_says_more_bits_or_none():
    config = read(zero_quantized_gradients=True, more={"quantized_gradients": "int8"}).config
    assert config.quantized_gradients == "int8"
    config = read(zero_quantized_weights=True, more={"quantized_weights": None}).config
    assert config.quantized_weights is None


def test_one_rank_that_keeps_its_weights_on_the_device_sends_none():
    nvme = {
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
    }
    config = read(zero_quantized_weights=True, **nvme).config
    assert (config.stage, config.quantized_weights) == (2, None)

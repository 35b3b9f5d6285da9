"""DeepSpeed's keys for frozen weights in fewer bits. Trusted: what each of them means there."""

import pytest

from infinity import Config, ConfigError
from infinity.config.deepspeed_json import translate
from infinity.config.deepspeed_keys import Verdict

NVME = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}


def read(*, nontrainable=None, loaded=None, zero=NVME, **more):
    zero = {
        **zero,
        **({"zero_quantized_nontrainable_weights": nontrainable} if nontrainable is not None else {}),
    }
    content = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": zero, **more}
    if loaded is not None:
        content["weight_quantization"] = {"quantized_initialization": loaded}
    return translate(content, Config)


def test_nontrainable_weights_in_8_bits_are_what_is_frozen_when_init_ends():
    settings = read(nontrainable=True)
    assert (settings.config.frozen_dtype, settings.freezes) == ("int8", False)
    for off in (False, None):
        assert read(nontrainable=off).config.frozen_dtype is None


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ({"num_bits": 8}, "int8"),
        ({"num_bits": 8, "group_dim": 1, "symmetric": True}, "int8"),
        ({"num_bits": 4}, "nf4"),
        ({"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}, "nf4"),
    ],
)
def test_what_is_loaded_quantised_is_frozen(numbers, kind):
    settings = read(loaded=numbers)
    assert (settings.config.frozen_dtype, settings.freezes) == (kind, True)
    assert len(settings.report.of(Verdict.HONOURED)) >= len(numbers)


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ({"num_bits": 3}, r'num_bits = 3: not supported \(write "num_bits": 8 \(int8\) or 4 \(nf4\)\)'),
        ({"group_size": 64}, r'num_bits = null: not supported \(write "num_bits"'),
        (
            {"num_bits": 4, "group_size": 128},
            r"group_size = 128: .*a scale for each 64 elements of a row; leave",
        ),
        ({"num_bits": 8, "group_size": 64}, r"group_size = 64: .*a scale for each row; leave it out"),
        ({"num_bits": 8, "symmetric": False}, r'symmetric = false: .*"int8" is symmetric'),
        ({"num_bits": 4, "group_dim": 0}, r"group_dim = 0: .*leave it out"),
        ({"num_bits": 4, "group_sise": 64}, r"group_sise = 64: .*did you mean .*group_size"),
    ],
)
def test_numbers_that_mean_something_else_are_refused_one_by_one(numbers, named):
    with pytest.raises(ConfigError, match=named):
        read(loaded=numbers)


def test_what_contradicts_itself_or_lacks_a_folder_is_refused():
    with pytest.raises(ConfigError, match=r"nontrainable_weights = true: .*it means 8 bits, and .* says 4"):
        read(nontrainable=True, loaded={"num_bits": 4})
    assert read(nontrainable=True, loaded={"num_bits": 8}).config.frozen_dtype == "int8"
    for asked in ({"nontrainable": True}, {"loaded": {"num_bits": 4}}):
        with pytest.raises(ConfigError, match=r'lie in a file on NVMe.*"offload_param": \{"device": "nvme"'):
            read(zero={"stage": 3}, **asked)
    assert read(zero={"stage": 3}, nontrainable=True, infinity={"nvme": "/n"}).config.nvme == "/n"
    with pytest.raises(ConfigError, match=r'asks for "int8", and infinity.frozen_dtype for \'nf4\''):
        read(nontrainable=True, infinity={"frozen_dtype": "nf4"})


def test_quantising_afterwards_is_refused_with_the_key_that_does_it_before():
    with pytest.raises(ConfigError, match=r"post_init_quant = .*quantized_initialization.num_bits"):
        read(weight_quantization={"post_init_quant": {"fc": {"num_bits": 4}}})

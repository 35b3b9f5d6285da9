"""DeepSpeed's JSON, read. Nothing is faked; the files are those of its documentation and of guides."""

import json
import warnings

import pytest

from infinity import Config, ConfigError
from infinity.config.deepspeed_keys import KEYS, Verdict
from infinity.config.deepspeed_recipe import Chosen
from infinity.config.loss_scale import Scaling
from infinity.config.sparse_attention import AskedSparsity
from infinity.deepspeed.launch import read
from infinity.planning.kept_tokens import TokenSchedule
from samples import BF16, FINE_TUNE

GETTING_STARTED = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
    "fp16": {"enabled": True},
    "zero_optimization": True,
}
"""As DeepSpeed's "Getting Started" has it."""


ANSWERS = {
    "bf16": True,
    "lr": 2e-5,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.01,
    "warmup_num_steps": 10,
    "total_num_steps": 100,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": 2,
}


def test_a_fine_tuning_file_is_read_whole():
    settings = read(FINE_TUNE, infinity={"host_memory": "4GiB"}, world_size=2, **ANSWERS)
    assert settings.config == Config(nvme=["/local_nvme"], host_memory="4GiB")
    options = {"lr": 2e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    assert settings.optimizer == Chosen("AdamW", options)
    assert settings.scheduler == (
        "WarmupDecayLR",
        {"warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 10, "total_num_steps": 100},
    )
    batches = settings.batches
    assert (batches.train, batches.micro, batches.steps, batches.ranks) == (16, 2, 4, 2)
    assert (settings.gathers_on_save, settings.steps_per_print, settings.breakdown) == (True, 2000, False)


def test_the_report_has_a_line_for_every_key():
    report = read(FINE_TUNE, **ANSWERS).report
    unnecessary = {line.key for line in report.of(Verdict.UNNECESSARY)}
    assert {"aio.queue_depth", "zero_optimization.reduce_bucket_size", "fp16.loss_scale"} < unnecessary
    assert report.of(Verdict.OFF) == ()
    assert len(report.lines) == len({line.key for line in report.lines}) == len(list(leaves(FINE_TUNE)))
    assert 'optimizer.type = "AdamW": honoured (Adam, AdamW, SGD, Adagrad, Lion' in str(report)


@pytest.mark.parametrize(("precision", "width"), [({"bf16": {"enabled": True}}, 2), ({}, 4)])
def test_bucket_sizes_in_elements_are_upper_bounds_and_auto_is_none(precision, width):
    zero = {
        "reduce_bucket_size": 1e6,
        "allgather_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 2000,
    }
    config = Config.from_deepspeed({**precision, "zero_optimization": zero})
    assert (config.reduce_bucket_nbytes, config.gather_bucket_nbytes) == (1_000_000 * width, 2000 * width)
    large = Config.from_deepspeed({**precision, "zero_optimization": dict.fromkeys(zero, 5e8)})
    auto = Config.from_deepspeed({**precision, "zero_optimization": dict.fromkeys(zero, "auto")})
    assert large == auto
    assert large.reduce_bucket_nbytes == large.gather_bucket_nbytes == 16 << 20
    given = read({**precision, "zero_optimization": zero}).report
    assert {f"zero_optimization.{name}" for name in zero} <= {one.key for one in given.of(Verdict.HONOURED)}


def leaves(content):
    for value in content.values():
        yield from leaves(value) if isinstance(value, dict) else [value]


def test_config_comes_from_a_file_as_from_what_is_in_it(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(FINE_TUNE))
    assert Config.from_deepspeed(file, **ANSWERS) == Config.from_deepspeed(FINE_TUNE, **ANSWERS)


def test_every_auto_without_a_value_is_named_with_the_call_that_gives_it():
    with pytest.raises(
        ConfigError, match=r'"auto" without a value: .*optimizer.params.lr.*lr=\.\.\.'
    ) as caught:
        Config.from_deepspeed(FINE_TUNE)
    for name in ("fp16.enabled", "warmup_num_steps", "gradient_clipping", "gradient_accumulation_steps"):
        assert name in str(caught.value)


def test_the_file_of_getting_started_trains_in_fp16():
    settings = read(GETTING_STARTED)
    assert settings.config == Config(stage=1, dtype="fp16")
    assert (settings.scaling, settings.precision) == (Scaling(), "fp16")
    assert (settings.batches.micro, settings.gradient_clipping, settings.check_overflow) == (8, 1.0, True)
    assert settings.optimizer.options["lr"] == 0.00015


def test_the_section_fp16_says_how_the_loss_is_scaled():
    section = {**FINE_TUNE["fp16"], "enabled": True, "hysteresis": 4, "consecutive_hysteresis": True}
    read_ = read({"fp16": {**section, "loss_scale_window": 7}})
    assert read_.scaling == Scaling(power=16, window=7, hysteresis=4, consecutive=True)
    assert {line.verdict for line in read_.report.lines if line.key.startswith("fp16.")} == {Verdict.HONOURED}
    assert read({"fp16": {"enabled": True, "loss_scale": 128}}).scaling == Scaling(fixed=128)


def test_what_is_not_supported_is_listed_at_once_or_left_out_with_a_warning():
    content = {
        **BF16,
        "train_batch_size": 4,
        "gradient_cliping": 1.0,
        "autotuning": {"enabled": True},
        "zero_optimization": {"compute_grad_norm": False, "mics_shard_size": -1},
    }
    with pytest.raises(ConfigError, match=r"^3 of 7 keys") as caught:
        read(content)
    assert "gradient_cliping = 1.0: not supported (unknown; did you mean gradient_clipping?)" in str(
        caught.value
    )
    with pytest.warns(
        UserWarning, match="left out .*\n.*gradient_cliping.*\n.*autotuning.*\n.*compute_grad_norm"
    ):
        settings = read(content, strict=False)
    assert [line.key for line in settings.report.of(Verdict.OFF)] == ["zero_optimization.mics_shard_size"]


def test_every_switch_may_be_a_number_as_in_deepspeed():
    """Its pydantic classes take 1 for true, and scripts write it: zero_allow_untested_optimizer = 1."""
    found = {}
    for true, false in ((True, False), (1, 0)):
        for value in (true, false):
            for path in [path for path, key in KEYS.items() if key.takes == "switch"]:
                content = {"train_batch_size": 1, "optimizer": {"type": "SGD"}, "bf16": {"enabled": true}}
                content["infinity"] = {"nvme": "/nvme"}  # quantised weights lie there
                *above, last = path.split(".")
                section = content
                for one in above:
                    section = section.setdefault(one, {})
                section[last] = value
                if path == "curriculum_learning.enabled":  # which asks for a whole schedule
                    section.update({**OLDER, last: value})
                if path == "fp16.enabled":
                    content["bf16"]["enabled"] = false
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found.setdefault((path, bool(value)), []).append(read(content, strict=False))
    assert len(found) > 100
    assert [path for path, (one, other) in found.items() if one != other] == []
    schedule = {"type": "LRRangeTest", "params": {"lr_range_test_staircase": 1}}
    assert read({"train_batch_size": 1, "scheduler": schedule}).scheduler[1] == schedule["params"]


def test_without_bf16_and_fp16_fp32_computes_as_deepspeed_has_it():
    settings = read({"train_batch_size": 1})
    assert (settings.config, settings.check_overflow) == (Config(dtype="fp32"), False)
    assert "bf16.enabled = null: honoured (neither bf16 nor fp16: the model computes in fp32" in str(
        settings.report
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train_batch_size": 16}, (16, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 4}, (8, 4, 1)),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}, (16, 4, 2)),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 4}, (16, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3}, (6, 1, 3)),
        (
            {
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 3,
            },
            (6, 1, 3),
        ),
        ({}, (None, None, 1)),
    ],
)
def test_the_batch_size_that_is_left_out_follows_from_the_others(given, expected):
    batches = read({**BF16, **given}, world_size=2).batches
    assert (batches.train, batches.micro, batches.steps) == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 3},
            "train_batch_size=16 is not .* 3 x 2 x 2 = 12",
        ),
        ({"train_batch_size": 0}, "train_batch_size=0: expected a whole number above 0"),
        ({"train_batch_size": 2.5}, "train_batch_size=2.5"),
        ({"gradient_clipping": "1"}, "gradient_clipping='1': expected a number"),
        ({"gradient_clipping": -1}, "gradient_clipping=-1"),
        ({"bf16": {"enabled": "perhaps"}}, "bf16.enabled='perhaps': expected true or false"),
        ({"bf16": True}, "bf16=True: expected a section"),
        ({"fp16": {"enabled": True}}, "both enabled"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}, "optimizer.params.betas"),
        ({"zero_optimization": {"stage": 4}}, "stage=4"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "offload_param.device='disk'"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, 'needs an "nvme_path"'),
        ({"scheduler": {"type": "Cosine"}}, "scheduler.type='Cosine': expected one of WarmupLR"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "WarmupDecayLR needs total_num_steps"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
            "did you mean 'warmup_num_steps'",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "exp"}}}, "warmup_type='exp'"),
        ({"scheduler": {"params": {"warmup_num_steps": 3}}}, "without a type"),
        ({"infinity": {"host_memroy": "1GiB"}}, "infinity.host_memroy: .*did you mean 'host_memory'"),
        ({"infinity": {"host_memory": 0}}, "host_memory=0"),
        ({"infinity": {"accumulate_by_block": 1}}, "accumulate_by_block=1: expected true or false"),
        ({"infinity": {"speculate": "auto"}}, "speculate='auto': expected true or false"),
        (
            {"infinity": {"accumulate_by_block": True}, "managed_gradient_accumulation": False},
            "accumulate_by_block with managed_gradient_accumulation=false",
        ),
        ({"infinity": {"dtype": "fp16"}}, "infinity.dtype='fp16', but the file's sections .* say bf16"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(given, says):
    with pytest.raises(ConfigError, match=says):
        read({**BF16, **given}, world_size=2)


def test_a_value_that_the_file_contradicts_or_does_not_ask_for_is_refused():
    with pytest.raises(ConfigError, match=r"gradient_clipping is 0.5 in the file, but gradient_clipping=1.0"):
        read({**BF16, "gradient_clipping": 0.5}, gradient_clipping=1.0)
    assert read({**BF16, "gradient_clipping": 0.5}, gradient_clipping=0.5).gradient_clipping == 0.5
    with pytest.raises(ConfigError, match="lr: given, but the file has no such key"):
        read(BF16, lr=1e-3)


def test_parameters_and_states_on_two_drives_are_striped_over_both():
    def on(path):
        return {"device": "nvme", "nvme_path": path}

    zero = {"stage": 3, "offload_param": on("/nvme0"), "offload_optimizer": on("/nvme1")}
    assert Config.from_deepspeed({**BF16, "zero_optimization": zero}).nvme_folders == ("/nvme0", "/nvme1")
    zero["offload_optimizer"]["device"] = "cpu"
    assert Config.from_deepspeed({**BF16, "zero_optimization": zero}).nvme_folders == ("/nvme0",)


@pytest.mark.parametrize(("stage", "expected"), [(0, 3), (1, 1), (2, 2), (3, 3)])
def test_the_stage_says_what_ranks_divide(stage, expected):
    assert Config.from_deepspeed({**BF16, "zero_optimization": {"stage": stage}}).stage == expected


def test_old_spellings_are_understood():
    content = {
        "bfloat16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "cpu_offload": True,
            "stage3_gather_fp16_weights_on_model_save": True,
        },
        "infinity": {"host_memory": "1GiB", "state_dtype": "int8"},
    }
    settings = read(content)
    assert (settings.config, settings.gathers_on_save) == (
        Config(host_memory="1GiB", state_dtype="int8"),
        True,
    )


@pytest.mark.parametrize(
    ("optimizer", "refused"),
    [
        ({"type": "adam", "params": {"adam_w_mode": False}}, False),
        ({"type": "AdamW", "params": {"adam_w_mode": False, "weight_decay": 0.1}}, False),
        ({"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}, False),
        ({"type": "sgd", "params": {"momentum": 0.9, "nesterov": True}}, False),
        ({"type": "SGD", "params": {"betas": [0.9, 0.99]}}, True),
        ({"type": "Adam", "params": {"torch_adam": True, "amsgrad": False, "weight_decay": 0.1}}, False),
        ({"type": "Lamb", "params": {"max_coeff": 10.0}}, True),
    ],
)
def test_of_optimizers_those_with_a_kernel_are_there(optimizer, refused):
    content = {**BF16, "optimizer": optimizer}
    if refused:
        with pytest.raises(ConfigError, match="optimizer"):
            read(content)
    else:
        assert read(content).optimizer is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ('{\n"a": 1, // why\n}', "line 2.*Comments are not JSON"),
        ("[1]", "expected an object"),
        (None, "no such file"),
    ],
)
def test_a_file_that_is_no_such_json_is_refused(tmp_path, text, says):
    file = tmp_path / "ds.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        Config.from_deepspeed(str(file))


def test_monitors_that_are_enabled_are_named_with_their_sections():
    content = {"tensorboard": {"enabled": 1, "job_name": "a"}, "csv_monitor": {"enabled": False}, "wandb": {}}
    assert read({**BF16, **content}).monitors == {"tensorboard": {"enabled": True, "job_name": "a"}}


def test_checkpoints_on_the_cpu_are_offloaded_activations():
    section = {"cpu_checkpointing": True, "partition_activations": True, "number_checkpoints": 4}
    settings = read({**BF16, "activation_checkpointing": section})
    assert settings.config.offload_activations == "host"
    (line,) = [one for one in settings.report.lines if one.key.endswith("partition_activations")]
    assert (line.verdict, "Init(partition_activations=group)" in line.says) == (Verdict.UNNECESSARY, True)
    assert Config.from_deepspeed(BF16).offload_activations is None


NVME = {"device": "nvme", "nvme_path": "/nvme"}


def tiers(param=None, optimizer=None, stage=3, **options):
    zero = {"stage": stage, "offload_param": param, "offload_optimizer": optimizer}
    content = {**BF16, "zero_optimization": {key: value for key, value in zero.items() if value is not None}}
    return read(content, **options)


@pytest.mark.parametrize(
    ("param", "optimizer", "folders", "stage"),
    [
        ({"device": "none"}, NVME, ("/nvme",), 2),
        (None, NVME, ("/nvme",), 3),
        ({"device": "none"}, {"device": "cpu"}, (), 3),
        ({"device": "none"}, {**NVME, "ratio": 0.0}, (), 3),
        (NVME, {**NVME, "nvme_path": "/other", "ratio": 0}, ("/nvme",), 3),
        (None, {**NVME, "ratio": 1.0}, ("/nvme",), 3),
        (None, {"device": "cpu", "ratio": 0.3}, (), 3),
        (NVME, {"device": "none"}, ("/nvme",), 3),
    ],
)
def test_none_and_ratio_say_what_stays_in_memory(param, optimizer, folders, stage):
    config = tiers(param, optimizer).config
    assert (config.nvme_folders, config.stage) == (folders, stage)


def test_shares_of_tiers_that_cannot_be_had_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"ratio = 0.3: not supported \(host_memory says in bytes"):
        tiers(None, {**NVME, "ratio": 0.3})
    with pytest.raises(ConfigError, match=r"offload_optimizer.ratio=1.5: expected a number from 0 to 1"):
        tiers(None, {**NVME, "ratio": 1.5})
    with pytest.raises(ConfigError, match=r'offload_param.device.*of 2 ranks .* write "stage": 2'):
        tiers({"device": "none"}, NVME, world_size=2)
    assert tiers({"device": "none"}, NVME, stage=2, world_size=2).config.stage == 2
    with pytest.warns(UserWarning, match="of 2 ranks"):
        assert tiers({"device": "none"}, NVME, world_size=2, strict=False).config.stage == 3
    report = str(tiers(NVME, {"device": "cpu"}).report)
    assert (
        'offload_optimizer.device = "cpu": honoured (in host memory as far as host_memory has room' in report
    )


def by_length(**more):
    """Return a section data_efficiency with the metric seqlen."""
    metric = {
        "min_difficulty": 64,
        "max_difficulty": 1024,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 1000, "difficulty_step": 8},
        **more,
    }
    learning = {"enabled": True, "curriculum_metrics": {"seqlen": metric}}
    return {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": learning}}


OLDER = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 64,
    "max_difficulty": 1024,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 1000, "difficulty_step": 8},
}


@pytest.mark.parametrize("section", [{"data_efficiency": by_length()}, {"curriculum_learning": OLDER}])
def test_a_curriculum_by_length_is_read_from_both_sections(section):
    lengths = read(section).curriculum
    assert (lengths.shortest, lengths.longest, lengths.steps, lengths.multiple) == (64, 1024, 1000, 8)
    assert lengths.at(500) == 544


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"data_efficiency": by_length(difficulty_type="percentile")}, "lengths are tokens"),
        ({"data_efficiency": by_length(index_to_sample_path="x")}, "rows are cut to the length"),
        ({"data_efficiency": by_length(schedule_type="cubic")}, "expected one of 'fixed_linear'"),
        ({"data_efficiency": by_length(schedule_config={"steps": 5})}, "unknown; expected one of"),
        ({"curriculum_learning": {**OLDER, "curriculum_type": "rarity"}}, "by length alone: seqlen"),
        ({"curriculum_learning": {"enabled": True}}, "needs min_difficulty, max_difficulty"),
        ({"curriculum_learning": OLDER, "data_efficiency": by_length()}, "is there twice"),
    ],
)
def test_other_curricula_are_refused_by_name(section, says):
    with pytest.raises(ConfigError) as error:
        read(section)
    assert says in str(error.value)


def test_a_curriculum_by_another_metric_is_refused_unless_it_is_off():
    metrics = {"rarity": {"min_difficulty": 1}}
    section = {
        "enabled": True,
        "data_sampling": {
            "enabled": True,
            "curriculum_learning": {"enabled": True, "curriculum_metrics": metrics},
        },
    }
    with pytest.raises(ConfigError, match="by length alone: seqlen"):
        read({"data_efficiency": section})
    off = read({"data_efficiency": {**section, "enabled": False}})
    assert off.curriculum is None
    assert {line.verdict for line in off.report.lines if line.key.startswith("data_eff")} == {Verdict.OFF}


DYNAMIC = {"data_sampling": {"enabled": True, "dynamic_batching": {"enabled": True, "max_tokens": 9}}}


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"data_efficiency": {"enabled": True, **DYNAMIC}}, "choose batches in the data loader"),
        ({"curriculum_learning": {"enable": True}}, "unknown; did you mean curriculum_learning.enabled"),
        ({"data_efficiency": {"enabled": True, "sede": 1}}, "unknown; did you mean data_efficiency.seed"),
    ],
)
def test_what_a_section_asks_for_without_a_curriculum_is_refused_by_name(section, says):
    with pytest.raises(ConfigError) as error:
        read(section)
    assert says in str(error.value)


def test_what_is_beside_a_curriculum_is_off_where_its_section_is_or_it_is_itself():
    off = {"max_tokens": 9, "enabled": False}
    for section in (
        {"enabled": False, **DYNAMIC},
        {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": off}},
    ):
        lines = read({"data_efficiency": section}).report.lines
        beside = [line for line in lines if line.key.endswith("dynamic_batching")]
        assert {line.verdict for line in beside} == {Verdict.OFF}


def routed(switches=(True, True, True), schedule=None, **changes):
    """Return a section data_efficiency with random-LTD. switches: its own, data_routing's, its section's."""
    section = {
        "enabled": switches[0],
        "total_layer_num": 24,
        "random_ltd_layer_num": 3,
        "random_ltd_layer_id": [1, 2, 22],
        "model_mask_name": "mask",
        "model_type": "decoder",
        "hidden_state_order": "seq_batch_dim",
        "random_ltd_schedule": {
            "min_value": 128,
            "max_value": 2048.0,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 2e5, "seq_per_step": 16},
            **(schedule or {}),
        },
        **changes,
    }
    return {"enabled": switches[2], "data_routing": {"enabled": switches[1], "random_ltd": section}}


def test_random_ltd_is_read_beside_a_curriculum_and_without_one():
    for more in ({}, by_length()):
        settings = read({"data_efficiency": {**more, **routed()}})
        found = settings.random_ltd
        assert found.schedule == TokenSchedule(shortest=128, longest=2048, steps=200_000, multiple=16)
        assert (found.layers, found.of_layers, found.mask, found.seq_first) == ((1, 2, 22), 24, "mask", True)
        assert (settings.curriculum is None) == (not more)
        assert not settings.report.of(Verdict.OFF, Verdict.UNSUPPORTED)
    least = routed()
    for name in ("total_layer_num", "random_ltd_layer_num", "model_mask_name", "hidden_state_order"):
        del least["data_routing"]["random_ltd"][name]
    found = read({"data_efficiency": least}).random_ltd
    assert (found.of_layers, found.mask, found.seq_first) == (None, None, False)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_random_ltd_is_off_where_one_of_its_three_switches_is(place):
    switches = [True] * 3
    switches[place] = False
    settings = read({"data_efficiency": {**by_length(), **routed(switches)}})
    assert settings.random_ltd is None
    assert (settings.curriculum is None) == (place == 2)
    beside = [line for line in settings.report.lines if "data_routing" in line.key]
    assert {line.verdict for line in beside} == {Verdict.OFF}


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (routed(random_ltd_layer_id=None), "needs random_ltd_layer_id"),
        (routed(schedule={"schedule_config": {"require_steps": 5}}), "schedule_config.seq_per_step"),
        (routed(random_ltd_layer_num=2), "random_ltd_layer_id names 3 layers"),
        (routed(random_ltd_layer_id="1, 2"), "expected a list of numbers"),
        (routed(schedule={"schedule_type": "fixed_root"}), "expected 'fixed_linear'"),
        (routed(schedule={"min_value": 4096}), "shortest=4096 is above longest=2048"),
        (routed(hidden_state_order="dim_seq"), "expected 'batch_seq_dim' or 'seq_batch_dim'"),
        (routed(layer_token_lr_schedule={"enabled": True}), "DeepSpeed has not made it either"),
        (routed(random_ltd_layers=[1]), "unknown; did you mean"),
    ],
)
def test_random_ltd_that_does_not_fit_is_refused_by_name(section, says):
    with pytest.raises(ConfigError) as error:
        read({"data_efficiency": section})
    assert says in str(error.value)


def test_whole_numbers_of_a_curriculum_may_be_written_as_floats():
    config = {"total_curriculum_step": 1e4, "root_degree": 2.0, "difficulty_step": 8.0}
    lengths = read({"data_efficiency": by_length(schedule_type="fixed_root", schedule_config=config)})
    assert (lengths.curriculum.steps, lengths.curriculum.multiple) == (10_000, 8)
    discrete = {"difficulty": [64.0, 128], "max_step": [1e2]}
    lengths = read({"data_efficiency": by_length(schedule_type="fixed_discrete", schedule_config=discrete)})
    assert (lengths.curriculum.at(100), lengths.curriculum.at(101)) == (64, 128)
    with pytest.raises(ConfigError, match="expected a whole number"):
        read({"data_efficiency": by_length(schedule_config={"total_curriculum_step": 10.5})})


def test_ranks_that_share_a_sequence_count_as_one_in_the_relation_of_batches():
    file = {"train_batch_size": 16, "gradient_accumulation_steps": 2, "sequence_parallel_size": 4}
    settings = read(file, world_size=8)
    assert (settings.batches.micro, settings.batches.ranks) == (4, 2)
    assert settings.config.sequence_parallel == 4
    with pytest.raises(ConfigError, match="6 ranks cannot be divided into sequences"):
        read(file, world_size=6)


def test_ranks_that_divide_experts_are_read_where_they_are_switched_on():
    section = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
    assert read({"train_batch_size": 16, "expert_parallel": section}).config.expert_parallel == 2
    off = {**section, "enabled": False}
    assert read({"train_batch_size": 16, "expert_parallel": off}).config.expert_parallel == 1
    with pytest.raises(ConfigError, match=r"expert_parallel.*above 0"):
        read({"train_batch_size": 16, "expert_parallel": {**section, "autoep_size": 0}})


SPARSE = {
    "mode": "fixed",
    "block": 16,
    "different_layout_per_head": True,
    "num_local_blocks": 4.0,
    "num_global_blocks": 1,
    "attention": "bidirectional",
    "horizontal_global_attention": False,
    "num_different_global_patterns": 4,
}
"""As DeepSpeed's page has it."""


def test_sparse_attention_is_read_with_the_files_own_defaults():
    settings = read({"sparse_attention": SPARSE})
    assert settings.sparsity == AskedSparsity("fixed", {k: v for k, v in SPARSE.items() if k != "mode"})
    assert not settings.report.of(Verdict.OFF, Verdict.UNSUPPORTED)
    found = read({"sparse_attention": {"mode": "bigbird", "block": 32}}).sparsity
    assert found == AskedSparsity("bigbird", {"block": 32, "num_random_blocks": 0})
    assert read({"sparse_attention": {"block": 8}}).sparsity.mode == "fixed"
    for nothing in (None, {}):
        assert read({"sparse_attention": nothing}).sparsity is None


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"mode": "longformer"}, "expected one of 'dense', 'fixed'"),
        ({**SPARSE, "num_local_block": 2}, "unknown; did you mean sparse_attention.num_local_blocks"),
        ({**SPARSE, "block": "16"}, "sparse_attention.block='16': expected a whole number"),
    ],
)
def test_sparse_attention_that_does_not_fit_is_refused_by_name(section, says):
    with pytest.raises(ConfigError) as error:
        read({"sparse_attention": section})
    assert says in str(error.value)

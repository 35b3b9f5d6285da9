"""What the comparisons run, and what they conclude. Faked: the measurements; no contestant runs."""

from dataclasses import replace

import pytest
import torch

from infinity.bench import compare, memory, runs
from infinity.bench.runs import Environment, Measured
from infinity.bench.targets import Target

RUN = Measured(
    parameters=1000,
    seconds=1.0,
    forward_s=0.2,
    backward_s=0.3,
    step_s=0.5,
    read_per_parameter=12.0,
    written_per_parameter=14.0,
    device_per_parameter=30.0,
    peak_nbytes=1 << 20,
    build_peak_nbytes=1 << 10,
    train_peak_nbytes=1 << 20,
    baseline_nbytes=0,
    build_s=0.0,
    loss=9.0,
    all_seconds=[],
    all_losses=[],
    load=0.0,
    engine={},
    versions={},
)
ROW = memory.Row(
    model="350m",
    update="backward",
    parameters=1000,
    peak_nbytes=5000,
    build_peak_nbytes=0,
    host_nbytes=100,
    blocks_nbytes=200,
    plain_nbytes=300,
    bytes_per_parameter=26.0,
)


EVERY = compare.contestants("269m", "512MiB")


def names(only=(), *, rival=True):
    return [one.name for one in compare.chosen(EVERY, only, rival=rival)]


def test_ratios_pair_the_runs_of_one_round():
    found = {
        "rival": [RUN, replace(RUN, seconds=6.0)],
        "ours": [replace(RUN, seconds=0.5), replace(RUN, seconds=2.0)],
    }
    assert compare.ratios(found, "rival") == {"ours": [2.0, 3.0]}
    assert compare.ratios(found, "nobody") == {}


def test_a_verdict_takes_the_median_of_the_rounds_and_its_own_limit_for_met():
    assert Target("≥", 1.4, "as fast").verdict([9.0, 1.0, 1.4]) == "≥ 1.4 as fast: 1.40 ✓"
    assert Target("≥", 1.4, "as fast").verdict([9.0, 1.0, 1.3]) == "≥ 1.4 as fast: 1.30 ✗"
    assert Target("≤", 1.05, "as long").verdict([1.05]) == "≤ 1.05 as long: 1.05 ✓"
    assert Target("≤", 1.05, "as long").verdict([1.06]) == "≤ 1.05 as long: 1.06 ✗"
    assert Target("≥", 4, "as fast").verdict([]) == "≥ 4 as fast: not measured"


def test_verdicts_hold_each_contestant_against_its_own_rival():
    seconds = {
        compare.RIVAL: 5.0,
        "Infinity, 512MiB, backward": 2.5,
        "Infinity, 512MiB, int8 state": 2.0,
        compare.EQUAL: 1.1,
        compare.RESIDENT: 1.05,
        compare.PLAIN: 1.0,
        compare.KERNELS: 0.7,
    }
    lines = compare.verdicts({name: [replace(RUN, seconds=each)] for name, each in seconds.items()}, "512MiB")
    assert [line.rpartition(": ")[2] for line in lines] == ["2.00 ✓", "2.50 ✓", "4.55 ✓", "1.10 ✓", "1.50 ✗"]


def test_verdicts_name_what_was_not_run():
    assert {line.rpartition(": ")[2] for line in compare.verdicts({compare.PLAIN: [RUN]}, "512MiB")} == {
        "not measured"
    }


def test_a_contestant_is_chosen_by_part_of_its_name_in_any_case():
    assert names(["INT8", "same kernels"]) == ["Infinity, 512MiB, int8 state", compare.KERNELS]


def test_without_deepspeed_all_run_that_can_do_without():
    assert names(rival=False) == [name for name in names() if name not in (compare.RIVAL, compare.EQUAL)]
    assert names()[0] == compare.RIVAL  # the budget of another is what it took


@pytest.mark.parametrize(
    ("only", "rival", "complaint"),
    [
        (["nobody"], True, "'nobody' is in no contestant's name.*plain PyTorch, same kernels"),
        (["NVMe"], False, "--deepspeed-venv"),
        (["DeepSpeed's"], True, 'add "DeepSpeed NVMe" to --only'),
    ],
)
def test_a_choice_that_cannot_run_says_what_is_missing(only, rival, complaint):
    with pytest.raises(SystemExit, match=complaint):
        names(only, rival=rival)


def test_only_moments_that_are_not_exact_are_named_to_the_contestant():
    assert [one.settings.get("state_dtype") for one in EVERY if one.kind == "infinity"] == [
        None,
        None,
        "bf16",
        "int8",
        None,
        None,
    ]


def test_everything_resident_has_a_budget_for_all_state_and_gradients():
    settings = next(one.settings for one in EVERY if one.name == compare.RESIDENT)
    assert settings["host_memory"] > 16 * runs.parameter_count("269m")


def test_the_table_is_against_deepspeed_or_else_plain_pytorch():
    assert compare.base_of({compare.PLAIN: [RUN], compare.RIVAL: [RUN]}) == compare.RIVAL
    assert compare.base_of({compare.KERNELS: [RUN], compare.PLAIN: [RUN]}) == compare.PLAIN
    assert compare.base_of({compare.KERNELS: [RUN], compare.BOUND: [RUN]}) == compare.KERNELS


@pytest.mark.parametrize("shape", runs.SHAPES)
def test_parameters_are_counted_without_building_the_model(shape):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.LlamaConfig(**runs.SHAPES[shape])
        config.num_key_value_heads = config.num_attention_heads
        model = transformers.LlamaForCausalLM(config)
    assert runs.parameter_count(shape) == sum(parameter.numel() for parameter in model.parameters())


def test_buffers_of_deepspeed_hold_the_largest_parameter_and_leave_its_settings_alone():
    settings = compare.deepspeed_settings("269m")
    assert settings["zero_optimization"]["offload_param"]["buffer_size"] >= 8192 * 1024
    assert "buffer_size" not in compare.DEEPSPEED["zero_optimization"]["offload_param"]


def test_growth_counts_only_what_the_bound_does_not_explain():
    large = replace(ROW, parameters=3000, peak_nbytes=7000, blocks_nbytes=1200, plain_nbytes=400)
    assert memory.growth(ROW, large) == pytest.approx({"in_all": 1.0, "beyond_terms": 0.45})


def test_a_bound_is_the_sum_of_its_terms():
    assert ROW.bound_nbytes == 100 + 200 + 300 + memory.ALLOWANCE


def test_an_environment_without_deepspeed_is_named_with_what_to_install(tmp_path):
    with pytest.raises(SystemExit, match=r"cannot import deepspeed.*pip install"):
        compare.check_rival(Environment.of_venv(tmp_path))

"""What the comparisons conclude from what they measured. Faked: the measurements; no contestant runs."""

from dataclasses import replace

import pytest

from infinity.bench import compare, memory
from infinity.bench.runs import Environment, Measured

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


def test_ratios_pair_the_runs_of_one_round():
    found = {
        "rival": [RUN, replace(RUN, seconds=6.0)],
        "ours": [replace(RUN, seconds=0.5), replace(RUN, seconds=2.0)],
    }
    assert compare.ratios(found, "rival") == {"ours": [2.0, 3.0]}


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

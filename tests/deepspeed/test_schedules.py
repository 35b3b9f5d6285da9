"""DeepSpeed's schedules give DeepSpeed's rates. Trusted: the table, printed by DeepSpeed 0.19.8."""

import pytest
import torch

from infinity import ConfigError
from infinity.deepspeed.schedules import make_schedule

TABLE = {
    "warm-up, log": (
        "WarmupLR",
        {"warmup_min_lr": 0.0001, "warmup_max_lr": 0.01, "warmup_num_steps": 5},
        [
            *(0.0001, 0.0001, 0.00436369792493, 0.00685780132541, 0.00862739584985, 0.01, 0.01, 0.01),
            *(0.01, 0.01, 0.01, 0.01),
        ],
    ),
    "warm-up to the groups' rates": (
        "WarmupLR",
        {"warmup_num_steps": 4, "warmup_type": "linear"},
        [0.0, 0.0, 0.00075, 0.0015, 0.00225, 0.003, 0.003, 0.003, 0.003, 0.003, 0.003, 0.003],
    ),
    "decay, a rate per group": (
        "WarmupDecayLR",
        {"total_num_steps": 10, "warmup_num_steps": 3, "warmup_max_lr": [0.01, 0.02]},
        [
            *(0.0, 0.0, 0.0126185950714, 0.02, 0.02, 0.0171428571429, 0.0142857142857, 0.0114285714286),
            *(0.00857142857143, 0.00571428571429, 0.00285714285714, 0.0),
        ],
    ),
    "decay, linear": (
        "WarmupDecayLR",
        {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_type": "linear", "warmup_min_lr": 0.001},
        [0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001],
    ),
    "cosine": (
        "WarmupCosineLR",
        {"total_num_steps": 10, "warmup_num_steps": 3},
        [
            *(0.0, 0.0, 0.00189278926071, 0.003, 0.00285146815652, 0.00243529117932, 0.00183389802279),
            *(0.00116640197721, 0.000565008820682, 0.000148831843477, 3e-07, 3e-07),
        ],
    ),
    "cosine, linear": (
        "WarmupCosineLR",
        {
            "total_num_steps": 10,
            "warmup_num_steps": 4,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.05,
            "warmup_type": "linear",
        },
        [
            *(0.0, 0.0003, 0.000975, 0.00165, 0.002325, 0.00280908620039, 0.0022875, 0.001575, 0.0008625),
            *(0.000340913799607, 0.00015, 0.00015),
        ],
    ),
    "one cycle": (
        "OneCycle",
        {
            "cycle_min_lr": 0.001,
            "cycle_max_lr": 0.01,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 4,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.1,
        },
        [
            *(0.001, 0.004, 0.007, 0.01, 0.00775, 0.0055, 0.00325, 0.001, 0.0008, 0.000666666666667),
            *(0.000571428571429, 0.0005),
        ],
    ),
    "one cycle in stairs": (
        "OneCycle",
        {
            "cycle_min_lr": 0.001,
            "cycle_max_lr": 0.01,
            "cycle_first_step_size": 6,
            "cycle_first_stair_count": 2,
            "cycle_second_stair_count": 3,
            "cycle_momentum": False,
        },
        [0.001, 0.001, 0.001, 0.0055, 0.0055, 0.0055, 0.01, 0.007, 0.007, 0.004, 0.004, 0.001],
    ),
    "range test": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0},
        [
            *(0.001, 0.00166666666667, 0.00233333333333, 0.003, 0.00366666666667, 0.00433333333333),
            *(0.005, 0.00566666666667, 0.00633333333333, 0.007, 0.00766666666667, 0.00833333333333),
        ],
    ),
    "range test in stairs": (
        "LRRangeTest",
        {"lr_range_test_step_size": 3, "lr_range_test_staircase": True},
        [0.001, 0.001, 0.001, 0.002, 0.002, 0.002, 0.003, 0.003, 0.003, 0.004, 0.004, 0.004],
    ),
}
"""What is made, and the rates of the second param group, whose rate is 3e-3, at the first twelve updates."""
BETA1 = [0.8, 0.866666666667, 0.833333333333, 0.8, 0.825, 0.85, 0.875, 0.9, 0.945, 0.99, 1.035, 1.08]


def optimizer():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1e-3, 3e-3)]
    return torch.optim.AdamW(groups)


def rates(schedule, count):
    """Return what each of `count` updates sees of the second group: rate, betas."""
    seen = []
    for _ in range(count):
        group = schedule.optimizer.param_groups[1]
        seen.append((group["lr"], *group["betas"]))
        schedule.optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize("case", TABLE)
def test_rates_are_deepspeeds(case):
    name, parameters, expected = TABLE[case]
    found = [lr for lr, _, _ in rates(make_schedule(name, parameters, optimizer()), 12)]
    assert found == pytest.approx(expected, rel=1e-11, abs=0)


def test_a_cycle_moves_beta1_the_other_way():
    name, parameters, _ = TABLE["one cycle"]
    found = rates(make_schedule(name, parameters, optimizer()), 12)
    assert [beta1 for _, beta1, _ in found] == pytest.approx(BETA1, rel=1e-11, abs=0)
    assert {beta2 for _, _, beta2 in found} == {0.99}


@pytest.mark.parametrize("case", TABLE)
def test_a_schedule_goes_on_where_it_was_saved(case):
    name, parameters, _ = TABLE[case]
    whole = rates(make_schedule(name, parameters, optimizer()), 14)
    first = make_schedule(name, parameters, optimizer())
    rates(first, 5)
    again = make_schedule(name, parameters, optimizer())
    again.optimizer.load_state_dict(first.optimizer.state_dict())
    again.load_state_dict(first.state_dict())
    assert again.get_last_lr() == first.get_last_lr()
    assert rates(again, 9) == whole[5:]


def test_a_value_per_group_has_to_be_one_for_each():
    with pytest.raises(ConfigError, match="warmup_max_lr has 3 values for 2 param groups"):
        make_schedule("WarmupLR", {"warmup_max_lr": [1.0, 1.0, 1.0]}, optimizer())

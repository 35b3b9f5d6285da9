"""What each block keeps within a budget. Trusted: arithmetic on blocks that are made up."""

import re
from dataclasses import asdict

import pytest

from infinity.errors import ConfigError
from infinity.planning.recomputation import (
    HOST,
    KEEP,
    NVME,
    ON_THE_WAY,
    RECOMPUTE,
    BlockMemory,
    InputTiers,
    StepMemory,
    combined,
    plan_activations,
)

NOWHERE = InputTiers()
EQUAL = [BlockMemory(10, 10, 100, 20, 1.0)] * 8


def step(blocks=EQUAL, shared=5, head=30, working=40):
    return StepMemory(tuple(blocks), shared, head, working)


def places(budget, tiers=NOWHERE, **of):
    return plan_activations(step(**of), budget, tiers).places


def test_the_peak_is_that_of_the_loss_or_of_one_blocks_backward():
    kept = step().peak_nbytes([KEEP] * 8)
    assert kept == 5 + 8 * 110 + 30 + 40
    recomputed = step().peak_nbytes([RECOMPUTE] * 8)
    assert recomputed == 5 + max(8 * 10 + 70, 7 * 10 + 10 + 100 + 20)
    assert step(working=500).peak_nbytes([RECOMPUTE] * 8) == 5 + 8 * 10 + 530


def test_blocks_that_are_kept_last_are_free_when_earlier_ones_are_recomputed():
    late = step().peak_nbytes([RECOMPUTE] * 7 + [KEEP])
    early = step().peak_nbytes([KEEP] + [RECOMPUTE] * 7)
    assert late < early


def test_equal_blocks_are_kept_from_the_last_one_whatever_the_clock_said():
    noisy = [BlockMemory(10, 10, 100, 20, seconds) for seconds in (5.0, 1.0, 1.2, 0.9, 1.1, 1.0, 1.0, 0.1)]
    chosen = places(600, blocks=noisy)
    kept = chosen.count(KEEP)
    assert 0 < kept < 8
    assert chosen == (RECOMPUTE,) * (8 - kept) + (KEEP,) * kept


def test_what_saves_most_time_for_a_byte_is_kept_first():
    blocks = [BlockMemory(10, 10, 100, 20, 1.0), BlockMemory(10, 10, 50, 20, 1.0)] * 4
    assert places(step(blocks).peak_nbytes([RECOMPUTE, KEEP] * 4), blocks=blocks) == (RECOMPUTE, KEEP) * 4


def test_a_larger_budget_keeps_all_that_a_smaller_one_keeps_and_recomputes_for_no_longer():
    blocks = [BlockMemory(10 + n % 3, 10, 60 + 40 * (n % 4), 20 + n, 1.0 + n % 5) for n in range(12)]
    measured = step(blocks)
    before, seconds = set(), float("inf")
    least = measured.peak_nbytes([RECOMPUTE] * 12)
    for budget in range(least, measured.peak_nbytes([KEEP] * 12) + 1, 7):
        plan = plan_activations(measured, budget, NOWHERE)
        kept = {number for number, place in enumerate(plan.places) if place == KEEP}
        assert before <= kept
        assert plan.recomputed_s <= seconds
        assert plan.peak_nbytes <= budget
        before, seconds = kept, plan.recomputed_s
    assert plan_activations(measured, 10**6, NOWHERE).recomputed_s == 0


def test_no_step_takes_longer_with_a_larger_budget_also_where_inputs_wait_elsewhere():
    blocks = [BlockMemory(60 + n % 3, 60, 60 + 40 * (n % 4), 20 + n, 1.0 + n % 5) for n in range(16)]
    measured, tiers, seconds = step(blocks), InputTiers(host_nbytes=200, nvme=True), []
    with pytest.raises(ConfigError) as refused:
        plan_activations(measured, 1, tiers)
    least = int(re.search(r"works is activation_memory=(\d+)", str(refused.value))[1])
    for budget in range(least, measured.peak_nbytes([KEEP] * 16) + 3, 3):
        plan = plan_activations(measured, budget, tiers)
        away_s = sum({HOST: 0.1, NVME: 0.5}.get(place, 0.0) for place in plan.places)
        assert plan.peak_nbytes <= budget
        seconds.append(plan.recomputed_s + away_s)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0 < sum(one.seconds for one in blocks) < seconds[0]


def test_the_ends_are_all_and_none():
    assert places(10**6) == (KEEP,) * 8
    assert places(step().peak_nbytes([RECOMPUTE] * 8)) == (RECOMPUTE,) * 8


def test_inputs_leave_only_where_they_do_not_fit_the_first_ones_first_host_memory_before_nvme():
    blocks = [BlockMemory(100, 100, 50, 20, 1.0)] * 10
    stays = step(blocks).peak_nbytes([RECOMPUTE] * 10)
    tiers = InputTiers(host_nbytes=250, nvme=True)
    assert places(stays, tiers, blocks=blocks) == (RECOMPUTE,) * 10
    chosen = places(stays - 150, tiers, blocks=blocks)
    assert chosen == (HOST, HOST) + (NVME,) * 3 + (RECOMPUTE,) * 5  # three are on their way
    plan = plan_activations(step(blocks), stays - 150, tiers)
    assert "2 of their inputs wait in host memory, 3 of their inputs wait on NVMe" in plan.reason


def test_inputs_that_cannot_leave_stay():
    blocks = [BlockMemory(100, 100 * (number % 2), 50, 20, 1.0) for number in range(12)]
    chosen = places(step(blocks).peak_nbytes([RECOMPUTE] * 12) - 100, InputTiers(nvme=True), blocks=blocks)
    assert set(chosen[::2]) == {RECOMPUTE}
    assert NVME in chosen[1::2]


@pytest.mark.parametrize("tiers", [NOWHERE, InputTiers(nvme=True), InputTiers(host_nbytes=1000)])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_too_small_a_budget_is_refused_with_the_smallest_that_works(tiers, count):
    measured = step([BlockMemory(100, 100, 50, 20, 1.0)] * count)
    with pytest.raises(ConfigError, match="activation_memory=10 B does not hold this batch") as error:
        plan_activations(measured, 10, tiers)
    least = int(str(error.value).split("The smallest that works is activation_memory=")[1].split(" ")[0])
    assert plan_activations(measured, least, tiers).peak_nbytes == least
    with pytest.raises(ConfigError):
        plan_activations(measured, least - 1, tiers)
    assert ("a folder on NVMe" in str(error.value)) == (not tiers.nvme)


def test_a_large_loss_is_named_with_its_cure():
    with pytest.raises(ConfigError, match="tile_loss_"):
        plan_activations(step(working=10**6), 1000, NOWHERE)


def test_while_inputs_are_on_their_way_three_are_counted():
    blocks = [BlockMemory(100, 100, 50, 20, 1.0)] * 10
    away = step(blocks).peak_nbytes([NVME] * 10)
    assert away == 5 + ON_THE_WAY * 100 + 100 + 50 + 20


def test_the_reason_says_what_one_more_would_take():
    plan = plan_activations(step(), 600, NOWHERE)
    one_more = list(plan.places)
    one_more[one_more.index(KEEP) - 1] = KEEP
    assert plan.reason.endswith(f"keeping one more would take {step().peak_nbytes(one_more)} B")
    assert f"{plan.places.count(KEEP)} of 8 blocks kept" in plan.reason


def test_of_several_ranks_the_largest_of_each_number_counts():
    one = StepMemory((BlockMemory(1, 1, 9, 2, 0.5),), 3, 4, 5)
    two = StepMemory((BlockMemory(2, 0, 8, 3, 0.25),), 1, 6, 2)
    assert combined([asdict(one), asdict(two)]) == StepMemory((BlockMemory(2, 1, 9, 3, 0.5),), 3, 6, 5)

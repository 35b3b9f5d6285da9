"""`infinity plan` of long sequences: budgets of activations, slices, ranks that share one. None is timed."""

from functools import partial

import pytest

import plan_calls
from infinity.errors import ConfigError
from plan_calls import rows_of

pytestmark = pytest.mark.usefixtures("unhurried")

ask = partial(plan_calls.ask, "check")
MACHINE = ["--model", "7b", "--gpu", "h100", "--host-memory", "400GiB", "--machine-memory", "500GiB"]
MACHINE += ["--nvme-space", "4TB", "--tokens", "1x1000000", "--sequence-parallel", "4", "--local-ranks", "4"]
BUDGET = ["--activation-memory", "40GiB", "--sequence-tiles", "auto", "--loss-tiles", "auto"]


def facts(tmp_path, *arguments):
    return rows_of(tmp_path, "check", *arguments)[0]["facts"]


def test_a_million_tokens_on_four_ranks_fit_by_a_budget_and_the_plan_says_where_they_wait(tmp_path):
    code, said = ask(*MACHINE, *BUDGET)
    assert code == 0
    for part in (
        "1 x 1,000,000 tokens on every 4 ranks",
        "within 40.0 GiB, MLPs in slices where the budget asks for it",
        "in host memory",
        "by their budget",
        "of their inputs wait in host memory",
        "longest sequence that fits",
    ):
        assert part in said
    found = facts(tmp_path, *MACHINE, *BUDGET)
    assert found["ranks"] == 4
    assert found["longest_sequence"] >= 1_000_000
    assert found["activations"]["peak_nbytes"] <= 40 << 30


def test_what_a_budget_does_not_hold_is_refused_with_the_smallest_that_works():
    code, said = ask(*MACHINE, "--activation-memory", "1GiB")
    assert code == 1
    assert "activation_memory=1.0 GiB does not hold this batch" in said
    assert "The smallest that works is activation_memory=" in said


def test_without_a_machine_the_longest_sequence_is_not_made_up():
    _, said = ask("--model", "1m", "--tokens", "1x4096", "--sequence-parallel", "4")
    assert "not known: give --machine-memory, or --gpu-memory" in said


def test_a_budget_that_holds_all_keeps_all_and_one_that_does_not_recomputes(tmp_path):
    machine = ["--model", "1m", "--tokens", "1x4096", "--host-memory", "64MiB", "--machine-memory", "8GiB"]
    kept = facts(tmp_path, *machine, "--activation-memory", "4GiB")["activations"]
    (tmp_path / "plan.json").unlink()
    recomputed = facts(tmp_path, *machine, "--activation-memory", "48MiB")["activations"]
    assert kept["inputs_nbytes"] == 0 < recomputed["inputs_nbytes"]
    assert recomputed["peak_nbytes"] <= 48 << 20 < kept["peak_nbytes"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--offload-activations", "host"], "activation_memory decides itself"),
        (["--batch-tile", "1"], "activation_memory decides itself"),
        (["--sequence-parallel", "3", "--ranks", "4"], "--sequence-parallel 3: it has to divide --ranks 4"),
        (["--sequence-parallel", "3"], "the sequences of 2048 tokens"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(arguments, says):
    with pytest.raises(ConfigError, match=says):
        ask("--model", "1m", "--activation-memory", "1GiB", *arguments)


def test_an_automatic_choice_needs_the_budget_that_it_goes_by():
    for arguments in (["--sequence-tiles", "auto"], ["--loss-tiles", "auto"]):
        with pytest.raises(ConfigError, match="--activation-memory"):
            ask("--model", "1m", *arguments)

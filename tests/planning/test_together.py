"""Which features of ranks go together: every pair, and the table that says so. Nothing is faked."""

import itertools
import types

import pytest

from infinity import Config, ConfigError
from infinity.planning.together import REFUSED, Feature, excluded, features_of, why_not
from places import ROOT

SETTINGS = {
    Feature.QUANTIZED_WEIGHTS: {"quantized_weights": "int8"},
    Feature.QUANTIZED_GRADIENTS: {"quantized_gradients": "int4"},
    Feature.ERROR_FEEDBACK: {"error_feedback": True, "quantized_gradients": "int4"},
    Feature.SECONDARY_SHARD: {"secondary_shard": "machine"},
    Feature.SHARED_MEMORY: {"shared_memory": True},
    Feature.EXPERT_PARALLEL: {"expert_parallel": 2},
    Feature.SEQUENCE_PARALLEL: {"sequence_parallel": 2},
    Feature.FP32: {"dtype": "fp32"},
    Feature.FP16: {"dtype": "fp16"},
    Feature.EARLY_STAGE: {"stage": 1},
    Feature.WHOLE_EXPERTS: {"experts": "whole"},
    Feature.BUCKETS: {"gather_bucket": 0},
}
"""Of the features that Config has: what asks for them, their own setting first."""
PAIRS = list(itertools.combinations(Feature, 2))
OF_CONFIG = [
    (one, other)
    for one, other in itertools.combinations(SETTINGS, 2)
    if all(SETTINGS[other].get(name, value) == value for name, value in SETTINGS[one].items())
]
"""Of them, pairs that one Config can ask for: it has one type."""


def refusal(one, other):
    return REFUSED.get((one, other)) or REFUSED.get((other, one))


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda one: one.name)
def test_every_pair_goes_together_or_is_refused_with_both_named_and_the_reason(one, other):
    used = {one: "the first=1", other: "the other=2"}
    why, said = refusal(one, other), why_not(used)
    if why is None:
        assert said is None
        assert excluded(one, used) is None
    else:
        assert said in (f"the first=1 with the other=2: {why}", f"the other=2 with the first=1: {why}")
        assert (excluded(one, used), excluded(other, used)) == ("the other=2", "the first=1")


@pytest.mark.parametrize(("one", "other"), OF_CONFIG, ids=lambda one: one.name)
def test_config_takes_the_pairs_that_go_together_and_refuses_the_others(one, other):
    fields = {**SETTINGS[one], **SETTINGS[other]}
    if refusal(one, other) is None:
        assert {one, other} <= features_of(Config(**fields)).keys()
        return
    with pytest.raises(ConfigError) as raised:
        Config(**fields)
    assert all(next(iter(SETTINGS[feature])) in str(raised.value) for feature in (one, other))
    assert refusal(one, other) in str(raised.value)


def test_a_config_that_asks_for_nothing_has_buckets_alone():
    assert features_of(Config()) == {Feature.BUCKETS: "gather_bucket='16MiB'"}
    assert Feature.SHARED_MEMORY not in features_of(Config(shared_memory=False))


def test_each_reason_says_what_to_do_or_is_of_an_optimizer_which_does():
    for (one, _), why in REFUSED.items():
        assert one is Feature.ONE_BIT or any(cure in why for cure in ("eave", "use ", "stage=3")), why


def test_features_are_told_in_the_words_of_a_program():
    given = types.SimpleNamespace(
        quantized_weights=None,
        quantized_gradients="int4",
        error_feedback=True,
        secondary_shard="machine",
        shared_memory=True,
        expert_parallel=4,
        sequence_parallel=1,
        gather_bucket=0,
        dtype="fp32",
        stage=2,
        experts="whole",
    )
    assert set(features_of(given).values()) == {
        "quantized_gradients='int4'",
        "error_feedback=True",
        "secondary_shard='machine'",
        "shared_memory=True",
        "expert_parallel=4",
        "gather_bucket=0",
        'dtype="fp32"',
        "stage=2",
        'experts="whole"',
    }


def test_the_table_in_the_docs_is_the_table():
    """A row for each pair that does not go together: both, and why."""
    text = (ROOT / "docs" / "ranks.md").read_text(encoding="utf-8")
    section = text.split("## What goes together\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    expected = [f"| {one.value} | {other.value} | {why} |" for (one, other), why in REFUSED.items()]
    assert [one for one in rows if not one.startswith("| ---")] == expected
    others = section.split("\n| ")[0]
    assert all(one.value in others or one in {*itertools.chain(*REFUSED)} for one in Feature)

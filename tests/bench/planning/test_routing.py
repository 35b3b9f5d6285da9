"""Traces of routing, and the policies beside which Infinity's placement is measured. Pure."""

import argparse
import itertools
import json

import pytest

from infinity.bench.planning import experts, recorded
from infinity.bench.planning.library_caches import cached_by
from infinity.bench.planning.routing import (
    POLICIES,
    TRACES,
    RoutingTrace,
    belady,
    compared,
    lfu,
    lru,
    ours,
    static,
)
from infinity.errors import ConfigError


def most_hits(uses, room, cache=frozenset()):
    """The hits of the best of all choices of what to give up."""
    if not uses:
        return 0
    used, *rest = uses
    there = cache | {used}
    choices = [there] if len(there) <= room else [there - {one} for one in there]
    return (used in cache) + max(most_hits(rest, room, one) for one in choices)


@pytest.mark.parametrize("name", ["LRU", "LFU", "static", "Infinity"])
def test_no_policy_has_more_hits_than_the_one_that_knows_the_future(name):
    for kind in TRACES:
        run = kind.run(1, 40, 12, 6)
        for room in (2, 5, 12):
            assert POLICIES[name](run, room).hits <= belady(run, room).hits


def test_beladys_hits_are_the_most_that_any_choice_gives():
    for seed in range(6):
        run = RoutingTrace("", 0.8).run(seed, 4, 5, 3)
        uses = list(itertools.chain.from_iterable(run))
        for room in (1, 2, 3):
            assert belady(run, room).hits == most_hits(uses, room)


def test_caches_keep_what_was_used_last_or_most():
    run = [[0], [0], [1], [2], [0], [2]]
    assert (lru(run, 2).hits, lfu(run, 2).hits) == (2, 3)
    assert static(run, 1).hits == 2
    assert lru(run, 2).moved == 4 + 2, "read on each miss, and written when given up"


def test_a_trace_has_the_skew_and_the_changes_that_it_states():
    even, skewed = (RoutingTrace("", skew).run(0, 50, 32, 8) for skew in (0.0, 2.0))
    assert sum(map(len, skewed)) < sum(map(len, even))
    changing = RoutingTrace("", 2.0, change_every=25).run(0, 50, 32, 8)
    assert len({max(step, key=step.count) for step in changing}) > 1
    assert changing == RoutingTrace("", 2.0, change_every=25).run(0, 50, 32, 8)


def test_placement_by_frequency_keeps_the_hot_experts_of_a_skewed_trace():
    run = RoutingTrace("", 2.0).run(3, 80, 32, 8)
    assert ours(run, 8).hit_rate > 0.8 * belady(run, 8).hit_rate
    (row,) = compared(run, [8])
    assert row["Infinity hits"] == ours(run, 8).hit_rate


@pytest.mark.parametrize("kind", TRACES, ids=lambda kind: kind.name)
def test_placement_has_about_the_hits_of_the_better_cache(kind):
    for room in (16, 32, 64):
        runs = [kind.run(seed, 240, 128, 32) for seed in (0, 1)]
        uses = sum(sum(map(len, run)) for run in runs)
        hits = {
            name: sum(POLICIES[name](run, room).hits for run in runs) for name in ("Infinity", "LRU", "LFU")
        }
        assert hits["Infinity"] > max(hits["LRU"], hits["LFU"]) - 0.02 * uses


def test_a_small_mixtral_moves_the_bytes_of_the_experts_it_uses(tmp_path):
    moved = experts.trained("slices", tmp_path, 2 << 20)
    assert moved["used"] < 0.1
    assert moved["bytes"] < 3
    options = argparse.Namespace(experts=16, tokens=4, steps=20, seeds=1)
    found = experts.findings_of(list(experts.simulated(options)), {"slices": moved}, options)
    assert len(found.rows) == 3 * len(TRACES) + 1
    assert 'experts="slices": a step uses' in found.verdicts[2]


def test_no_policy_that_does_not_know_what_is_drawn_has_more_hits_than_one_that_knows_the_odds():
    kind = RoutingTrace("", 1.2)
    run = kind.run(5, 400, 32, 8)
    for room in (4, 8, 16):
        bound = kind.most_hits(32, 8, room)
        assert all(policy(run, room).hit_rate < bound + 0.01 for policy in (lru, lfu, ours))
        assert belady(run, room).hit_rate > bound
    assert kind.most_hits(32, 8, 32) == 1


def test_libcachesims_caches_have_the_hits_of_ours():
    pytest.importorskip("libcachesim")
    run = RoutingTrace("", 1.2).run(0, 60, 64, 16)
    for room in (8, 32):
        assert cached_by("LRU", run, room) == lru(run, room)
        assert lru(run, room).hits < cached_by("Belady", run, room).hits <= belady(run, room).hits


def test_recorded_traces_are_read_as_they_were_written(tmp_path):
    run = [[0, 15, 255], [3], [7, 8]]
    assert recorded.unpacked(recorded.packed(run)) == run
    (tmp_path / "some.json").write_text(
        json.dumps({"rows": [{"trace": "text", "run": recorded.packed(run)}]})
    )
    rows = list(experts.of_recorded(tmp_path / "some.json"))
    assert [(row["trace"], row["room"]) for row in rows] == [("text", 1), ("text", 1), ("text", 3)]
    for row in ({"seconds": 1}, {"trace": "text", "run": 5}, {"trace": "text", "run": ""}):
        (tmp_path / "other.json").write_text(json.dumps({"rows": [row]}))
        with pytest.raises(ConfigError, match=r"other\.json.*recorded --json"):
            list(experts.of_recorded(tmp_path / "other.json"))

"""Traces of routing, and the policies beside which Infinity's placement is measured. Pure."""

import argparse
import itertools
import json
from functools import partial

import pytest

from infinity.bench.planning import experts, recorded
from infinity.bench.planning.caches import CACHES, followed
from infinity.bench.planning.library_caches import cached_by
from infinity.bench.planning.routing import (
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

ON_LINE = {"Infinity": ours, "LRU": lru, "LFU": lfu, **{name: partial(followed, name) for name in CACHES}}


def most_hits(uses, room, cache=frozenset()):
    """The hits of the best of all choices of what to give up."""
    if not uses:
        return 0
    used, *rest = uses
    there = cache | {used}
    choices = [there] if len(there) <= room else [there - {one} for one in there]
    return (used in cache) + max(most_hits(rest, room, one) for one in choices)


@pytest.mark.parametrize("name", [*ON_LINE, "static"])
def test_no_policy_has_more_hits_than_the_one_that_knows_the_future(name):
    policy = ON_LINE.get(name, static)
    for kind in TRACES:
        run = kind.run(1, 40, 12, 6)
        for room in (1, 2, 5, 12):
            assert policy(run, room).hits <= belady(run, room).hits


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


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_adapts_keeps_what_is_used_again_through_what_is_used_once(name):
    run = [*[[0, 1]] * 3, *([*range(5 * one, 5 * one + 5), 0, 1] for one in range(1, 20))]
    found = followed(name, run, 4)
    assert lru(run, 4).hits == 4
    assert found.hits > 20
    assert found.moved == 2 * (found.uses - found.hits) - 4


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_has_no_more_than_its_room(name):
    for seed, room in itertools.product(range(5), (1, 2, 3, 10, 40)):
        cache, there = CACHES[name](room), set()
        for one in itertools.chain.from_iterable(RoutingTrace("", 0.8).run(seed, 40, 40, 8)):
            assert not cache.use(one) or one in there
            there.add(one)
            assert len(cache) <= room


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
def test_placement_has_about_the_hits_of_the_best_cache(kind):
    for room in (16, 32, 64):
        runs = [kind.run(seed, 240, 128, 32) for seed in (0, 1)]
        uses = sum(sum(map(len, run)) for run in runs)
        hits = {name: sum(policy(run, room).hits for run in runs) for name, policy in ON_LINE.items()}
        assert hits["Infinity"] > max(hits.values()) - 0.02 * uses


def test_a_small_mixtral_moves_the_bytes_of_the_experts_it_uses(tmp_path):
    moved = experts.trained("slices", tmp_path, 2 << 20)
    assert moved["used"] < 0.1
    assert moved["bytes"] < 3
    options = argparse.Namespace(experts=16, tokens=4, steps=20, seeds=1)
    found = experts.findings_of(list(experts.simulated(options)), {"slices": moved}, options)
    assert len(found.rows) == 3 * len(TRACES) + 1
    assert "that can be learnt, in the mean: skewed, room 2: " in found.verdicts[2]
    assert 'experts="slices": a step uses' in found.verdicts[3]


def test_no_policy_that_does_not_know_what_is_drawn_has_more_hits_than_one_that_knows_the_odds():
    kind = RoutingTrace("", 1.2)
    run = kind.run(5, 400, 32, 8)
    for room in (4, 8, 16):
        bound = kind.most_hits(32, 8, room)
        assert all(policy(run, room).hit_rate < bound + 0.01 for policy in (lru, lfu, ours))
        assert belady(run, room).hit_rate > bound
    assert kind.most_hits(32, 8, 32) == 1


@pytest.mark.parametrize("change_every", [0, 50])
def test_no_policy_that_learns_how_popular_experts_are_has_more_hits_than_one_that_knows_of_each_change(
    change_every,
):
    kind = RoutingTrace("", 1.2, change_every=change_every)
    seeds = range(4)
    runs = [kind.run(seed, 150, 32, 8) for seed in seeds]
    for room in (4, 8, 16):
        bound = sum(kind.most_learnt(seed, 150, 32, 8, room) for seed in seeds)
        for policy in ON_LINE.values():
            assert sum(policy(run, room).hit_rate for run in runs) < bound + 0.02
        assert bound < len(seeds) * kind.most_hits(32, 8, room) + 0.02


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

"""Statistics: a snapshot of a real engine, and the difference of two."""

from dataclasses import fields

import pytest
import torch
from torch import nn

from infinity import AdamW, Init, stats
from infinity.stats import Stats, UnitStats

GROWING = {
    "units",
    "read_nbytes",
    "written_nbytes",
    "steps",
    "plans",
    "uses",
    "hits",
    "misses",
    "divergences",
} | {
    "stalls_s",
    "lane_s",
    "passes",
}


def snapshot(scale: int, **values: object) -> Stats:
    """A snapshot in which everything that grows is `scale` times what it is at 1."""
    given = {
        one.name: {"a": 3 * scale} if one.type.startswith("dict") else 2 * scale for one in fields(Stats)
    }
    given |= {"plan": f"plan {scale}", "io_engine": "fake"}
    given["units"] = (UnitStats("layer", 64, (("hi", "nvme"),), 5 * scale),)
    return Stats(**{**given, **values})


def test_what_grows_is_subtracted_and_what_holds_now_is_kept():
    later, earlier = snapshot(10), snapshot(1)
    done = later.since(earlier)
    for one in fields(Stats):
        now, difference = getattr(later, one.name), getattr(done, one.name)
        if one.name == "units":
            assert difference == (UnitStats("layer", 64, (("hi", "nvme"),), 45),)
        elif one.name in GROWING:
            assert difference == ({"a": 27} if isinstance(now, dict) else 18), one.name
        else:
            assert difference == now, one.name


def test_since_the_same_moment_nothing_has_happened():
    now = snapshot(3)
    done = now.since(now)
    assert (done.steps, done.stall_s, done.units[0].uses) == (0, 0, 0)


def test_a_cause_that_is_new_counts_from_zero():
    later = snapshot(1, stalls_s={"unit": 3.0, "slot": 1.0})
    done = later.since(snapshot(1, stalls_s={"unit": 2.0}))
    assert done.stalls_s == {"unit": 1.0, "slot": 1.0}
    assert done.stall_s == 2.0


def test_the_frequency_of_a_unit_is_its_uses_per_step():
    assert snapshot(1, steps=2).frequency == {"layer": 2.5}
    assert snapshot(1, steps=0).frequency == {"layer": 5}


@pytest.mark.disk
def test_a_step_of_a_real_engine_is_the_difference_of_two_snapshots(folder):
    with Init(nvme=str(folder), host_memory="1MiB"):
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    seen = []
    for _ in range(4):
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(stats(model))
    step = seen[3].since(seen[2])
    assert step.steps == 1
    assert step.uses == step.hits + step.misses == sum(unit.uses for unit in step.units) > 0
    assert set(step.frequency.values()) <= {1, 2}
    assert step.parameters == seen[3].parameters
    assert sum(step.passes.values()) > 0
    assert set(step.lane_s) >= {"read_wait", "work", "write_wait", "idle"}
    assert all(spent >= 0 for spent in [*step.lane_s.values(), *step.stalls_s.values()])

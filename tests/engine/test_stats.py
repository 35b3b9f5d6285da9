"""Statistics: a snapshot of a real engine, and the difference of two."""

from dataclasses import asdict, fields
from typing import NamedTuple

import pytest
import torch
from torch import nn

from infinity import AdamW, Init, stats
from infinity.engine.engine import engine_of_model
from infinity.engine.stats import Stats, UnitStats, predicted_step_s
from infinity.planning.bottleneck import Load
from parity import nothing_waits

GROWING = {
    *("units", "read_nbytes", "written_nbytes", "steps", "plans", "uses", "hits", "misses", "divergences"),
    *("stalls_s", "lane_s", "passes", "exchanged_nbytes", "shared_nbytes", "collectives"),
    *("placement_revisions", "rounds", "uploaded_nbytes", "downloaded_nbytes", "speculated"),
}


def snapshot(scale: int, **values: object) -> Stats:
    """A snapshot in which everything that grows is `scale` times what it is at 1."""
    given = {
        one.name: {"a": 3 * scale} if one.type.startswith("dict") else 2 * scale for one in fields(Stats)
    }
    given |= {"plan": f"plan {scale}", "io_engine": "fake", "placement_reason": f"reason {scale}"}
    given |= {"activations": f"kept {scale}", "memory_in_common": f"shared {scale}"}
    given["updates"] = f"turns {scale}"
    given["units"] = (UnitStats("layer", 64, (("hi", "nvme"),), 5 * scale, 1 / scale, 2 / scale),)
    return Stats(**{**given, **values})


def test_what_grows_is_subtracted_and_what_holds_now_is_kept():
    later, earlier = snapshot(10), snapshot(1)
    done = later.since(earlier)
    for one in fields(Stats):
        now, difference = getattr(later, one.name), getattr(done, one.name)
        if one.name == "units":
            assert difference == (UnitStats("layer", 64, (("hi", "nvme"),), 45, 0.1, 0.2),)
        elif one.name in GROWING:
            assert difference == ({"a": 27} if isinstance(now, dict) else 18), one.name
        else:
            assert difference == now, one.name


def test_where_a_device_has_memory_of_its_own_its_budget_and_the_link_are_printed():
    empty = {name: {} for name in ("read_nbytes", "written_nbytes", "stalls_s", "lane_s")}
    now = snapshot(1, device_budget_nbytes=4096, device_held_nbytes=2048, device_nbytes=1024, **empty)
    said = dict(now.rows())
    assert said["device_memory"] == "4.0 KiB, 2.0 KiB of it in use now, 1.0 KiB of units that live there"
    assert said["link moved"] == "to the device 2 B, from it 2 B"


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
    assert set(step.stalls_s) == {"read", "slot", "update", "gradients"}
    assert all(spent >= 0 for spent in [*step.lane_s.values(), *step.stalls_s.values()])


def layers(number):
    with Init(host_memory="16MiB"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(number)))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return stats(model)


def test_printed_it_is_about_ten_lines_for_a_model_of_any_size_and_has_all_of_it_all_the_same():
    few, many = layers(2), layers(60)
    for now in (few, many):
        lines = str(now).splitlines()
        assert len(lines) == 10
        assert max(map(len, lines)) <= 120
        assert repr(now) == str(now)
    said = dict(many.rows())
    assert said["parameters"] == f"{60 * 72:,} in 60 units"
    assert said["steps"] == "1"
    assert said["host_memory"].startswith("16.0 MiB, ")
    assert said["uses of units"].startswith(f"{many.hits} hits, ")
    assert [unit["name"] for unit in asdict(many)["units"]] == [str(number) for number in range(60)]
    assert "B59" in many.plan


def test_printed_it_says_what_moved_and_what_was_waited_for():
    now = snapshot(
        1,
        device_budget_nbytes=0,
        rounds=0,
        parameters=1000,
        steps=2,
        ranks=2,
        rank=1,
        read_nbytes={("nvme", "hi"): 10_000, ("host", "m"): 1},
        written_nbytes={("nvme", "hi"): 20_000},
        stalls_s={"read": 1.0, "slot": 2.5},
        lane_s={"read_wait": 4.0},
        exchanged_nbytes={"gather": 2048},
        shared_nbytes=3 << 20,
        collectives={"gather": 1000, "agree": 2},
        placement_reason="because " * 100,
    )
    said = dict(now.rows())
    assert said["steps"] == "2, rank 1 of 2"
    assert said["NVMe moved"] == "read 9.8 KiB, written 19.5 KiB; 30.0 B per parameter and step"
    assert said["computing waited"] == "3.5 s: slot 2.5 s, read 1.0 s"
    assert said["record lane"] == "read wait 4.0 s"
    assert said["ranks exchanged"] == "gather 2.0 KiB"
    assert said["collectives"] == "gather 1,000, agree 2"
    assert len(said["placement"]) <= 100
    assert said["activations"] == "kept 1"
    assert said["made ahead"] == "3 a"
    assert said["updates"] == "turns 1"
    assert said["in shared memory"] == "3.0 MiB of weights, not sent (shared 1)"
    assert len(str(now).splitlines()) == 17


def test_a_notebook_shows_a_table_of_the_same_rows():
    now = snapshot(1, read_nbytes={}, written_nbytes={}, io_engine="<fake>")
    table = now._repr_html_()
    assert table.count("<tr>") == len(now.rows())
    assert "&lt;fake&gt;" in table
    assert "<fake>" not in table


class Table(nn.Module):
    """An embedding of which a step touches a quarter, and a layer after it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(512, 64)
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, rows):
        return self.layer(self.table(rows))


def trained(steps, **init):
    with Init(**init):
        model = Table()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.arange(128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.disk
@pytest.mark.parametrize(("host_memory", "tier"), [("256KiB", "nvme"), ("64MiB", "host")])
def test_a_unit_says_where_its_record_lies(folder, host_memory, tier):
    model, _ = trained(3, nvme=str(folder), host_memory=host_memory)
    table = next(unit for unit in stats(model).units if unit.name == "table")
    assert {where for _, where in table.tiers} == {tier}


@pytest.mark.disk
def test_a_unit_that_is_used_and_updated_in_half_of_the_steps_is_expected_to_be(folder):
    with Init(nvme=str(folder), host_memory="256KiB"):
        model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    nothing_waits(model)  # forward and backward fetch
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for number in range(40):
        for layer in model if number % 2 else model[:1]:
            layer(torch.ones(1, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    always, half = stats(model).units
    assert always.updates_per_step == pytest.approx(1)
    assert half.updates_per_step == pytest.approx(0.5, abs=0.05)
    assert always.fetches_per_step == pytest.approx(2, abs=0.05)
    assert half.fetches_per_step == pytest.approx(1, abs=0.05)


class Disk(NamedTuple):
    read: float
    write: float
    mixed: float


def predicted(model, optimizer, disk, compute_s):
    """Train three more steps, and return what a step should take on such a disk."""
    lane = engine_of_model(model).lane
    lane.drain()
    before = stats(model)
    for _ in range(3):
        model(torch.arange(128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    lane.drain()
    done = stats(model).since(before)
    return predicted_step_s(engine_of_model(model), Load(compute_s, 0.0, 1.0, 1.0), done, disk)


@pytest.mark.disk
def test_a_step_on_a_slow_disk_is_predicted_from_the_bytes_that_the_plan_moves(folder):
    model, optimizer = trained(3, nvme=str(folder), host_memory="256KiB")
    moved = 2 * stats(model).nvme_nbytes  # in the forward, all of it is read and written
    assert moved > 0
    told = predicted(model, optimizer, Disk(1e6, 1e6, 1e6), 0.0)
    assert told == pytest.approx(moved / 1e6, rel=0.2)
    assert predicted(model, optimizer, Disk(1e12, 1e12, 1e12), 5.0) == pytest.approx(5.0, rel=0.1)


@pytest.mark.disk
def test_a_step_that_moves_nothing_is_predicted_to_compute(folder):
    model, optimizer = trained(4, nvme=str(folder), host_memory="64MiB")
    assert predicted(model, optimizer, Disk(1.0, 1.0, 1.0), 5.0) == pytest.approx(5.0, rel=0.1)


def test_nothing_is_predicted_before_there_is_a_plan():
    model, _ = trained(0, host_memory="16MiB")
    engine_of_model(model).residency.cursor.plan = None
    now = stats(model)
    disk = Disk(1.0, 1.0, 1.0)
    assert predicted_step_s(engine_of_model(model), Load(1.0, 0, 0, 0), now, disk) is None


@pytest.mark.disk
def test_the_placement_is_reported_with_its_reason(folder):
    model, _ = trained(2, nvme=str(folder), host_memory="64MiB")
    now, pins = stats(model), engine_of_model(model).pins
    assert (now.placement_revisions, now.placement_reason) == (1, pins.reason)
    assert "8 fields placed" in now.placement_reason
    assert now.since(now).placement_revisions == 0


def test_without_nvme_nothing_is_placed_anew():
    model, _ = trained(2, host_memory="16MiB")
    now = stats(model)
    assert (now.placement_revisions, now.placement_reason) == (0, "")

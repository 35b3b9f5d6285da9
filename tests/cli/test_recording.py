"""What `--timeline` and `--report` ask for: refusals, and contents. Fake: the engine, but for one test."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from infinity import AdamW, Init
from infinity.cli import recording
from infinity.cli.recording import Recording, memory_of
from infinity.engine.engine import engine_of_model
from infinity.engine.stats import Stats
from infinity.errors import ConfigError
from infinity.timeline import Timeline


@dataclass
class FakeEngine:
    timeline: Timeline = field(default_factory=Timeline)
    units: list = field(
        default_factory=lambda: [
            SimpleNamespace(resident_nbytes=10, residence=SimpleNamespace(processed=True)),
            SimpleNamespace(resident_nbytes=5, residence=SimpleNamespace(processed=False)),
        ]
    )
    budget = SimpleNamespace(slots=2, slot_nbytes=10)
    device = SimpleNamespace(is_host=True, room=None)
    kept = SimpleNamespace(held_nbytes=12)
    host_store = SimpleNamespace(held_nbytes=8)
    residency = SimpleNamespace(ahead_nbytes=5)
    outgoing_share = SimpleNamespace(held_nbytes=3)


def snapshot(read: int) -> Stats:
    now = {"parameters": 1, "nvme_nbytes": 100, "host_nbytes": 0, "budget_nbytes": 50, "io_engine": "none"}
    counts = dict.fromkeys(("steps", "plans", "uses", "hits", "misses", "divergences"), 0)
    nothing = {"stalls_s": {}, "lane_s": {}, "passes": {}, "units": (), "plan": ""}
    moved = {("nvme", "hi"): read, ("host", "hi"): 9 * read}
    return Stats(
        **now,
        budget_held_nbytes=40,
        read_nbytes=moved,
        written_nbytes={("nvme", "m"): 1},
        **counts,
        **nothing,
    )


def two_steps(asked: Recording, engine: FakeEngine) -> None:
    asked.start(engine)
    for number in range(3):
        asked.mark(float(number), snapshot(read=7 * number), process_nbytes=1000)
        engine.timeline.span("stall", "read", number + 0.5, number + 0.75)


@pytest.mark.parametrize(
    ("trace", "picture", "said"),
    [
        ("trace.txt", None, r"\.json"),
        ("trace", None, r"\.json"),
        (None, "report.pdf", r"\.png or \.html"),
        ("there.json", None, "never overwritten"),
        ("no/trace.json", None, "no folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, trace, picture, said):
    (tmp_path / "there.json").touch()
    names = [None if name is None else str(tmp_path / name) for name in (trace, picture)]
    with pytest.raises(ConfigError, match=said):
        Recording(*names)


def test_a_picture_without_matplotlib_is_refused_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(recording.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        Recording(None, str(tmp_path / "report.png"))
    Recording(str(tmp_path / "trace.json"), None)


def test_nothing_is_recorded_where_nothing_was_asked_for():
    asked, engine = Recording(None, None), FakeEngine()
    two_steps(asked, engine)
    assert (engine.timeline.spans, engine.timeline.samples) == ([], [])
    assert asked.write("title", []) == []


def test_the_trace_has_steps_lanes_and_memory_by_tier(tmp_path):
    path = tmp_path / "trace.json"
    asked = Recording(str(path), None)
    two_steps(asked, FakeEngine())
    (line,) = asked.write("title", [])
    assert str(path) in line
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["step 1", "step 2", *["read"] * 3]
    first = {
        event["name"]: event["args"]["bytes"] for event in events if event["ph"] == "C" and not event["ts"]
    }
    tiers = {"memory: device": 10, "memory: host": 40, "memory: nvme": 100, "memory: process": 1000}
    holders = {"slots": 20, "ahead": 5, "outgoing": 3, "gradients": 4, "pinned": 8}
    assert first == tiers | {f"host: {name}": nbytes for name, nbytes in holders.items()}


def test_memory_is_sampled_within_steps_too_until_all_is_written(tmp_path):
    asked, engine = Recording(str(tmp_path / "trace.json"), None), FakeEngine()
    asked.start(engine)
    asked.mark(0.0, snapshot(0), process_nbytes=1000)
    engine.residency = SimpleNamespace(ahead_nbytes=9)
    engine.timeline.span("compute", "layer", 0.25, 0.5)
    held = [one.values for one in engine.timeline.samples if one.name == "host"]
    assert [values["ahead"] for values in held] == [5, 9]
    asked.write("title", [])
    engine.timeline.recording = True
    engine.timeline.span("compute", "layer", 1e9, 1e9)
    assert len(engine.timeline.samples) == 5, "and three of the step's end"


@pytest.mark.disk
def test_the_samples_of_a_real_engine_add_up_to_what_it_says_it_holds(folder):
    with Init(nvme=str(folder), host_memory="1MiB"):
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = AdamW(model.parameters())
    engine = engine_of_model(model)
    for _ in range(3):
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.lane.drain()
        now = memory_of(engine)
        assert now["memory"]["host"] == sum(now["host"].values()) == engine.held_nbytes()
    assert now["host"]["pinned"] > 0


def test_the_report_is_drawn_from_the_bytes_of_each_step(tmp_path, monkeypatch):
    stories = []
    monkeypatch.setattr(recording, "save", lambda story, path: stories.append((story, path)))
    path = tmp_path / "report.html"
    asked = Recording(None, str(path))
    two_steps(asked, FakeEngine())
    asked.write("title", [("loss", "2.5")])
    ((story, where),) = stories
    assert (story.title, story.summary, story.budget_nbytes, where) == (
        "title",
        [("loss", "2.5")],
        50,
        Path(path),
    )
    assert story.moved == [{("read", "hi"): 7}] * 2


def test_after_writing_nothing_more_is_recorded(tmp_path):
    asked, engine = Recording(str(tmp_path / "trace.json"), None), FakeEngine()
    two_steps(asked, engine)
    asked.write("title", [])
    engine.timeline.span("work", "late", 0, 1)
    assert "late" not in {span.name for span in engine.timeline.spans}


def test_spans_that_were_dropped_are_told(tmp_path):
    asked, engine = Recording(str(tmp_path / "trace.json"), None), FakeEngine(Timeline(limit=2))
    two_steps(asked, engine)
    assert "dropped" in asked.write("title", [])[-1]

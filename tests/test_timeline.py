"""The timeline: what is kept, how it adds up, and the trace that is written of it. Pure but for one file."""

import itertools
import json
import random
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity import timeline as timelines
from infinity.timeline import Span, Timeline, busy_s, lanes_of, rows, trace_events, write_chrome_trace


def recorded(*spans: tuple, limit: int = 100) -> Timeline:
    timeline = Timeline(limit)
    timeline.recording = True
    for span in spans:
        timeline.span(*span)
    return timeline


def of_lane(timeline: Timeline, lane: str) -> list[Span]:
    return [one for one in timeline.spans if one.lane == lane]


def events(timeline: Timeline, ph: str) -> list[dict]:
    return [event for event in trace_events(timeline) if event["ph"] == ph]


def rows_named(timeline: Timeline) -> dict[int, str]:
    named = [event for event in events(timeline, "M") if event["name"] == "thread_name"]
    return {event["tid"]: event["args"]["name"] for event in named}


spans = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 20)).map(
        lambda at: Span("read", "x", float(at[0]), float(at[0] + at[1]))
    ),
    max_size=30,
)


def test_nothing_is_kept_unless_it_records():
    timeline = Timeline()
    timeline.span("read", "layer", 0.0, 1.0)
    timeline.sample("memory", 0.0, {"host": 1})
    timeline.mark_step(0.0)
    timeline.mark_step(1.0)
    assert (timeline.spans, timeline.samples, timeline.steps) == ([], [], [])


def test_the_newest_spans_are_kept_and_the_dropped_are_counted(tmp_path):
    timeline = recorded(*(("work", str(number), number, number + 1) for number in range(7)), limit=3)
    assert [span.name for span in timeline.spans] == ["4", "5", "6"]
    assert timeline.dropped == 4
    write_chrome_trace(timeline, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {"dropped": 4}


def test_threads_add_at_the_same_time_and_nothing_is_lost():
    timeline = Timeline(limit=1500)
    timeline.recording = True

    def add() -> None:
        for at in range(500):
            timeline.span("read", "x", at, at + 1)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.spans) == 1500
    assert timeline.dropped <= 500, "two threads at the limit may go uncounted, never the reverse"


def test_it_can_be_read_while_threads_go_on_adding():
    timeline = recorded(*(("stall", "read", at, at + 1) for at in range(20_000)), limit=20_000)
    ended = threading.Event()

    def add() -> None:
        while not ended.is_set():
            timeline.span("stall", "read", 0, 1)

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(20):
            assert busy_s(of_lane(timeline, "stall"), 0, 1) == 1
    finally:
        ended.set()
        thread.join()


def test_samples_are_taken_as_uses_and_waits_end_and_not_of_what_other_threads_do():
    timeline, looks = recorded(), iter(range(100))
    timeline.sample_with(lambda: {"memory": {"host": next(looks)}, "host": {"slots": 1}})
    far = itertools.count(1e9, 1e6)  # a clock so far ahead that enough time has always passed
    for lane in ("compute", "stall", "read", "write", "work"):
        timeline.span(lane, "x", 0.0, next(far))
    assert [(one.name, *one.values.values()) for one in timeline.samples] == [
        ("memory", 0),
        ("host", 1),
        ("memory", 1),
        ("host", 1),
    ]
    timeline.sample_with(None)
    timeline.span("compute", "x", 0.0, next(far))
    assert len(timeline.samples) == 4


def test_samples_take_a_small_part_of_the_time_however_many_spans_end(monkeypatch):
    timeline, cost_s, now = recorded(limit=100_000), 0.25, [1000.0]
    monkeypatch.setattr(timelines, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def look() -> dict[str, dict[str, int]]:
        now[0] += cost_s
        return {"memory": {"host": 1}}

    timeline.sample_with(look)
    timeline.span("compute", "x", now[0], now[0])
    next_s = now[0] + 50 * cost_s
    for moment in (now[0], next_s - cost_s):
        timeline.span("compute", "x", moment, moment)
    assert len(timeline.samples) == 1
    timeline.span("compute", "x", next_s, next_s)
    assert len(timeline.samples) == 2


def test_steps_lie_between_marks():
    timeline = recorded()
    for when_s in (1.0, 2.5, 3.0):
        timeline.mark_step(when_s)
    assert timeline.steps == [(1.0, 2.5), (2.5, 3.0)]


def test_overlapping_spans_are_busy_once():
    timeline = recorded(("read", "a", 0, 4), ("read", "b", 1, 2), ("read", "c", 3, 6), ("read", "d", 8, 9))
    timeline.span("write", "e", 0, 100)
    assert busy_s(of_lane(timeline, "read"), 0, 100) == 7
    assert busy_s(of_lane(timeline, "read"), 5, 8.5) == 1.5
    assert busy_s(of_lane(timeline, "work"), 0, 100) == 0


@given(spans, st.integers(0, 60), st.integers(0, 60))
def test_busy_time_is_that_of_the_moments_covered(spans, since, length):
    until = since + length
    covered = sum(
        any(span.began_s <= at and at + 1 <= span.ended_s for span in spans) for at in range(since, until)
    )
    assert busy_s(spans, since, until) == covered


@given(spans)
def test_rows_hold_every_span_and_no_overlap_in_no_more_rows_than_needed(spans):
    filled = rows(spans)
    assert sorted(span for row in filled for span in row) == sorted(spans)
    for row in filled:
        assert all(before.ended_s <= after.began_s for before, after in pairwise(row))
    deepest = max((sum(s.began_s <= at < s.ended_s for s in spans) for at in range(80)), default=0)
    assert len(filled) == deepest


def test_known_lanes_come_first():
    assert lanes_of([Span(lane, "", 0, 1) for lane in ("copy", "write", "stall", "copy")]) == [
        "stall",
        "write",
        "copy",
    ]


def test_the_trace_has_a_row_for_each_overlap_and_microseconds_from_the_start():
    timeline = recorded(("read", "a", 10, 12, 100), ("read", "b", 11, 13, 50), ("compute", "c", 10.5, 11))
    spans = {event["name"]: event for event in events(timeline, "X")}
    names = rows_named(timeline)
    assert {name: names[event["tid"]] for name, event in spans.items()} == {
        "a": "read 1",
        "b": "read 2",
        "c": "compute",
    }
    assert (spans["b"]["ts"], spans["b"]["dur"], spans["b"]["args"]) == (1e6, 2e6, {"bytes": 50})


def test_the_trace_counts_bytes_in_flight_and_memory():
    timeline = recorded(("read", "a", 0, 2, 100), ("read", "b", 1, 3, 50))
    timeline.sample("memory", 1.5, {"host": 7, "device": 8})
    counters = [(event["name"], event["ts"], event["args"]["bytes"]) for event in events(timeline, "C")]
    assert counters == [
        ("bytes in flight: read", 0, 100),
        ("bytes in flight: read", 1e6, 150),
        ("bytes in flight: read", 2e6, 50),
        ("bytes in flight: read", 3e6, 0),
        ("memory: host", 1.5e6, 7),
        ("memory: device", 1.5e6, 8),
    ]


def test_steps_have_a_row_of_their_own():
    timeline = recorded(("work", "a", 0, 1))
    timeline.mark_step(0)
    timeline.mark_step(2)
    (step,) = [event for event in events(timeline, "X") if event["cat"] == "steps"]
    assert (step["name"], step["dur"]) == ("step 1", 2e6)
    assert rows_named(timeline)[step["tid"]] == "steps"


moments = st.floats(0, 1e4, allow_nan=False)


@given(st.lists(st.tuples(st.sampled_from(["read", "compute"]), moments, moments), max_size=30), moments)
def test_the_trace_is_one_that_chrome_and_perfetto_take(lasting, start):
    """Trusted: the fields that the format asks for, as its description has them."""
    timeline = recorded()
    timeline.mark_step(start)
    for lane, *both in lasting:
        began, ended = sorted(both)
        timeline.span(lane, "x", start + began, start + ended, nbytes=8)
        timeline.span(lane, "next", start + ended, start + ended + 1e-6, nbytes=8)
    timeline.sample("memory", start, {"host": 1})
    timeline.mark_step(start + 1e4)
    named, ends = {}, {}
    for event in sorted(json.loads(json.dumps(list(trace_events(timeline)))), key=lambda e: e.get("ts", -1)):
        assert type(event["pid"]) is int
        assert event["pid"] > 0
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                named[event["tid"]] = event["args"]["name"]
            continue
        assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())
            continue
        assert (event["ph"], type(event["name"]), type(event["cat"])) == ("X", str, str)
        assert event["tid"] in named
        began_ns, ended_ns = int(event["ts"] * 1000), int(event["ts"] * 1000) + int(event["dur"] * 1000)
        assert ended_ns >= began_ns >= ends.get(event["tid"], 0), "spans of a row follow each other"
        ends[event["tid"]] = ended_ns
    assert len(set(named.values())) == len(named), "no two rows have one name"


def test_spans_that_follow_each_other_do_so_in_the_nanoseconds_of_a_reader(seed):
    ends = list(itertools.accumulate(random.expovariate(1e3) for _ in range(2000)))
    timeline = recorded(*(("work", "x", *pair) for pair in pairwise(ends)), limit=3000)
    read = [(int(one["ts"] * 1000), int(one["dur"] * 1000)) for one in events(timeline, "X")]
    assert len({event["tid"] for event in events(timeline, "X")}) == 1
    assert all(before[0] + before[1] == after[0] for before, after in pairwise(read))


def test_a_number_that_has_not_changed_is_written_once():
    timeline = recorded()
    for when_s, nbytes in enumerate((5, 5, 5, 6, 5)):
        timeline.sample("memory", when_s, {"host": nbytes})
    assert [(event["ts"], event["args"]["bytes"]) for event in events(timeline, "C")] == [
        (0, 5),
        (3e6, 6),
        (4e6, 5),
    ]


def test_within_steps_the_newest_samples_are_kept_and_those_of_steps_all():
    timeline, looks = recorded(limit=100), iter(range(100))
    timeline.sample_with(lambda: {"memory": {"host": next(looks)}})
    timeline.sample("memory", 0.0, {"host": -1})
    for at in range(8):
        timeline.span("compute", "x", 0.0, 1e9 * (at + 1))
    assert [one.values["host"] for one in timeline.samples] == [-1, 3, 4, 5, 6, 7]
    assert timeline.dropped == 0


def test_an_empty_timeline_is_a_trace_too(tmp_path):
    write_chrome_trace(Timeline(), tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_the_trace_is_a_whole_json_file_that_nothing_overwrites(tmp_path):
    path = tmp_path / "trace.json"
    timeline = recorded(("work", "a", 0, 1))
    write_chrome_trace(timeline, path)
    assert json.loads(path.read_text())["traceEvents"] == list(trace_events(timeline))
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileExistsError, match=r"trace\.json"):
        write_chrome_trace(recorded(("work", "b", 0, 1)), path)
    assert json.loads(path.read_text())["traceEvents"] == list(trace_events(timeline))


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dumps", full)
    with pytest.raises(OSError, match="No space"):
        write_chrome_trace(recorded(("work", "a", 0, 1)), tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []

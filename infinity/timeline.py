"""A timeline: spans of time by lane, samples of memory, and where steps begin. Uses the stdlib alone.

[Note: lanes of a timeline]
"compute"   uses of units and phases of a step, on the thread that computes
"stall"     waits of that thread; a span's name is the cause ("read", "slot", "update", "gradients", …)
"read"      one span per transfer from storage, with its bytes; transfers overlap
"upload", "download"   one span per copy to an accelerator and from it, with its bytes
"write"     the same for transfers to storage
"work"      kernels that update or upload, on the lane's thread
"update"    queueing the updates of records that live on an accelerator, on the thread that computes
"gather"    assembling units from the ranks' shards, waits for other ranks included
"reduce"    summing gradients over the ranks, waits for other ranks included
Samples named "memory" hold bytes by tier ("device", "host", "nvme"); samples named "host" hold the bytes of
host_memory by their holder. Times are time.perf_counter() seconds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

LANES = ("compute", "stall", "work", "update", "read", "write", "upload", "download", "gather", "reduce")
"""The lanes of [Note: lanes of a timeline], in the order in which they are shown."""

SAMPLED_LANES = frozenset({"compute", "stall"})
"""Lanes of the thread that computes: the only thread that takes samples."""
_APART_S, _APART_TO_COST = 0.005, 50
"""The least distance of samples within a step: in seconds, and as a multiple of the time that one takes."""


class Span(NamedTuple):
    """Something that took time."""

    lane: str
    name: str
    began_s: float
    ended_s: float
    nbytes: int = 0
    """Bytes that it moved; 0 for a span that moves none."""


class Sample(NamedTuple):
    """Numbers at one moment."""

    name: str
    when_s: float
    values: Mapping[str, int]


class Timeline:
    """Spans and samples, kept only while `recording`. Any thread may add to it.

    It keeps the newest `limit` spans, of about 200 B each, and as many samples; dropped ones are counted.
    """

    def __init__(self, limit: int = 1_000_000) -> None:
        self.recording = False
        self.dropped = 0
        """Spans and samples that were dropped for newer ones."""
        self._spans: deque[Span] = deque(maxlen=limit)
        self._samples: deque[Sample] = deque(maxlen=limit)
        self._marks: deque[float] = deque(maxlen=limit)
        self._lock = threading.Lock()
        self._looks: deque[Sample] = deque(maxlen=max(1, limit // 20))
        self._look: Callable[[], Mapping[str, Mapping[str, int]]] | None = None
        self._next_look_s = 0.0

    def start(self) -> None:
        """Record from now on."""
        self.recording = True

    def stop(self) -> None:
        """Stop recording; what was recorded stays."""
        self.recording = False

    def sample_with(self, look: Callable[[], Mapping[str, Mapping[str, int]]] | None) -> None:
        """Take samples within steps from now on: `look` returns their values by name. None ends that.

        A sample is taken when the computing thread ends a use, a phase or a wait: every 5 ms at most, and in
        no more than a fiftieth of the time. The newest limit / 20 are kept.
        """
        self._look = look

    def span(self, lane: str, name: str, began_s: float, ended_s: float, nbytes: int = 0) -> None:
        """Add a span of `lane`; does nothing unless recording."""
        if self.recording:
            self._keep(self._spans, Span(lane, name, began_s, ended_s, nbytes))
            if self._look is not None and lane in SAMPLED_LANES and ended_s >= self._next_look_s:
                self._take(self._look)

    def _take(self, look: Callable[[], Mapping[str, Mapping[str, int]]]) -> None:
        began = time.perf_counter()
        self._looks.extend(Sample(name, began, values) for name, values in look().items())
        ended = time.perf_counter()
        self._next_look_s = ended + max(_APART_S, _APART_TO_COST * (ended - began))

    def sample(self, name: str, when_s: float, values: Mapping[str, int]) -> None:
        """Add a sample: numbers that hold from `when_s` to the next one. Does nothing unless recording."""
        if self.recording:
            self._keep(self._samples, Sample(name, when_s, values))

    def mark_step(self, when_s: float) -> None:
        """Mark the begin of a step, which ends the one before. Does nothing unless recording."""
        if self.recording:
            self._marks.append(when_s)

    def _keep(self, kept: deque[Any], one: Span | Sample) -> None:
        if len(kept) == kept.maxlen:  # rare: the common case takes no lock
            with self._lock:
                self.dropped += 1
        kept.append(one)

    @property
    def spans(self) -> list[Span]:
        """A copy of all spans kept, in the order of their ends; safe while other threads add spans."""
        return list(self._spans)

    @property
    def samples(self) -> list[Sample]:
        """All samples kept, by time."""
        return sorted([*self._samples, *self._looks], key=lambda sample: sample.when_s)

    @property
    def steps(self) -> list[tuple[float, float]]:
        """(began, ended) of each step whose end was marked."""
        return list(pairwise(self._marks))


def busy_s(spans: Iterable[Span], since: float, until: float) -> float:
    """Return the seconds between `since` and `until` in which at least one of `spans` ran."""
    busy, end = 0.0, since
    for one in sorted(spans, key=lambda span: span.began_s):
        began, ended = max(one.began_s, end), min(one.ended_s, until)
        if ended > began:
            busy += ended - began
            end = ended
    return busy


def rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Spread spans over as few rows as possible without overlap in a row: each takes the first free row."""
    filled: list[list[Span]] = []
    for one in sorted(spans, key=lambda span: (span.began_s, span.ended_s)):
        row = next((row for row in filled if row[-1].ended_s <= one.began_s), None)
        if row is None:
            filled.append(row := [])
        row.append(one)
    return filled


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """Return the lanes that occur, those of LANES first."""
    there = dict.fromkeys(one.lane for one in spans)
    return [*(lane for lane in LANES if lane in there), *(lane for lane in there if lane not in LANES)]


# Chrome's format, which Perfetto reads: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

PID = 1
"""The process id of all events, and the thread id of the first row: 0 is the idle task in Linux traces."""


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield a timeline as the events that chrome://tracing and ui.perfetto.dev show."""
    spans, samples, steps = timeline.spans, timeline.samples, timeline.steps
    moments = [one.began_s for one in spans] + [one.when_s for one in samples] + [one for one, _ in steps]
    origin = min(moments, default=0.0)
    steps_lane = [Span("steps", f"step {number}", *step) for number, step in enumerate(steps, 1)]
    row_id = PID
    if steps_lane or spans:
        yield {"ph": "M", "pid": PID, "name": "process_name", "args": {"name": "infinity"}}
    for lane in ["steps", *lanes_of(spans)]:
        of_lane = steps_lane if lane == "steps" else [one for one in spans if one.lane == lane]
        filled = rows(of_lane)
        for number, row in enumerate(filled, 1):
            yield from _named_row(row_id, lane if len(filled) == 1 else f"{lane} {number}")
            yield from (_complete(row_id, one, origin) for one in row)
            row_id += 1
        yield from _in_flight(lane, of_lane, origin)
    last: dict[str, int] = {}
    for sample in samples:
        for key, value in sample.values.items():
            name = f"{sample.name}: {key}"
            if last.get(name) != value:
                yield _counter(name, sample.when_s - origin, value)
                last[name] = value


def _named_row(row: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": PID, "tid": row, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", "pid": PID, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}}


def _complete(row: int, one: Span, origin: float) -> dict[str, Any]:
    """Return the event of one span; its times are microseconds since the origin."""
    event: dict[str, Any] = {"ph": "X", "pid": PID, "tid": row, "name": one.name, "cat": one.lane}
    began, ended = _us(one.began_s - origin), _us(one.ended_s - origin)
    event |= {"ts": began, "dur": ended - began}
    return event | {"args": {"bytes": one.nbytes}} if one.nbytes else event


def _us(seconds: float) -> float:
    """Return microseconds, rounded to eighths.

    Readers convert them to nanoseconds in floating point. Eighths are exact there, so a span does not overlap
    the one that ends where it begins; readers drop spans that overlap.
    """
    return round(seconds * 8e6) / 8


def _counter(name: str, when_s: float, value: int) -> dict[str, Any]:
    return {"ph": "C", "pid": PID, "name": name, "ts": _us(when_s), "args": {"bytes": value}}


def _in_flight(lane: str, spans: Sequence[Span], origin: float) -> Iterator[dict[str, Any]]:
    """Yield counters of the bytes in flight on a lane, if its spans move any."""
    changes = [(one.began_s, one.nbytes) for one in spans] + [(one.ended_s, -one.nbytes) for one in spans]
    flying = 0
    for when_s, change in sorted(changes):
        flying += change
        if change:
            yield _counter(f"bytes in flight: {lane}", when_s - origin, flying)


def write_chrome_trace(timeline: Timeline, path: Path) -> None:
    """Write a timeline for chrome://tracing or ui.perfetto.dev, one event per line; after an error no file.

    Raises: FileExistsError where `path` exists; OSError where it cannot be written.
    """
    with new_file(path) as file:  # event by event: all at once take several times the memory of their spans
        start = f'{{"displayTimeUnit": "ms", "otherData": {{"dropped": {timeline.dropped}}}, "traceEvents": ['
        file.write(start.encode())
        for number, event in enumerate(trace_events(timeline)):
            file.write(b",\n" if number else b"\n")
            file.write(json.dumps(event, separators=(",", ":")).encode())
        file.write(b"\n]}\n")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that appears at `path` at the end of the `with`; after an error no file is left.

    Raises: FileExistsError where `path` exists; OSError where it cannot be written.
    """
    if path.exists():
        raise FileExistsError(errno.EEXIST, "File exists, and is not overwritten", str(path))
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

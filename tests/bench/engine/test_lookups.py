"""What looking slices up takes of a step. Nothing is faked: a small engine trains on a real disk."""

import argparse

import pytest

from infinity.bench.engine import lookups

pytestmark = pytest.mark.disk


def test_what_looks_slices_up_is_counted_while_it_is_watched_and_left_as_it_was(folder):
    before = [getattr(kind, name) for kind, name in lookups.LOOKED_UP]
    options = argparse.Namespace(host_memory=2 << 20, used=0.1, steps=2, slice_size=8 << 10)
    row = lookups.measured(40, options, folder)
    assert (row["slices"], row["used"]) == (40, 4)
    assert set(row["each"]) >= {"Stack.tell", "Pins.close_step", "OffloadedOptimizer._note_missed"}
    assert sum(row["each"].values()) == pytest.approx(row["finding"] + row["noting"])
    assert row["share"] / row["finding_share"] == pytest.approx(1 + row["noting"] / row["finding"])
    assert [getattr(kind, name) for kind, name in lookups.LOOKED_UP] == before


def test_a_second_is_counted_once_and_not_at_all_in_what_a_function_has_begun(monkeypatch):
    watch, seconds = lookups.Stopwatch(), iter(range(100))
    monkeypatch.setattr(lookups.time, "thread_time", lambda: float(next(seconds)))
    begun = watch.timed(lambda: None, None)
    inner = watch.timed(lambda: None, "inner")
    outer = watch.timed(lambda: (inner(), begun()), "outer")
    outer()
    assert watch.seconds == {"outer": 3.0, "inner": 1.0}
    assert watch.without_counting(0.0) == {"outer": 0.0, "inner": 0.0}, "each reading takes a second"
    assert watch.without_counting(0.5) == {"outer": -0.5, "inner": -0.5}

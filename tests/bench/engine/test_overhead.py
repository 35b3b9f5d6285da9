"""The time of Infinity's own Python. Trusted: the clock of a thread's CPU time. Real: an engine on a disk."""

import argparse

import pytest

from infinity.bench.engine import overhead


def test_the_time_per_use_is_shown_in_microseconds_beside_the_goal():
    found = [
        overhead.StepToll("256KiB", "module", 20e-3, 80),
        overhead.StepToll("64MiB", "module", 12e-3, 80),
        overhead.StepToll("64MiB", "block", 6e-3, 12),
    ]
    findings = overhead.findings_of(found, argparse.Namespace())
    shown = [[column.show(row[column.key]) for column in findings.columns[3:]] for row in findings.rows]
    assert shown == [
        ["20.0 ms", "250 µs", "250 µs"],
        ["12.0 ms", "150 µs", "150 µs"],
        ["6.0 ms", "500 µs", "75 µs"],
    ]
    assert all(one.startswith("≤ 100 µs") for one in findings.verdicts)
    assert [one.rpartition(": ")[2] for one in findings.verdicts] == ["150.00 ✗", "75.00 ✓"]


@pytest.mark.disk
def test_a_use_takes_some_time_of_the_thread_that_computes(folder):
    pytest.importorskip("transformers")
    by_module = overhead.step_toll(str(folder), "64MiB", repeats=3)
    assert by_module.use_s > 0
    assert by_module.uses == 77

"""The time of Infinity's own Python. Trusted: the clock of a thread's CPU time. Real: an engine on a disk."""

import argparse

import pytest

from infinity.bench.engine import overhead


def test_the_time_per_use_is_shown_in_microseconds_beside_the_goal():
    findings = overhead.findings_of({"256KiB": 250e-6, "64MiB": 140e-6}, argparse.Namespace())
    shown = {row["host_memory"]: findings.columns[1].show(row["use_s"]) for row in findings.rows}
    assert shown == {"256KiB": "250 µs", "64MiB": "140 µs"}
    (verdict,) = findings.verdicts
    assert verdict.startswith("≤ 100 µs")
    assert verdict.endswith("140.00 ✗")


@pytest.mark.disk
def test_a_use_takes_some_time_of_the_thread_that_computes(folder):
    pytest.importorskip("transformers")
    assert overhead.use_toll(str(folder), "64MiB", repeats=3) > 0

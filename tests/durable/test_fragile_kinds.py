"""What the sweep of `dev.py faults` trains. Trusted: the counts of speculation."""

import pytest

import fragile_kinds

pytestmark = pytest.mark.disk


def test_the_sweep_s_updates_that_are_made_ahead_count_in_some_steps_and_are_dropped_in_others(folder):
    run = fragile_kinds.begin(str(folder), kind="speculation", host_memory="128KiB")
    run.train()
    counts = run.engine.speculation.counts
    run.kill()
    assert counts["confirmed"] > 0
    assert counts["dropped"] > 0

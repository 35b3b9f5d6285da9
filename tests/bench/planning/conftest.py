"""What tests of `infinity plan` share."""

import pytest

from infinity.bench.planning import cores, pace


@pytest.fixture
def unhurried(monkeypatch):
    """Nothing is timed: that takes its time, and tells nothing here."""
    monkeypatch.setattr(cores, "update_rate", lambda _: 1e9)
    monkeypatch.setattr(cores, "hash_rate", lambda: 1e10)
    monkeypatch.setattr(cores, "copy_rate", lambda: 1e10)
    monkeypatch.setattr(pace, "compute_seconds", lambda *_: 2.0)

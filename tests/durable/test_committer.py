"""In which order a commit comes to the disk. Trusted: the store, and what is a commit. Faked: nothing; who
syncs and writes is overheard.
"""

import pytest

import infinity
from fragile import Run

pytestmark = pytest.mark.disk


def overheard(monkeypatch, owner, name, order, what):
    """Note each call of a method before it is made."""
    usual = getattr(owner, name)

    def called(*given, **named):
        order.append(what)
        return usual(*given, **named)

    monkeypatch.setattr(owner, name, called)


def test_a_step_is_named_once_its_data_is_on_the_disk_and_the_one_before_given_up_once_it_is_named(
    folder, monkeypatch
):
    run, order = Run(folder), []
    run.train(2)
    infinity.commit(run.model)  # none is under way
    run.train(3)
    durable = run.engine.durable
    overheard(monkeypatch, durable.nvme, "sync", order, "data")
    overheard(monkeypatch, durable.folders[0], "write_slot", order, "name")
    overheard(monkeypatch, durable.store, "end_commit", order, "give up")
    infinity.commit(run.model)
    assert order == ["data", "name", "give up"]
    run.kill()

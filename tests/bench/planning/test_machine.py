"""Which machine a plan is for, and where its host_memory comes from. Faked: what this machine has."""

import argparse

import pytest

from infinity.bench.planning import machine

GIB = 1 << 30
NOTHING = {
    "compute": None,
    "compute_seconds": None,
    "nvme_read": None,
    "gpu_memory": None,
    "device_memory": None,
    "host_memory": None,
    "machine_memory": None,
    "nvme": None,
    "nvme_space": None,
    "no_nvme": False,
    "ranks": 1,
}


@pytest.fixture(autouse=True)
def this_machine(monkeypatch):
    monkeypatch.setattr(machine, "_available_nbytes", lambda: 20 * GIB)
    monkeypatch.setattr(machine, "_total_nbytes", lambda: 24 * GIB)
    monkeypatch.setattr(machine, "process_memory", lambda: None)


def told(**what):
    return argparse.Namespace(**{**NOTHING, **what})


@pytest.mark.parametrize(
    ("what", "nbytes", "source", "memory"),
    [
        ({}, 10 * GIB, "half of what is available now on this machine", 24 * GIB),
        ({"nvme": "."}, 10 * GIB, "half of what is available now on this machine", 24 * GIB),
        (
            {"nvme": ".", "gpu_memory": GIB},
            10 * GIB,
            "half of what is available now on this machine",
            24 * GIB,
        ),
        ({"host_memory": GIB, "ranks": 8}, GIB, "", None),
        ({"machine_memory": 64 * GIB, "ranks": 8}, 32 * GIB, "half of --machine-memory", 64 * GIB),
    ],
)
def test_host_memory_comes_from_this_machine_where_it_is_the_one_planned_for(what, nbytes, source, memory):
    chosen = told(**what)
    assert machine.host_nbytes(chosen) == nbytes
    assert machine.source_of_host_memory(chosen) == source
    assert machine.missing_host_memory(chosen) == ""
    assert machine.capacity(chosen).memory_nbytes == memory


@pytest.mark.parametrize("what", [{"ranks": 8}, {"compute": 100.0}, {"nvme_read": 5.0}, {"gpu_memory": GIB}])
def test_of_another_machine_it_is_said_that_this_ones_memory_stands_for_it(what):
    chosen = told(**what)
    assert machine.host_nbytes(chosen) == 10 * GIB
    assert "on this machine, not on the one planned for" in machine.source_of_host_memory(chosen)
    assert "Give --host-memory SIZE, or --machine-memory SIZE" in machine.missing_host_memory(chosen)
    assert machine.capacity(chosen).memory_nbytes is None

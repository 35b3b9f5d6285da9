"""What a machine, or a container, has for us. Faked: the files of control groups, and a machine's memory."""

import re

import pytest
from torch import nn

from infinity import HostMemoryError, Init
from infinity.cli.doctor import examine
from infinity.ranks import machine_memory


def limited(monkeypatch, folder, version, limit, used, cache):
    """Let this process be in a control group of a container that may use `limit` bytes."""
    group = folder / ("memory" if version == 1 else "") / "slice" / "box"
    group.mkdir(parents=True)
    names = ("limit_in_bytes", "usage_in_bytes", "total_") if version == 1 else ("max", "current", "")
    (group.parent / f"memory.{names[0]}").write_text(f"{limit}\n")
    (group.parent / f"memory.{names[1]}").write_text(f"{used}\n")
    (group.parent / "memory.stat").write_text(f"anon 7\n{names[2]}inactive_file {cache}\n")
    own = folder / "own"
    own.write_text("5:cpu:/other\n4:memory:/slice/box\n" if version == 1 else "0::/slice/box\n")
    monkeypatch.setattr(machine_memory, "_ROOT", folder)
    monkeypatch.setattr(machine_memory, "_OWN", own)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_that_may_use_less_than_the_machine_has_counts(tmp_path, monkeypatch, version):
    limited(monkeypatch, tmp_path, version, 1 << 30, 600 << 20, 100 << 20)
    assert machine_memory.total_nbytes()[0] == 1 << 30
    assert machine_memory.available_nbytes() == (1 << 30) - (500 << 20)
    with pytest.raises(
        HostMemoryError, match=r"2\.0 GiB is more than the control group .*slice has.* 1\.0 GiB"
    ):
        Init(host_memory="2GiB").__enter__()
    (row,) = [one for one in examine(str(tmp_path)).findings if one.subject == "memory"]
    assert "this container may use 1.0 GiB; host_memory is 262.0 MiB by default" in row.found


def test_a_budget_above_the_machines_memory_is_refused_and_what_is_advised_works(monkeypatch):
    with pytest.raises(
        HostMemoryError, match=r"host_memory=1024\.0 TiB is more than this machine has: "
    ) as told:
        Init(host_memory="1024TiB").__enter__()
    advised = int(re.search(r"host_memory=(\d+) ", str(told.value))[1])
    assert advised <= machine_memory.total_nbytes()[0]
    machine_memory.check_holds(advised)
    with Init(host_memory=min(advised, 64 << 20)):
        nn.Linear(4, 4)
    with Init():
        nn.Linear(4, 4)


def test_without_control_groups_the_machines_memory_is_what_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_memory, "_OWN", tmp_path / "nothing")
    assert machine_memory.total_nbytes() == (machine_memory.psutil.virtual_memory().total, "this machine has")

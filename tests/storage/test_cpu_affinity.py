"""The choice of CPUs. Trusted: nothing; machines are described, and one test looks at this one."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.storage import cpu_affinity as cores
from infinity.storage.cpu_affinity import CpuShare, Machine, parse_cpus, share


def two_sockets(cores_each=8, **ranks):
    """Number CPUs as Linux does: first all cores' first hyperthreads, then the second ones."""
    half = 2 * cores_each
    nodes = tuple(
        frozenset(range(node * cores_each, (node + 1) * cores_each))
        | frozenset(range(half + node * cores_each, half + (node + 1) * cores_each))
        for node in range(2)
    )
    return Machine(frozenset(range(2 * half)), nodes, {cpu: cpu % half for cpu in range(2 * half)}, **ranks)


def parts(ranks, **machine):
    return [share(two_sockets(local_ranks=ranks, local_rank=rank, **machine), 1) for rank in range(ranks)]


def test_without_a_launcher_nothing_is_bound_and_torch_keeps_its_cores():
    assert share(Machine(frozenset(range(8))), 3) == CpuShare(5)
    assert share(two_sockets(), 1) == CpuShare(31)
    assert share(two_sockets(local_ranks=1, local_rank=0), 1) == CpuShare(31)


def test_where_torch_leaves_no_core_the_kernels_use_all():
    assert share(Machine(frozenset({2, 3})), 2) == CpuShare(2)
    assert share(Machine(frozenset({2, 3})), 9) == CpuShare(2)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_ranks_of_a_node_share_no_core(ranks):
    taken = [{cpu % 16 for cpu in one.cpus} for one in parts(ranks)]
    assert all(taken)
    assert sum(map(len, taken)) == len(set.union(*taken)) == 16


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_a_ranks_cpus_lie_on_one_node(ranks):
    nodes = two_sockets().nodes
    assert all(any(set(one.cpus) <= node for node in nodes) for one in parts(ranks))


def test_fewer_ranks_than_nodes_take_whole_nodes():
    nodes = tuple(frozenset({2 * node, 2 * node + 1}) for node in range(4))
    taken = [share(Machine(frozenset(range(8)), nodes, None, 2, rank), 1) for rank in range(2)]
    assert taken == [CpuShare(3, (0, 1, 2, 3)), CpuShare(3, (4, 5, 6, 7))]


def test_only_cpus_that_the_process_may_use_are_taken():
    nodes = (frozenset(range(4)), frozenset(range(4, 8)))
    allowed = frozenset({2, 3, 4, 5})
    taken = [share(Machine(allowed, nodes, None, 2, rank), 1) for rank in range(2)]
    assert taken == [CpuShare(1, (2, 3)), CpuShare(1, (4, 5))]


def test_a_node_that_the_process_may_not_use_has_no_ranks():
    nodes = (frozenset(range(4)), frozenset(range(4, 8)))
    taken = [share(Machine(frozenset(range(4, 8)), nodes, None, 2, rank), 1) for rank in range(2)]
    assert [one.cpus for one in taken] == [(4, 5), (6, 7)]


def test_a_launcher_that_has_placed_its_ranks_is_left_alone():
    machine = Machine(frozenset({4, 5}), (), None, 4, 1, is_placed=True)
    assert share(machine, 1) == CpuShare(1)


def test_more_ranks_than_cores_are_not_bound():
    machine = Machine(frozenset(range(4)), (), {0: 0, 1: 1, 2: 0, 3: 1}, 3, 0)
    assert share(machine, 1) == CpuShare(3)


def test_where_one_rank_would_be_left_without_a_core_none_is_bound():
    nodes = (frozenset(range(7)), frozenset({7}))
    taken = [share(Machine(frozenset(range(8)), nodes, None, 4, rank), 1) for rank in range(4)]
    assert taken == [CpuShare(7)] * 4


@given(
    st.sets(st.integers(0, 63), min_size=1),
    st.integers(1, 5),
    st.integers(2, 12),
    st.integers(1, 8),
)
def test_on_any_machine_parts_are_disjoint_allowed_and_never_without_a_thread(allowed, nodes, ranks, torch):
    lying = tuple(frozenset(range(node, 64, nodes)) for node in range(nodes))
    found = [share(Machine(frozenset(allowed), lying, None, ranks, rank), torch) for rank in range(ranks)]
    taken = [cpu for one in found for cpu in one.cpus]
    assert len(taken) == len(set(taken))
    assert set(taken) <= allowed
    assert len({bool(one.cpus) for one in found}) == 1
    assert all(1 <= one.threads <= len(one.cpus or allowed) for one in found)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3\n", {0, 1, 2, 3}), ("7", {7}), ("0-1,8,10-11\n", {0, 1, 8, 10, 11}), ("\n", set())],
)
def test_lists_of_cpus_are_read_as_linux_writes_them(text, cpus):
    assert parse_cpus(text) == cpus


def test_this_machine_is_found_with_its_launchers_variables(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    machine = cores.here()
    assert machine.allowed == os.sched_getaffinity(0)
    assert (machine.local_ranks, machine.local_rank) == (4, 3)
    assert machine.cores is not None
    assert machine.cores.keys() == machine.allowed
    monkeypatch.setenv("LOCAL_RANK", "none")
    assert cores.here().local_rank is None

"""Chooses the CPUs for the kernels of one rank, so that the ranks of a machine do not share cores.

torchrun starts N ranks on a machine, and each may run on all of its CPUs. N pools with one thread per CPU
would then compete for every core, and a thread's data would often lie on another NUMA node. So each rank
takes a part of the CPUs: whole cores (with all their hyperthreads), within one NUMA node if there are at
least as many ranks as nodes, else whole nodes.

Nothing is bound without torchrun: two independent runs would both take the first CPUs, and the scheduler,
which sees both, does better. Nothing is bound either if the launcher has placed its ranks already (`torchrun
--numa-binding`, `srun --cpu-bind`, `numactl`). That shows in the rank having fewer CPUs than its launcher.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Machine:
    """The CPUs that a rank may use, their topology, and the ranks that share them."""

    allowed: frozenset[int]
    nodes: tuple[frozenset[int], ...] = ()
    """The CPUs of each NUMA node, allowed or not; empty if unknown, which counts as one node."""
    cores: Mapping[int, int] | None = None
    """The core of each CPU, as the lowest number of its hyperthreads; None: each CPU is a core."""
    local_ranks: int | None = None
    """Ranks on this machine; None if no launcher says so."""
    local_rank: int | None = None
    is_placed: bool = False
    """Whether this rank has fewer CPUs than its launcher."""


@dataclass(frozen=True, slots=True)
class CpuShare:
    """One rank's part: threads for the kernels' pool, and the CPUs to bind it to; empty: no binding."""

    threads: int
    cpus: tuple[int, ...] = ()


def share(machine: Machine, torch_threads: int) -> CpuShare:
    """Return this rank's part of the machine.

    torch_threads: threads of torch in this rank; 1 if the model computes on a device. The kernels take the
    CPUs that these leave, or all of the part if they leave none.
    """
    cpus = _part(machine)
    left = len(cpus or machine.allowed) - torch_threads
    return CpuShare(left if left > 0 else len(cpus or machine.allowed), cpus)


def _part(machine: Machine) -> tuple[int, ...]:
    """Return the CPUs to bind to, ordered by node and core; empty: no binding."""
    ranks, rank = machine.local_ranks, machine.local_rank
    if ranks is None or rank is None or ranks < 2 or not 0 <= rank < ranks or machine.is_placed:
        return ()
    nodes = [node & machine.allowed for node in machine.nodes]
    nodes = [node for node in nodes if node] or [machine.allowed]
    if ranks <= len(nodes):
        chosen = nodes[rank * len(nodes) // ranks : (rank + 1) * len(nodes) // ranks]
        return tuple(cpu for node in chosen for core in _cores(machine, node) for cpu in core)
    home = [other * len(nodes) // ranks for other in range(ranks)]
    if any(home.count(node) > len(_cores(machine, cpus)) for node, cpus in enumerate(nodes)):
        return ()  # some ranks have to share cores anyway
    neighbours = [other for other in range(ranks) if home[other] == home[rank]]
    cores = _cores(machine, nodes[home[rank]])
    place, of = neighbours.index(rank), len(neighbours)
    mine = cores[place * len(cores) // of : (place + 1) * len(cores) // of]
    return tuple(cpu for core in mine for cpu in core)


def _cores(machine: Machine, cpus: frozenset[int]) -> Sequence[tuple[int, ...]]:
    """Return CPUs grouped by core, in the order of core numbers."""
    found: dict[int, list[int]] = {}
    for cpu in sorted(cpus):
        found.setdefault(cpu if machine.cores is None else machine.cores.get(cpu, cpu), []).append(cpu)
    return [tuple(found[core]) for core in sorted(found)]


# The machine this runs on


def here() -> Machine:
    """Read this process's affinity, torchrun's environment variables and the parent's affinity."""
    allowed = frozenset(os.sched_getaffinity(0))
    ranks, rank = (_number(os.environ.get(name)) for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    nodes = [_cpus(path) for path in sorted(_SYSTEM.glob("node/node[0-9]*/cpulist"))]
    siblings = {cpu: _cpus(_SYSTEM / f"cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in allowed}
    cores = {cpu: min(numbers, default=cpu) for cpu, numbers in siblings.items()}
    return Machine(allowed, tuple(nodes), cores, ranks, rank, allowed < _launchers())


def _launchers() -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(os.getppid()))
    except OSError:  # the parent has ended, or is in another container
        return frozenset()


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _cpus(path: Path) -> frozenset[int]:
    """Read a file that contains a CPU list; empty if there is none."""
    try:
        return parse_cpus(path.read_text(encoding="utf-8"))
    except OSError:
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """Return the numbers of a list like "0-3,8,10-11"."""
    spans = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1))

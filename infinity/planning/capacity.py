"""Whether a planned training fits its machines: what it takes, and what they have. Pure: no torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.planning.demand import Demand
from infinity.sizes import format_size

_HOLES = 0.4
"""Of what computing takes on the CPU: what malloc holds free between tensors of many sizes, about. Measured:
`python -m infinity.bench.planning.peaks --held`. INFINITY_MALLOC=lean does without.
"""
_LOGITS_HELD, _MAPPED_NBYTES = 12, 32 << 20
"""So many times the logits if that is more, as it was measured (8 to 12 times): below a size that glibc maps
apart.
"""
HOST_MEMORY = "memory of each machine"
"""The name of that need."""
PROCESS = "Python and torch"
"""The name of what it is for, where that is a process that trains next to nothing."""
CONTEXT_NBYTES = 512 << 20
"""Device memory that CUDA takes for itself, about."""


@dataclass(frozen=True, slots=True)
class Process:
    """What a rank's process takes that trains next to nothing, in bytes: Python, torch and transformers."""

    own_nbytes: int
    """Of each process."""
    shared_nbytes: int
    """Of files that all processes of a machine map: libraries."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What there is, in bytes; None for what is not known."""

    memory_nbytes: int | None = None
    """Host memory of each machine, in all."""
    nvme_nbytes: int | None = None
    """Free space on the NVMe of each machine."""
    gpu_nbytes: int | None = None
    """Memory of each rank's GPU, in all."""
    process: Process | None = None
    """Of each rank, here; not counted where that was not measured."""
    lean_malloc: bool = False
    """Whether malloc holds nothing free, as with INFINITY_MALLOC=lean."""


@dataclass(frozen=True, slots=True)
class Need:
    """One resource: what is needed of it, in bytes, and what there is."""

    what: str
    nbytes: int
    has_nbytes: int | None
    """None where that is not known."""
    parts: tuple[tuple[str, int], ...]
    """What it is for."""

    @property
    def short_nbytes(self) -> int:
        """Bytes that are missing; 0 where it is enough, or not known."""
        return max(0, self.nbytes - self.has_nbytes) if self.has_nbytes is not None else 0

    def __str__(self) -> str:
        """Say what is missing, or needed."""
        parts = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in self.parts if nbytes)
        if self.has_nbytes is None:
            return f"{self.what}: at least {format_size(self.nbytes)} ({parts})"
        missing = f": {format_size(self.short_nbytes)} too little" if self.short_nbytes else ""
        return (
            f"{self.what}: needs {format_size(self.nbytes)} ({parts}), has {format_size(self.has_nbytes)}"
            f"{missing}"
        )


def needs(demand: Demand, machine: Capacity) -> tuple[Need, ...]:
    """Return what a training needs of each resource, all its ranks on a machine together."""
    setting = demand.setting
    ranks, on_gpu = setting.local_ranks, setting.device_nbytes is not None
    computing = _computing(demand)
    used_nbytes, waiting_nbytes = demand.in_common_nbytes
    held_nbytes = demand.held_nbytes - demand.second_nbytes
    of_host = [("host_memory", ranks * held_nbytes - (ranks - 1) * min(waiting_nbytes, held_nbytes))]
    of_host.append(("second parts of weights", ranks * demand.second_nbytes))
    if (process := machine.process) is not None:
        of_host.append((PROCESS, ranks * process.own_nbytes + process.shared_nbytes))
    if not on_gpu:
        (layers, in_use), *others = computing
        of_host.append((layers, ranks * in_use - (ranks - 1) * min(used_nbytes, in_use)))
        of_host += [(name, ranks * nbytes) for name, nbytes in others]
        of_host.append(("weights that updates start from", ranks * demand.lent_nbytes))
        by_malloc = 0 if machine.lean_malloc else _held_by_malloc(demand)
        of_host.append(("held by malloc", ranks * by_malloc))
    found = [_need(HOST_MEMORY, of_host, machine.memory_nbytes)]
    if on_gpu:
        window = demand.limits.window_nbytes if demand.setting.device_nbytes != 1 else 0  # 1 stands for none
        waiting = min(window, sum(one.waiting_nbytes for one in demand.units))
        of_device = [
            ("whole records that live there", demand.records_nbytes),
            ("weights that live there", demand.lodged_nbytes - demand.records_nbytes),
            ("weights that wait", waiting),
            *computing,
            ("CUDA", CONTEXT_NBYTES),
        ]
        found.append(_need("memory of each GPU", of_device, machine.gpu_nbytes))
    if setting.nvme:
        gradients, activations = demand.stored_gradients_nbytes, demand.offloaded_nbytes
        parts = {
            "weights, masters and moments": demand.nvme_nbytes - gradients - activations,
            "gradients until their update": gradients,
            "activations": activations,
        }
        of_nvme = [(name, ranks * nbytes) for name, nbytes in parts.items()]
        found.append(_need("NVMe of each machine", of_nvme, machine.nvme_nbytes))
    return tuple(found)


def _held_by_malloc(demand: Demand) -> int:
    logits = demand.activations.narrow_logits_nbytes if demand.activations is not None else 0
    of_logits = _LOGITS_HELD * logits if logits < _MAPPED_NBYTES else 0
    return max(round(_HOLES * demand.working_nbytes), of_logits)


def _computing(demand: Demand) -> list[tuple[str, int]]:
    moment = demand.moment
    parts = [("layers in use", moment.in_use_nbytes)]
    if demand.activations is not None:
        parts += [("activations", moment.kept_nbytes), (moment.what, moment.beside_nbytes)]
    return parts


def _need(what: str, parts: list[tuple[str, int]], has_nbytes: int | None) -> Need:
    return Need(what, sum(nbytes for _, nbytes in parts), has_nbytes, tuple(parts))

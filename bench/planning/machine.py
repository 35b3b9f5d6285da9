"""Which machine `infinity plan` is for: what was told of it, what this one has, and host_memory where nobody
said it.
"""

from __future__ import annotations

import argparse
import shutil

from infinity.bench.planning.process import process_memory
from infinity.planning.capacity import Capacity
from infinity.storage.memory import lean_malloc


def capacity(chosen: argparse.Namespace) -> Capacity:
    """Return what there is: what was told, and what this machine has, where the plan is for it."""
    memory, space = chosen.machine_memory, chosen.nvme_space
    if chosen.nvme is not None and space is None and not chosen.no_nvme:
        space = shutil.disk_usage(chosen.nvme).free
    if memory is None and not _is_another(chosen):
        memory = _total_nbytes()
    return Capacity(memory, space, chosen.gpu_memory or chosen.device_memory, process_memory(), lean_malloc())


def host_nbytes(chosen: argparse.Namespace) -> int:
    """Return the budget of each machine; where none was given, half of the memory, as Config takes half."""
    return int(chosen.host_memory or (chosen.machine_memory or _available_nbytes()) // 2)


def source_of_host_memory(chosen: argparse.Namespace) -> str:
    """Say where host_memory comes from, and of which machine, if it was not given; "" if it was."""
    if chosen.host_memory:
        return ""
    if chosen.machine_memory:
        return "half of --machine-memory"
    machine = "this machine, not on the one planned for" if _is_another(chosen) else "this machine"
    return f"half of what is available now on {machine}"


def missing_host_memory(chosen: argparse.Namespace) -> str:
    """Say what to give where host_memory comes from a machine that is not the one planned for; else ""."""
    if chosen.host_memory or chosen.machine_memory or not _is_another(chosen):
        return ""
    return (
        "host_memory was not given: it is half of what is available now on this machine, which is not the "
        "one planned for. Give --host-memory SIZE, or --machine-memory SIZE for half of that."
    )


def _is_another(chosen: argparse.Namespace) -> bool:
    """Whether the plan is for another machine than this one: nothing of this one was named, and more was told
    than this one has, or measures.
    """
    told = (chosen.compute, chosen.compute_seconds, chosen.nvme_read, chosen.gpu_memory, chosen.device_memory)
    return chosen.nvme is None and (any(told) or (chosen.ranks or 1) > 1)


def _available_nbytes() -> int:
    from infinity.ranks.machine_memory import available_nbytes

    return available_nbytes()


def _total_nbytes() -> int:
    from infinity.ranks.machine_memory import total_nbytes

    return total_nbytes()[0]

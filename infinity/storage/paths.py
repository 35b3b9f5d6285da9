"""Assigns a machine's NVMe folders to its ranks.

Every rank could stripe over every disk. But the bytes of a rank on its disk's NUMA node cross one link less,
and a disk with fewer ranks gets longer requests. So folders are distributed evenly, the disks of a NUMA node
preferably to the ranks that compute there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from infinity.storage import cpu_affinity as cores

_BLOCK_DEVICES = Path("/sys/dev/block")


def assign(nodes: Sequence[int | None], homes: Sequence[int | None]) -> list[list[int]]:
    """Return the folder numbers of each rank of a machine.

    nodes, homes: the NUMA node of each folder's disk and of each rank; None if unknown. With fewer folders
    than ranks each rank gets one. Otherwise all ranks get equally many, and share the remaining ones.
    """
    if len(homes) == 1:
        return [list(range(len(nodes)))]
    taken: list[list[int]] = [[] for _ in homes]
    users = [0] * len(nodes)
    for _ in range(max(1, len(nodes) // len(homes))):
        for rank, home in enumerate(homes):
            free = [one for one in range(len(nodes)) if one not in taken[rank]]
            near = {one: home is not None and nodes[one] == home for one in free}
            best = min(free, key=lambda one: (users[one], not near[one], one))
            users[best] += 1
            taken[rank].append(best)
    rest = [one for one, count in enumerate(users) if not count]
    return [sorted([*mine, *rest]) for mine in taken]


def of_rank(folders: Sequence[str], local_rank: int, local_size: int) -> tuple[list[str], int]:
    """Return this rank's folders, and how many ranks of this machine use the busiest of them."""
    if not folders:
        return [], 1
    known = len(cores.here().nodes)
    homes = [rank * known // local_size if known else None for rank in range(local_size)]
    dealt = assign([node_of(folder) for folder in folders], homes)
    mine = dealt[local_rank]
    sharers = max((sum(one in other for other in dealt) for one in mine), default=1)
    return [folders[one] for one in mine], sharers


def node_of(folder: str) -> int | None:
    """Return the NUMA node of the disk that holds `folder`; None if the system does not say."""
    try:
        device = os.stat(folder).st_dev
        place = (_BLOCK_DEVICES / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    except OSError:  # not a block device: tmpfs, overlay, a network filesystem
        return None
    for parent in (place, *place.parents):
        for path in (parent / "numa_node", parent / "device" / "numa_node"):
            try:
                node = int(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            return node if node >= 0 else None
    return None

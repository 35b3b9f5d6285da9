"""Which of a machine's NVMe folders a rank uses, where it has several ranks and several folders.

Every rank could stripe over every disk. But a rank near its disks moves bytes over one link less, and fewer
ranks on a disk leave its queue longer requests. So folders are dealt out as far as they go round: the disks
of a NUMA node to the ranks that compute there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from infinity.storage import cpu_affinity as cores

_BLOCK_DEVICES = Path("/sys/dev/block")


def assign(nodes: Sequence[int | None], homes: Sequence[int | None]) -> list[list[int]]:
    """Return the folders of each rank of a machine, by number.

    nodes: the NUMA node of each folder's disk, None where that is not known; homes: of each rank. With fewer
    folders than ranks, each rank has one; else each has as many as all others, and what does not go round is
    shared by all.
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
    """Return the NUMA node of the disk that holds `folder`; None where the system does not say."""
    try:
        device = os.stat(folder).st_dev
        place = (_BLOCK_DEVICES / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    except OSError:  # no block device: tmpfs, overlay, a network
        return None
    for parent in (place, *place.parents):
        for path in (parent / "numa_node", parent / "device" / "numa_node"):
            try:
                node = int(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            return node if node >= 0 else None
    return None

"""The lane that moves an engine's records."""

from __future__ import annotations

from infinity.device.device import Device, choose_cores
from infinity.lane.lane import StreamLane
from infinity.planning.budget import Budget
from infinity.storage.memory import Pool
from infinity.storage.nvme import NvmeStore
from infinity.storage.store import HostStore
from infinity.storage.stripes import StripedStore
from infinity.timeline import Timeline


def open_lane(
    budget: Budget,
    device: Device,
    nvme: NvmeStore | StripedStore | None,
    host: HostStore,
    timeline: Timeline,
) -> StreamLane:
    """Start it, with slots as `budget` has them. nvme, host: the stores that it moves fields between."""
    pool = Pool(budget.slot_nbytes, budget.slots)
    device.pin(pool.address, pool.nbytes)
    if nvme is not None:
        nvme.keep(pool, host)
    cpus, on_host = choose_cores(device), device.is_host
    return StreamLane(pool, inline=on_host, apart=not on_host, timeline=timeline, cpus=cpus)

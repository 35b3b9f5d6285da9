"""Whether the ranks of an engine have the machine's memory in common, where Config says so."""

from __future__ import annotations

import logging

from infinity.config.settings import Config
from infinity.device.device import Device
from infinity.errors import ConfigError
from infinity.ranks.group import Ranks
from infinity.ranks.shared_memory import has_nameless_memory

logger = logging.getLogger("infinity")


def shares_memory(config: Config, ranks: Ranks, device: Device) -> bool:
    """Return whether units are put together in memory that all ranks share. Every rank calls it.

    Raises: ConfigError, the same on every rank, where ranks have different settings, where they compute on an
    accelerator or on several machines, and where the system has no such memory.
    """
    mine = config.shared_memory
    if ranks.size == 1:
        if mine:
            logger.warning("shared_memory=True: there is one rank, which shares with none; nothing is done")
        return False
    rows = ranks.of_all([mine, len(ranks.near), mine and has_nameless_memory()], "compare shared_memory")
    if any(row[0] != rows[0][0] for row in rows):
        given = "; ".join(f"rank {rank}: shared_memory={bool(row[0])}" for rank, row in enumerate(rows))
        raise ConfigError(f"the ranks do not agree on their memory. Give all the same Config: {given}")
    if not mine:
        return False
    if not device.is_host:
        raise ConfigError(
            "shared_memory=True where an accelerator computes: its link reads memory that is page-locked, "
            'which what ranks share is not; leave it out, or compute on the CPU (device="cpu")'
        )
    if any(row[1] < ranks.size for row in rows):
        near = ", ".join(str(row[1]) for row in rows)
        raise ConfigError(
            f"shared_memory=True for {ranks.size} ranks on several machines (ranks on the machine of each: "
            f"{near}): weights would still go between machines. Leave it out, or give Init a process_group "
            "of one machine's ranks"
        )
    if not all(row[2] for row in rows):
        raise ConfigError(
            "shared_memory=True needs files in memory without a name (memfd_create), which Linux has, unless "
            "a container's seccomp profile or the sysctl vm.memfd_noexec=2 forbids them; leave it out"
        )
    return True

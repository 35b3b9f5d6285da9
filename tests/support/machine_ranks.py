"""Ranks of one machine as threads of this process, for what they share of its memory."""

import contextlib
import re
from pathlib import Path

from infinity.errors import RanksError
from thread_ranks import ThreadGroup


class MachineRank(ThreadGroup):
    """What memory in common needs of ranks.group.Ranks, all ranks being on this machine."""

    def __init__(self, table, rank, size):
        super().__init__(table, rank, size)
        self.size, self.near = size, list(range(size))

    @contextlib.contextmanager
    def together(self, _what):
        failed = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below
            failed = error
        others = self._all(failed)
        if failed is not None:
            raise failed
        if any(others):
            raise RanksError("another rank has failed")

    @property
    def ranks(self):
        return self


class TwoMachines(MachineRank):
    """Likewise, of which each half is on a machine of its own."""

    def __init__(self, table, rank, size):
        super().__init__(table, rank, size)
        half = size // 2
        first = rank // half * half
        self.near = list(range(first, first + half))


def mappings():
    """Return the flags of each mapping of nameless memory in this process, by its first address."""
    found, here = {}, None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            here = line.split("-")[0] if "memfd:infinity" in line else None
        elif here is not None and line.startswith("VmFlags:"):
            found[here] = set(line.split()[1:])
    return found


def descriptors():
    """Return the descriptors of nameless memory in this process."""
    return [one for one in Path("/proc/self/fd").iterdir() if "memfd:infinity" in _target(one)]


def _target(link):
    with contextlib.suppress(FileNotFoundError):
        return str(link.readlink())
    return ""

"""Durable runs: fields in host memory and on the device, written to where a commit can name them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from infinity.lane.lane import StreamLane
from infinity.lane.passes import Home, KeepPass
from infinity.records.record import Record
from infinity.storage.store import Store
from infinity.units.unit import Unit

ABREAST_NBYTES = 4 << 20
"""Bytes of host memory that a commit queues for writing at a time, so that reads do not wait behind all."""


def write_out(lane: StreamLane, passes: Sequence[KeepPass]) -> None:
    """Run passes on a lane, a few at a time, and return when all are finished. The last record is first:
    in the order of the model each pass would delay the forward that uses its record at the same time.
    """
    queued: deque[KeepPass] = deque()
    nbytes = 0
    for one in reversed(passes):
        while queued and nbytes + one.nbytes > ABREAST_NBYTES:
            lane.wait(queued[0], finished=True)
            nbytes -= queued.popleft().nbytes
        lane.submit(one)
        queued.append(one)
        nbytes += one.nbytes
    for one in queued:
        lane.wait(one, finished=True)


class Homes:
    """The places on NVMe of a durable run's fields that are in host memory or on the device; others are on
    NVMe already.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[tuple[Record, str], Home] = {}

    def home(self, record: Record, name: str) -> Home:
        """Return where a field can be read from NVMe, or from a checkpoint's files, and its hashes."""
        if name == "hi" and record.in_files is not None:
            return record.in_files, record.home(name)[1]
        return self._of.get((record, name)) or record.home(name)

    def passes(self, units: Sequence[Unit]) -> list[KeepPass]:
        """Return the passes that write fields above NVMe which changed since they were last written."""
        changed = ((unit.record, self._changed(unit.record)) for unit in units)
        return [KeepPass(record, homes, record.tile_numel) for record, homes in changed if homes]

    def _changed(self, record: Record) -> dict[str, Home]:
        """Return a record's fields that are to be written, with their places."""
        homes = {}
        for name in record.schema.names:
            lies = name == "hi" and record.in_files is not None
            if name not in record or lies or not record.volatile(name):
                self._leave(record, name)
            elif (record, name) not in self._of or name in record.changed_in_host:
                homes[name] = self._home_of_volatile(record, name)
                record.changed_in_host.discard(name)
        return homes

    def _home_of_volatile(self, record: Record, name: str) -> Home:
        """Return the place of a field in host memory; allocate it the first time."""
        home = self._of.get((record, name))
        if home is None:
            place = self._store.allocate(record.field_nbytes(name), f"{record.name}.{name}")
            home = place, record.new_hashes(name)
            self._of[record, name] = home
        return home

    def _leave(self, record: Record, name: str) -> None:
        """Free the place of a field that is on NVMe itself again."""
        home = self._of.pop((record, name), None)
        if home is not None:
            self._store.free(home[0])

"""Durable runs: fields in host memory, written to where a commit can name them; all of a record, compared."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from infinity.lane.lane import StreamLane
from infinity.lane.queue import Pass
from infinity.planning.layout import tiles
from infinity.records.record import Record
from infinity.storage.store import Extent, Store, Transfer
from infinity.units.unit import Unit

Home: TypeAlias = "tuple[Extent, array[int]]"
"""Where a field lies on the drive, and its tiles' hashes."""
ABREAST_NBYTES = 4 << 20
"""Bytes of host memory that a commit queues for writing at a time, so that reads do not wait behind all."""


class KeepPass(Pass):
    """Write fields of a record from host memory, where they stay, to extents."""

    def __init__(self, record: Record, homes: Mapping[str, Home], tile_numel: int) -> None:
        """Prepare to write the fields that `homes` names, each to its extent; its tiles' hashes go there."""
        super().__init__(record)
        self._homes = homes
        self._tile_numel = tile_numel
        numel = sum(record.form.nbytes(name, tile_numel) for name in homes)
        self._most_numel = max(1, record.form.slot_nbytes * tile_numel // numel) * tile_numel

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Every tile with anything written; of neighbours, as many at once as a slot would hold."""
        begun, ended = 0, 0
        names: tuple[str, ...] = ()
        for start, stop in tiles(self.record.shard.numel, self._tile_numel):
            here = self._written(start)
            if here != names or stop - begun > self._most_numel:
                if names:
                    yield begun, ended
                begun, names = start, here
            ended = stop
        if names:
            yield begun, ended

    def _written(self, start: int) -> tuple[str, ...]:
        return tuple(name for name in self._homes if self.record.written(name, start))

    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Those that were ever written, where they lie."""
        return self._written(start), ()

    def process(self, start: int, stop: int, at: dict[str, int]) -> Sequence[Transfer]:
        """Begin to write them."""
        record = self.record
        return [
            record.write_to(*self._homes[name], name, start, stop, address, record.memory(name))
            for name, address in at.items()
        ]

    @property
    def nbytes(self) -> int:
        """Of the fields, whole."""
        return sum(map(self.record.field_nbytes, self._homes))

    @property
    def in_memory(self) -> bool:
        """No: it writes."""
        return False


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


class CheckPass(Pass):
    """Read all that was ever written of a record; the lane compares it with the hashes."""

    def __init__(self, record: Record, tile_numel: int) -> None:
        """Prepare to read `record`."""
        super().__init__(record)
        self._tile_numel = tile_numel

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Every tile."""
        return tiles(self.record.shard.numel, self._tile_numel)

    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """What was written of the tile."""
        return tuple(name for name in self.record.fields if self.record.written(name, start)), ()

    def process(self, start: int, stop: int, at: dict[str, int]) -> None:
        """Nothing is left to do."""


class Homes:
    """The places on NVMe of a durable run's fields that are in host memory; others are on NVMe already."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[tuple[Record, str], Home] = {}

    def place(self, record: Record, name: str) -> Home:
        """Return where a field can be read from NVMe, and its hashes."""
        return self._of.get((record, name)) or record.place(name)

    def passes(self, units: Sequence[Unit]) -> list[KeepPass]:
        """Return the passes that write fields in host memory which changed since they were last written."""
        changed = ((unit.record, self._changed(unit.record)) for unit in units)
        return [KeepPass(record, homes, record.tile_numel) for record, homes in changed if homes]

    def _changed(self, record: Record) -> dict[str, Home]:
        """Return a record's fields that are to be written, with their places."""
        homes = {}
        for name in record.form.fields:
            if name not in record or not record.in_host(name):
                self._leave(record, name)
            elif (record, name) not in self._of or name in record.changed_in_host:
                homes[name] = self._home(record, name)
                record.changed_in_host.discard(name)
        return homes

    def _home(self, record: Record, name: str) -> Home:
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

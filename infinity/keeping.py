"""Durable runs: fields in host memory, written to where a commit can name them; all of a record, compared."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from infinity.lanes import StreamLane
from infinity.passes import OutPass
from infinity.queueing import Pass
from infinity.record import Record
from infinity.shard import tiles
from infinity.store import Extent, Store
from infinity.unit import Unit

ABREAST_NBYTES = 4 << 20
"""Of what a commit writes from host memory, queued at a time: the forward's reads do not wait behind all."""


class KeepPass(OutPass):
    """Write one field from host memory, where it stays, to an extent."""

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Every tile that was ever written; of neighbours, as many at once as a slot would hold."""
        form = self.record.form
        wide = form.slot_nbytes * self._tile_numel // form.nbytes(self._name, self._tile_numel)
        begun = ended = 0
        for start, stop in super().tiles():
            if start > ended or stop - begun > wide * self._tile_numel:
                if ended > begun:
                    yield begun, ended
                begun = start
            ended = stop
        if ended > begun:
            yield begun, ended

    @property
    def nbytes(self) -> int:
        """Of the whole field."""
        return self.record.field_nbytes(self._name)

    @property
    def in_memory(self) -> bool:
        """No: it writes."""
        return False


def write_out(lane: StreamLane, passes: Sequence[KeepPass]) -> None:
    """Have a lane do passes, a few at a time, and return when they are finished. The last go first: in the
    other order each would stand in the way of the forward that uses its record just then.
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
    """Where a durable run writes the fields that lie in host memory; all else is where it lies."""

    def __init__(self, store: Store) -> None:
        """Take places from `store`."""
        self._store = store
        self._of: dict[tuple[Record, str], tuple[Extent, array[int]]] = {}

    def place(self, record: Record, name: str) -> tuple[Extent, array[int]]:
        """Return where a field can be read from the drive, and its tiles' hashes."""
        return self._of.get((record, name)) or record.place(name)

    def passes(self, units: Sequence[Unit], tile_numel: int) -> list[KeepPass]:
        """Return the passes that write what changed in host memory since it was last written."""
        jobs = []
        for unit in units:
            record = unit.record
            for name in record.form.fields:
                if name not in record or not record.in_host(name):
                    self._leave(record, name)
                elif (record, name) not in self._of or name in record.changed_in_host:
                    jobs.append(self._pass(record, name, tile_numel))
        return jobs

    def _pass(self, record: Record, name: str, tile_numel: int) -> KeepPass:
        """Return the pass that writes a field in host memory to its place."""
        home = self._of.get((record, name))
        if home is None:
            hashes = array("Q", bytes(8 * record.tile_count))
            home = self._store.allocate(record.field_nbytes(name), f"{record.name}.{name}"), hashes
            self._of[record, name] = home
        record.changed_in_host.discard(name)
        return KeepPass(record, name, *home, tile_numel)

    def _leave(self, record: Record, name: str) -> None:
        """Give back the place of a field that lies on NVMe by itself again."""
        home = self._of.pop((record, name), None)
        if home is not None:
            self._store.free(home[0])

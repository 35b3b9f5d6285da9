"""Walks of durable runs: a field in host memory to where a commit can name it; all of a record, compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infinity.passes import OutPass
from infinity.queueing import Pass
from infinity.record import Record
from infinity.shard import tiles


class KeepPass(OutPass):
    """Write one field from host memory, where it stays, to an extent."""

    @property
    def in_memory(self) -> bool:
        """No: it writes."""
        return False


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
        here = (name for name in self.record.form.fields if name in self.record)
        return tuple(name for name in here if self.record.written(name, start)), ()

    def process(self, start: int, stop: int, at: dict[str, int]) -> None:
        """Nothing is left to do."""

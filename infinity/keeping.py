"""Walks of durable runs: a field in host memory to where a commit can name it; all of a record, compared."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from infinity.queueing import Pass
from infinity.record import Record
from infinity.shard import tiles
from infinity.store import Extent, Transfer


class KeepPass(Pass):
    """Write one field from host memory, where it stays, to an extent."""

    def __init__(self, record: Record, name: str, to: Extent, hashes: array[int], tile_numel: int) -> None:
        """Prepare to write the field `name`; its tiles' hashes go to `hashes`."""
        super().__init__(record)
        self._name, self._to, self._hashes = name, to, hashes
        self._tile_numel = tile_numel

    @property
    def in_memory(self) -> bool:
        """No: it writes."""
        return False

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Every tile that was ever written."""
        for start, stop in tiles(self.record.shard.numel, self._tile_numel):
            if self.record.written(self._name, start):
                yield start, stop

    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """The field, where it lies."""
        return (self._name,), ()

    def process(self, start: int, stop: int, at: dict[str, int]) -> Sequence[Transfer]:
        """Begin to write it."""
        keeps = self.record.memory(self._name)
        return (self.record.write_to(self._to, self._hashes, self._name, start, stop, at[self._name], keeps),)


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
